# SPDX-License-Identifier: Apache-2.0
"""mode="auto": ReplaySSM, but in a pool so small that conventional steps are faster.

A conventional step reads and writes the state, where ReplaySSM's reads it beside some records. Where there is little
state, bytes do not decide but what a step does before it has them, and of that the conventional kernel has less.
Microseconds by FP32 states of a layer (one H200, 2026-11-30, b61f9e6, the shards b1d7906, `bench kernel`;
docs/performance.md, "Small batches"):

                                     conventional    ReplaySSM
    Super        1 row     4 MiB              3.7          4.6
                 2 rows    8 MiB              6.3          5.4
    Nano-4B      1 row   3.8 MiB              3.5          4.8
                 2 rows  7.5 MiB              6.3          5.7
    Super, one of 8 GPUs' heads
                 8 rows    4 MiB              3.8          5.6
                16 rows    8 MiB              6.4          7.2

The choice is a pool's, by the rows that it can decode at once, whatever step is at hand: a text's bits do not depend on
who decodes beside it.
"""

from __future__ import annotations

import torch

from .. import MambaGeometry

MODES = ("auto", "replay", "conventional")
# FP32 states of a layer, of all slots together, up to which conventional steps are faster.
CONVENTIONAL_BYTES = 4 * 2**20


def resolve(
    mode: str,
    device: torch.device,
    geometry: MambaGeometry,
    slots: int,
    *,
    window: int | str = "auto",
    checkpoint_format: str = "fp32",
    read_copy: str = "none",
    drafts: int = 0,
    deterministic: bool = False,
) -> str:
    """The mode of a pool of `slots` slots, "replay" or "conventional". The rest as Engine has it, drafts 0 without
    speculation.

    "auto" overrides nothing that was asked for: windows and formats other than the defaults are ReplaySSM's (a state of
    16 bits that is rounded at every token has larger errors). Nor do bits change with the number of slots where they
    shall be `deterministic`. On the CPU ReplaySSM's step is faster from one slot on.
    """
    if mode != "auto":
        return mode
    plain = (window, checkpoint_format, read_copy, drafts) == ("auto", "fp32", "none", 0)
    state_bytes = 4 * geometry.num_heads * geometry.head_dim * geometry.state_dim
    small = slots * state_bytes <= CONVENTIONAL_BYTES
    return "conventional" if plain and small and device.type == "cuda" and not deterministic else "replay"
