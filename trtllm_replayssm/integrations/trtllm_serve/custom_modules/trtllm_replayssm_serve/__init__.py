# SPDX-License-Identifier: Apache-2.0
"""For `trtllm-serve --custom_module_dirs`: importing this puts ReplaySSM into nemotron_h models."""

from trtllm_replayssm.integrations.trtllm_serve import model  # noqa: F401
