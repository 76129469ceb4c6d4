# SPDX-License-Identifier: Apache-2.0
"""What goes into a TensorRT-LLM checkpoint of a `nemotron_h` model: config.json, and which parts of which tensors make
the tensors of a rank.

Ranks are numbered stage by stage: rank = stage * tp + tp rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from ... import MambaGeometry, ReplayConfig, SlotLayout, _core
from ...builder.layer_plan import RankSlice
from ...runtime.model_config import ATTENTION, MAMBA, MLP, MOE, ModelConfig
from .checkpoint import FORMAT, HEAD_SIZE, HYBRID, KEY, LAYER_TYPES, MODEL_CLASS, PURE, SLOT_UNIT

EMBEDDING = "transformer.vocab_embedding.weight"


@dataclass(frozen=True)
class Parallelism:
    """How a model is spread. A rank is a part of one stage."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self):
        for name in ("tp", "pp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """The layers of a stage: as even as can be, the first ones larger, like tensorrt_llm.mapping's pp_layers."""
        least, larger = divmod(num_layers, self.pp)
        first = stage * least + min(stage, larger)
        return range(first, first + least + (stage < larger))


@dataclass(frozen=True)
class Piece:
    """Elements start..stop-1 along `axis` of a tensor of the source checkpoint; axis None: all of it. dequantized: of
    its values, not of what is stored."""

    source: str
    axis: int | None = None
    start: int = 0
    stop: int = 0
    dequantized: bool = False


@dataclass(frozen=True)
class Target:
    """A tensor of a rank: pieces put after each other along their first dimension."""

    name: str
    dtype: str  # a name of torch's
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class TensorRtLlmCheckpoint:
    """A model, how its states are kept, and how it is spread.

    Args:
        model: without MoE layers.
        replay: with max_step_tokens 1.
        parallelism: TP must divide heads, groups and sizes; refused where it does not.

    Raises:
        ValueError: what of the model cannot be had on this path, and why.
    """

    model: ModelConfig
    replay: ReplayConfig
    parallelism: Parallelism = Parallelism()

    def __post_init__(self):
        model, tp, pp = self.model, self.parallelism.tp, self.parallelism.pp
        if MOE in model.layers:
            raise ValueError(
                f"layer {model.layers.index(MOE)} is MoE: TensorRT-LLM 1.2's engine path has no relu2 experts "
                "(its Python activation map lacks them, and its loader expects gated weights); such models run on "
                "trtllm-serve"
            )
        if self.replay.max_step_tokens != 1:
            raise ValueError(
                f"max_step_tokens: expected 1, got {self.replay.max_step_tokens}: TensorRT-LLM refuses speculative "
                "decoding for recurrent models"
            )
        if pp > len(model.layers):
            raise ValueError(f"pp: expected at most the {len(model.layers)} layers, got {pp}")
        divisible = {
            "vocabulary": model.vocab_size,
            "Mamba heads": model.mamba_heads,
            "attention heads": model.attention_heads,
            "intermediate size": model.intermediate_size,
        }
        for what, size in divisible.items():
            if size is not None and size % tp:
                raise ValueError(f"tp: expected a divisor of the {what} {size}, got {tp}")
        if model.mamba_groups % tp:
            raise ValueError(
                f"tp: expected a divisor of the {model.mamba_groups} Mamba groups, got {tp}: the gated norm sums over "
                "all heads of a group, which would lie on several ranks"
            )
        if model.kv_heads is not None and model.kv_heads % tp and tp % model.kv_heads:
            raise ValueError(f"tp: expected a divisor or a multiple of the {model.kv_heads} key heads, got {tp}")

    @cached_property
    def rank_geometry(self) -> MambaGeometry:
        """Of a Mamba layer on one rank."""
        whole = self.model.geometry
        return RankSlice.of(whole, self.parallelism.tp, 0).geometry(whole)

    @cached_property
    def layout(self) -> SlotLayout:
        """Of a slot of one layer on one rank."""
        return SlotLayout(self.rank_geometry, self.replay)

    @property
    def config(self) -> dict:
        """config.json but for "quantization"."""
        model, replay = self.model, self.layout.config
        stride = self.layout.slot_stride
        if stride % SLOT_UNIT:
            raise RuntimeError(f"slot stride {stride} is no multiple of {SLOT_UNIT}")
        attention = ATTENTION in model.layers
        return {
            "architecture": HYBRID if attention else PURE,
            "dtype": model.dtype,
            "logits_dtype": "float32",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": len(model.layers),
            # Without attention they mean nothing, but the runtime divides by them and by TP.
            "num_attention_heads": model.attention_heads if attention else self.parallelism.tp,
            "num_key_value_heads": model.kv_heads if attention else self.parallelism.tp,
            "head_size": model.head_dim if attention else model.hidden_size,
            "intermediate_size": model.intermediate_size or model.hidden_size,
            "hidden_act": "squared-relu",
            "norm_epsilon": model.norm_eps,
            # No rotary embedding; none of another kind is added by the model class.
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": model.max_position_embeddings,
            "mapping": {
                "world_size": self.parallelism.world,
                "tp_size": self.parallelism.tp,
                "pp_size": self.parallelism.pp,
            },
            "layer_types": [LAYER_TYPES[kind] for kind in model.layers],
            "rnn_hidden_size": HEAD_SIZE,
            "rnn_head_size": HEAD_SIZE,
            "state_size": stride // SLOT_UNIT,
            "conv_kernel": 2,
            "rnn_conv_dim_size": 1,
            KEY: {
                "format": FORMAT,
                "model_class": MODEL_CLASS,
                "layout_version": _core.LAYOUT_VERSION,
                "layers": list(model.layers),
                "geometry": asdict(model.geometry),
                "rank_slot_bytes": stride,
                "window": replay.window,
                "checkpoint_format": replay.checkpoint,
                "read_copy": replay.read_copy,
                "seed": str(replay.seed),
                "time_step_limit": [None if math.isinf(limit) else limit for limit in model.time_step_limit],
                "mamba_bias": model.mamba_bias,
                "mlp_bias": model.mlp_bias,
            },
        }

    def targets(self, rank: int) -> Iterator[Target]:
        """The tensors of rank{rank}.safetensors, by the names of the model class's parameters."""
        model, (stage, tp_rank) = self.model, divmod(rank, self.parallelism.tp)
        slicer = _Slicer(model, self.parallelism.tp, tp_rank)
        layers = self.parallelism.stage_layers(len(model.layers), stage)
        if stage == 0:
            yield slicer.whole(EMBEDDING, "backbone.embeddings.weight", model.hidden_size)
        for local, index in enumerate(layers):
            source, name = f"backbone.layers.{index}.", f"transformer.layers.{local}."
            norm = f"{name}input_layernorm.weight"
            yield Target(norm, model.dtype, (model.hidden_size,), (Piece(source + "norm.weight"),))
            make = {MAMBA: slicer.mamba, ATTENTION: slicer.attention, MLP: slicer.mlp}[model.layers[index]]
            yield from make(name, source + "mixer.")
        if stage == self.parallelism.pp - 1:
            yield Target(
                "transformer.ln_f.weight", model.dtype, (model.hidden_size,), (Piece("backbone.norm_f.weight"),)
            )
            head = "backbone.embeddings.weight" if model.tie_word_embeddings else "lm_head.weight"
            yield slicer.rows("lm_head.weight", head, [slicer.share(model.vocab_size)], model.hidden_size)


class _Slicer:
    """A tensor-parallel rank's share. Sections that lie after each other in a tensor are cut one by one."""

    def __init__(self, model: ModelConfig, tp: int, rank: int):
        self.model, self.tp, self.rank = model, tp, rank
        self.part = RankSlice.of(model.geometry, tp, rank)

    def share(self, size: int) -> range:
        return range(self.rank * size // self.tp, (self.rank + 1) * size // self.tp)

    def whole(self, name: str, source: str, columns: int) -> Target:
        return Target(name, self.model.dtype, (self.model.vocab_size, columns), (Piece(source),))

    def rows(self, name: str, source: str, spans, *columns: int, dtype: str | None = None) -> Target:
        """spans: of the source's rows, one after the other."""
        pieces = tuple(Piece(source, 0, span.start, span.stop) for span in spans)
        return Target(name, dtype or self.model.dtype, (sum(map(len, spans)), *columns), pieces)

    def columns(self, name: str, source: str, rows: int, size: int) -> Target:
        span = self.share(size)
        return Target(name, self.model.dtype, (rows, len(span)), (Piece(source, 1, span.start, span.stop),))

    def shared_bias(self, name: str, source: str) -> Target:
        """The bias of a row-parallel linear: every rank has it, and TensorRT-LLM adds it after the sum over ranks."""
        return Target(name, self.model.dtype, (self.model.hidden_size,), (Piece(source),))

    def mamba(self, name: str, source: str) -> Iterator[Target]:
        model, name = self.model, name + "mamba."
        whole, heads = model.geometry, [self.part.heads]
        conv, projected = self.part.conv_channels(whole), self.part.in_proj_rows(whole)
        yield self.rows(name + "in_proj.weight", source + "in_proj.weight", projected, model.hidden_size)
        if model.mamba_bias:
            yield self.rows(name + "in_proj.bias", source + "in_proj.bias", projected)
        yield self.rows(name + "conv_weight", source + "conv1d.weight", conv, model.conv_kernel)
        if model.conv_bias:
            yield self.rows(name + "conv_bias", source + "conv1d.bias", conv)
        else:
            yield Target(name + "conv_bias", model.dtype, (sum(map(len, conv)),), ())
        for vector in ("A_log", "D", "dt_bias"):
            yield self.rows(name + vector, source + vector, heads, dtype="float32")
        yield self.rows(name + "norm.weight", source + "norm.weight", [self.share(model.d_inner)])
        yield self.columns(name + "out_proj.weight", source + "out_proj.weight", model.hidden_size, model.d_inner)
        if model.mamba_bias:
            yield self.shared_bias(name + "out_proj.bias", source + "out_proj.bias")

    def attention(self, name: str, source: str) -> Iterator[Target]:
        """q | k | v of the rank's heads. Where there are fewer key heads than ranks, several ranks have the same."""
        model, name = self.model, name + "attention."
        head, hidden = model.head_dim, model.hidden_size
        first = self.rank * model.kv_heads // self.tp
        keys = range(first, first + max(1, model.kv_heads // self.tp))
        pieces = []
        for projection, heads in (("q", self.share(model.attention_heads)), ("k", keys), ("v", keys)):
            pieces.append(Piece(f"{source}{projection}_proj.weight", 0, heads.start * head, heads.stop * head))
        rows = sum(piece.stop - piece.start for piece in pieces)
        yield Target(name + "qkv.weight", model.dtype, (rows, hidden), tuple(pieces))
        yield self.columns(name + "dense.weight", source + "o_proj.weight", hidden, model.attention_heads * head)

    def mlp(self, name: str, source: str) -> Iterator[Target]:
        model, name = self.model, name + "mlp."
        size, hidden = model.intermediate_size, model.hidden_size
        yield self.rows(name + "fc.weight", source + "up_proj.weight", [self.share(size)], hidden)
        if model.mlp_bias:
            yield self.rows(name + "fc.bias", source + "up_proj.bias", [self.share(size)])
        yield self.columns(name + "proj.weight", source + "down_proj.weight", hidden, size)
        if model.mlp_bias:
            yield self.shared_bias(name + "proj.bias", source + "down_proj.bias")
