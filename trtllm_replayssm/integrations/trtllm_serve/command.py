# SPDX-License-Identifier: Apache-2.0
"""The command trtllm-module-dir."""

from . import MODULE_DIR


def add_commands(commands):
    """Adds it to the subparsers of `trtllm-replayssm`."""
    directory = commands.add_parser("trtllm-module-dir", help="the directory for trtllm-serve --custom_module_dirs")
    directory.set_defaults(run=_print)


def _print(options) -> int:
    print(MODULE_DIR)
    return 0
