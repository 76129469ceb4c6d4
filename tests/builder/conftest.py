# SPDX-License-Identifier: Apache-2.0
"""Checkpoints to build engines of."""

import pytest

from ..runtime.conftest import SMALL, write_checkpoint

# Nano-4B's 42 layers, 21 Mamba and 4 attention, and their first ten again; its head_dim and state_dim in narrow layers.
NANO = {
    key: value for key, value in SMALL.items() if "expert" not in key and "moe" not in key and "time_step" not in key
} | {
    "dtype": "bfloat16",
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-" + "M-M-M-MM-M",
    "hidden_size": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


@pytest.fixture(scope="session")
def nano(tmp_path_factory):
    """A random checkpoint of 52 layers."""
    return write_checkpoint(tmp_path_factory.mktemp("nano"), NANO)
