# SPDX-License-Identifier: Apache-2.0
"""What config.json of a TensorRT-LLM checkpoint says of a `nemotron_h` model, for shards.py and for model.py.

TensorRT-LLM's C++ runtime knows recurrent layers by two architecture names and gives each of them one block of memory a
sequence, of a size that config.json says in the words of its own models:

    bytes = 4 * (rnn_hidden_size / rnn_head_size) * state_size * rnn_head_size      FP32 elements, not divided by TP

Here rnn_hidden_size = rnn_head_size = 64 and state_size = slot bytes of a rank / 256, so that the block is a slot, to
the byte. A pool of convolution states is always allocated too; it is made as small as can be (one element), for the
convolution's ring is a part of the slot. What the model truly is stands under the key "replayssm", which TensorRT-LLM
carries along unread. This module needs no torch.
"""

from __future__ import annotations

from ... import _core

HYBRID, PURE = "RecurrentGemmaForCausalLM", "MambaForCausalLM"  # architectures that get an RnnStateManager
MODEL_CLASS = "ReplayNemotronHForCausalLM"
KEY = "replayssm"
FORMAT = 1
HEAD_SIZE = 64
SLOT_UNIT = 4 * HEAD_SIZE  # bytes that one of state_size stands for
# "linear": neither attention nor recurrent, so that the runtime keeps nothing for it.
LAYER_TYPES = {"mamba": "recurrent", "attention": "attention", "mlp": "linear"}


def read_block(config) -> dict:
    """The "replayssm" block of a loaded config.json (TensorRT-LLM's PretrainedConfig, or anything with its attributes).

    Raises:
        ValueError: there is none, or another version of trtllm-replayssm wrote it.
    """
    block = getattr(config, KEY, None)
    if not isinstance(block, dict):
        raise ValueError(f"config.json: key {KEY!r} is missing; `trtllm-replayssm convert` writes it")
    for name, expected in (("format", FORMAT), ("layout_version", _core.LAYOUT_VERSION)):
        if block.get(name) != expected:
            raise ValueError(
                f"config.json: {KEY}.{name} is {block.get(name)!r}, expected {expected}: convert the checkpoint again"
            )
    return block
