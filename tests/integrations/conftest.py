# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for TensorRT-LLM: without MoE layers, which its engine path cannot have."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from ..runtime.conftest import SMALL, TINY, write_checkpoint

# Sizes that eight ranks can share, with fewer key heads than ranks, every bias, and no bias of the convolution.
WIDE = {key: value for key, value in SMALL.items() if "expert" not in key and "moe" not in key} | {
    "dtype": "bfloat16",
    "hybrid_override_pattern": "M-M*M-",
    "hidden_size": 96,
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "n_groups": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "use_bias": True,
    "use_conv_bias": False,
    "mlp_bias": True,
}


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A random checkpoint of WIDE."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.fixture(scope="session")
def dense_tiny(tmp_path_factory):
    """The shipped checkpoint without its last layer, the MoE one, in float32; no token ends a text."""
    folder = tmp_path_factory.mktemp("dense-tiny")
    raw = json.loads((TINY / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if not {"mtp", "nextn", "eos"} & set(key.split("_"))}
    raw |= {"hybrid_override_pattern": "M-M*M", "num_hidden_layers": 5, "dtype": "float32", "torch_dtype": "float32"}
    raw["layers_block_type"] = raw["layers_block_type"][:5]
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(TINY / "tokenizer.json", folder)
    tensors = {}
    for path in sorted(TINY.glob("*.safetensors")):
        tensors |= load_file(path)
    kept = {
        name: tensor.float() for name, tensor in tensors.items() if not name.startswith(("mtp.", "backbone.layers.5."))
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
