# SPDX-License-Identifier: Apache-2.0
"""What every measurement shares: how its command is noted, its files written and its pictures drawn."""

from __future__ import annotations

import importlib
import os
import shlex
from pathlib import Path


def command_line(arguments: list[str]) -> str:
    """The command of these arguments, absolute paths cut down to their last part, for a record that others read."""
    portable = (Path(argument).name if argument.startswith("/") else argument for argument in arguments)
    return shlex.join(["trtllm-replayssm", *portable])


def write_atomically(file: Path, content: bytes) -> None:
    """Writes a whole file or leaves the old one."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def matplotlib():
    """matplotlib.pyplot without a display; ImportError says how to get it."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'trtllm-replayssm[eval]'") from None
