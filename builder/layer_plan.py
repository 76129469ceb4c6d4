# SPDX-License-Identifier: Apache-2.0
"""How every Mamba-2 layer of a checkpoint is rewritten: its sizes on a rank, and the slot that keeps its state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from .. import MambaGeometry, ReplayConfig, SlotLayout
from ..runtime.model_config import MAMBA, CheckpointError, ModelConfig
from ..runtime.tensor_parallel import RankSlice

STATE_KEY = "replayssm"  # of a config.json that says how states are to be kept, in the words of `slot_json`


@dataclass(frozen=True)
class ReplayLayerPlan:
    """A Mamba-2 layer on one rank.

    layer: its number in the model. name: of its mixer's tensors. replay: with a number for its window.
    """

    layer: int
    name: str
    geometry: MambaGeometry
    replay: ReplayConfig
    slice: RankSlice

    @cached_property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.geometry, self.replay)

    @property
    def slot_bytes(self) -> int:
        """Of a sequence's state."""
        return self.layout.slot_stride

    @property
    def state_bytes(self) -> int:
        """Of one FP32 state alone, as conventional decoding keeps it, and once more for every token of a draft."""
        return 4 * self.geometry.num_heads * self.geometry.head_dim * self.geometry.state_dim

    def to_json(self) -> dict:
        return {"layer": self.layer, "name": self.name, **slot_json(self.layout), "tp": _slice_json(self.slice)}


def plan_layers(model: ModelConfig, replay: ReplayConfig, tp: int = 1, rank: int = 0) -> list[ReplayLayerPlan]:
    """One plan for each Mamba-2 layer of the language model.

    Raises:
        ValueError: heads or groups cannot be divided among `tp` ranks.
    """
    whole = model.geometry
    part = RankSlice.of(whole, tp, rank)
    geometry = part.geometry(whole)
    config = SlotLayout(geometry, replay).config
    return [
        ReplayLayerPlan(layer, f"backbone.layers.{layer}.mixer", geometry, config, part)
        for layer, kind in enumerate(model.layers)
        if kind == MAMBA
    ]


def recommended(checkpoint: str | Path) -> dict:
    """What a checkpoint's config.json says of how states be kept; empty if nothing."""
    path = Path(checkpoint) / "config.json"
    value = json.loads(path.read_text(encoding="utf-8")).get(STATE_KEY, {})
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {STATE_KEY!r} is {value!r}, expected an object")
    return value


def slot_json(layout: SlotLayout) -> dict:
    """How a slot is kept, for readers that have no library to ask."""
    config = layout.config
    return {
        "geometry": asdict(layout.geometry),
        "checkpoint": config.checkpoint,
        "read_copy": config.read_copy,
        "activation": config.activation,
        "window": config.window,
        "max_step_tokens": config.max_step_tokens,
        "layout_version": layout.version,
        "slot_bytes": layout.slot_stride,
        "sections": {name: section._asdict() for name, section in layout.sections.items()},
    }


def _slice_json(part: RankSlice) -> dict:
    spans = {name: [span.start, span.stop] for name, span in (("heads", part.heads), ("groups", part.groups))}
    return {"size": part.tp, "rank": part.rank, **spans}
