# SPDX-License-Identifier: Apache-2.0
"""A `nemotron_h` checkpoint as ONNX graphs: our plugins for the Mamba-2 layers, standard nodes for everything else.

Two graphs over one file of weights: the language model, and its head for multi-token prediction. A graph serves steps
(S = 1..T_max tokens a row) and prompt chunks (more) alike; docs/engines.md lists inputs and outputs.

Numbers as in the embedded runtime: dense layers in the model's dtype; sum of the layers, norms and router in fp32. Its
logits are the exception: fp32 from the product's 16 bits, as a 16-bit product of TensorRT has no other result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from onnx import ModelProto, TensorProto

from ..runtime.model_config import ATTENTION, MAMBA, MLP, MOE, CheckpointError, ModelConfig
from ..runtime.quantization import BLOCK, Nvfp4
from ..runtime.weights import Weights
from .engine_config import EngineConfig, Pool
from .graph import Graph
from .mixers import Mixers
from .weight_file import KINDS, WeightFile

MODEL, MTP, WEIGHTS = "model.onnx", "mtp.onnx", "weights.bin"
MOST_DENSE_EXPERTS = 16
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FP32 = torch.float32


def export(
    checkpoint: str | Path,
    folder: Path,
    config: EngineConfig,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    allow: Sequence[str] = (),
) -> tuple[ModelConfig, Pool]:
    """Writes MODEL, MTP (if drafts are asked for and the checkpoint has the head for them) and WEIGHTS into `folder`.

    Returns the checkpoint's configuration, with MTP layers only if their tensors are there.

    Raises:
        CheckpointError: the checkpoint is incomplete or has something that no graph can hold, before anything is
            written.
    """
    model = ModelConfig.read(checkpoint)
    weights = Weights(checkpoint, model, allow)
    if not weights.has_mtp:
        model = replace(model, mtp_layers=(), mtp_depths=0)
    with_mtp = config.draft_tokens > 0 and weights.has_mtp
    if with_mtp and (model.mtp_depths > 1 or MAMBA in model.mtp_layers):
        raise CheckpointError(
            f"{checkpoint}: num_nextn_predict_layers is {model.mtp_depths} and the MTP layers are "
            f"{', '.join(model.mtp_layers)}; expected one MTP layer, without Mamba"
        )
    if factor := dense_moe_factor(model, with_mtp):
        if model.experts > MOST_DENSE_EXPERTS and not config.allow_dense_moe:
            raise CheckpointError(
                f"{checkpoint}: MoE layers of {model.experts} experts, expected at most {MOST_DENSE_EXPERTS}: a graph "
                f"evaluates every expert for every token, which takes {model.experts_per_token}: {factor:.1f} times "
                "the arithmetic of the routed experts; allow_dense_moe (--allow-dense-moe) builds it all the same"
            )
    if config.max_seq_len > model.max_position_embeddings:
        warnings.warn(
            f"max_seq_len is {config.max_seq_len}, but {checkpoint} was made for at most "
            f"{model.max_position_embeddings} tokens (max_position_embeddings)",
            stacklevel=2,
        )
    pool = Pool.of(model.geometry, config, model.layers.count(MAMBA))
    with WeightFile(folder / WEIGHTS) as file:
        for name, build in ((MODEL, _language_model), (MTP, _mtp_head)):
            if name == MODEL or with_mtp:
                graph = Graph(name.removesuffix(".onnx"), file, _TORCH[config.dtype])
                layers = Layers(graph, model, weights, config, pool, progress)
                (folder / name).write_bytes(build(layers).SerializeToString())
    return model, pool


def dense_moe_factor(model: ModelConfig, with_mtp: bool) -> float | None:
    """How much more arithmetic a MoE layer's routed experts do than a router asks for; None without such layers."""
    layers = model.layers + (model.mtp_layers if with_mtp else ())
    return model.experts / model.experts_per_token if MOE in layers else None


def _language_model(layers: Layers) -> ModelProto:
    graph, model = layers.graph, layers.model
    token_ids = layers.rows(accepted=True)
    hidden = layers.stack(layers.embedded(token_ids), "backbone.layers.", model.layers, "backbone.norm_f")
    layers.head(hidden)
    return graph.model()


def _mtp_head(layers: Layers) -> ModelProto:
    """From the model's hidden state after token t and token t+1 (the input), predicts token t+2."""
    graph, model = layers.graph, layers.model
    token_ids = layers.rows(accepted=False)
    states = graph.input("hidden", layers.kind, ["B", "S", model.hidden_size])
    first, last = "mtp.layers.0.", f"mtp.layers.{len(model.mtp_layers) - 1}."
    both = [
        layers.norm(first + "enorm", layers.embedded(token_ids)),
        layers.norm(first + "hnorm", graph.node("Cast", "hidden/fp32", states, to=TensorProto.FLOAT)),
    ]
    merged = layers.linear(first + "eh_proj", graph.node("Concat", "merged", *both, axis=-1))
    residual = graph.node("Cast", "merged/fp32", merged, to=TensorProto.FLOAT)
    layers.head(layers.stack(residual, "mtp.layers.", model.mtp_layers, last + "final_layernorm"))
    return graph.model()


class CacheRows(NamedTuple):
    """What attention layers share. S new tokens of a row stand at positions `first` and on.

    live: bool [B, S, 1], which of them the row has. write_at: INT64 [B], where their keys and values go.
    first: INT32 [B, 1]. steps: INT32 [S], 0 … S - 1.
    """

    live: str
    write_at: str
    first: str
    steps: str


class Layers:
    """Layers of a graph by the names of their tensors, which are also the names of the nodes. Values are [B, S, …]."""

    def __init__(
        self,
        graph: Graph,
        model: ModelConfig,
        weights: Weights,
        config: EngineConfig,
        pool: Pool,
        progress: Callable[[str, int, int], None],
    ):
        self.graph, self.model, self.config = graph, model, config
        self.kind = KINDS[graph.dtype]
        self._weights, self._progress = weights, progress
        self._mixers = Mixers(graph, pool, config.state_io)
        self._mamba_layers = self._attention_layers = 0  # so far

    # ---- what rows bring ----

    def rows(self, accepted: bool) -> str:
        """The inputs that say what the rows bring. Returns token_ids.

        accepted: of a graph with state; it gets the slots too, and plans.
        """
        graph = self.graph
        self._token_ids = graph.input("token_ids", TensorProto.INT32, ["B", "S"])
        self._tokens = graph.input("tokens", TensorProto.INT32, ["B"])
        if accepted:
            slots, given = (graph.input(name, TensorProto.INT32, ["B"]) for name in ("slots", "accepted"))
            self._mixers.plan(slots, self._tokens, given, self._token_ids)
        return self._token_ids

    @cached_property
    def _cache_rows(self) -> CacheRows:
        graph = self.graph
        positions = graph.input("positions", TensorProto.INT32, ["B"])
        count = graph.node("Shape", "rows/shape", self._token_ids, start=1, end=2)
        count = graph.node("Cast", "rows/count", count, to=TensorProto.INT32)
        limits = graph.constant("int.0", 0, torch.int32), graph.node("Squeeze", "rows/end", count)
        steps = graph.node("Range", "rows/steps", *limits, graph.constant("int.1", 1, torch.int32))
        column = graph.constant("axis.1", [1], torch.int64)
        live = graph.node("Less", "rows/live", steps, graph.node("Unsqueeze", "rows/tokens", self._tokens, column))
        return CacheRows(
            live=graph.node("Unsqueeze", "rows/live_column", live, graph.constant("axis.2", [2], torch.int64)),
            write_at=graph.node("Cast", "rows/write_at", positions, to=TensorProto.INT64),
            first=graph.node("Unsqueeze", "rows/first", positions, column),
            steps=steps,
        )

    @cached_property
    def _mask(self) -> str:
        """bool [B, 1, sharing · S, capacity], the keys that a token sees, as often as query heads share a key head."""
        graph, model, rows = self.graph, self.model, self._cache_rows
        sharing = graph.constant("heads.sharing", [model.attention_heads // model.kv_heads, 1], torch.int64)
        steps = graph.node("Expand", "rows/each", rows.steps, sharing)
        steps = graph.node("Reshape", "rows/shared", steps, graph.constant("all", [-1], torch.int64))
        at = graph.node("Add", "rows/positions", rows.first, steps)
        at = graph.node("Unsqueeze", "rows/positions_4d", at, graph.constant("axes.1.3", [1, 3], torch.int64))
        keys = graph.constant("key_positions", torch.arange(self.config.kv_capacity), torch.int32)
        return graph.node("LessOrEqual", "rows/mask", keys, at)

    @cached_property
    def _lengths(self) -> str:
        """INT32 [B], keys that the last of S tokens sees."""
        rows, graph = self._cache_rows, self.graph
        last = graph.node("Add", "rows/last", rows.first, graph.node("ReduceMax", "rows/last_step", rows.steps))
        last = graph.node("Squeeze", "rows/last_1d", last, graph.constant("axis.1", [1], torch.int64))
        return graph.node("Add", "rows/lengths", last, graph.constant("int.1", 1, torch.int32))

    # ---- dense pieces ----

    def embedded(self, token_ids: str) -> str:
        rows = self.graph.node("Gather", "embedded", self._tensor("backbone.embeddings.weight"), token_ids)
        return self._cast(rows, TensorProto.FLOAT)

    def head(self, hidden: str) -> None:
        """The outputs."""
        graph, model = self.graph, self.model
        graph.output(hidden, self.kind, ["B", "S", model.hidden_size])
        if model.tie_word_embeddings:
            weight = graph.node("Transpose", "head/weight", self._tensor("backbone.embeddings.weight"), perm=[1, 0])
        else:
            weight = self._transposed("lm_head.weight")
        logits = graph.node("MatMul", "head/product", hidden, weight)
        graph.node("Cast", "head/fp32", logits, output="logits", to=TensorProto.FLOAT)
        graph.output("logits", TensorProto.FLOAT, ["B", "S", model.vocab_size])

    def linear(self, name: str, x: str, bias: bool = False) -> str:
        packed = self._weights.nvfp4(name + ".weight")
        if packed is None:
            y = self.graph.node("MatMul", name, x, self._transposed(name + ".weight"))
        else:
            y = self._nvfp4(name, x, packed)
        return self.graph.node("Add", name + "/biased", y, self._tensor(name + ".bias")) if bias else y

    def _nvfp4(self, name: str, x: str, linear: Nvfp4) -> str:
        """Weights and activations in NVFP4: TensorRT makes one product of four-bit numbers of it."""
        graph = self.graph
        scale = graph.weight(name + ".weight_scale_2", lambda: linear.scale)
        weight = self._from_fp4(
            name + "/weight",
            graph.weight(name + ".weight", lambda: linear.codes),
            graph.weight(name + ".weight_scale", lambda: linear.block_scales),
            scale,
        )
        input_scale = graph.weight(name + ".input_scale", lambda: linear.input_scale)
        x = self._from_fp4(name + "/x", *graph.fp4(name + "/x4", x, input_scale), input_scale)
        return graph.node("MatMul", name, x, graph.node("Transpose", name + "/transposed", weight, perm=[1, 0]))

    def _from_fp4(self, name: str, codes: str, block_scales: str, scale: str) -> str:
        scales = self.graph.node("DequantizeLinear", name + "/scales", block_scales, scale)
        values = self.graph.node("DequantizeLinear", name + "/fp32", codes, scales, axis=-1, block_size=BLOCK)
        return self._cast(values, self.kind, name)

    def norm(self, name: str, x: str, output: str | None = None) -> str:
        """Of an fp32 x, in the model's dtype."""
        scale = self._tensor(name + ".weight", _FP32)
        y = self.graph.node("RMSNormalization", name, x, scale, axis=-1, epsilon=self.model.norm_eps)
        return self._cast(y, self.kind, output)

    def stack(self, residual: str, prefix: str, kinds: tuple[str, ...], final_norm: str) -> str:
        """Pre-norm residual layers and the norm after the last one. The sum is fp32."""
        build = {MAMBA: self._mamba, ATTENTION: self._attention, MLP: self._mlp, MOE: self._moe}
        for index, kind in enumerate(kinds):
            self._progress(f"writing {self.graph.name}", index, len(kinds))
            name = f"{prefix}{index}."
            y = build[kind](name + "mixer.", self.norm(name + "norm", residual))
            residual = self.graph.node("Add", name + "sum", residual, self._cast(y, TensorProto.FLOAT))
        self._progress(f"writing {self.graph.name}", len(kinds), len(kinds))
        return self.norm(final_norm, residual, output="hidden_states")

    # ---- the four kinds of layers ----

    def _mamba(self, name: str, x: str) -> str:
        graph, model = self.graph, self.model
        layer = self._mamba_layers
        self._mamba_layers += 1
        projected = self.linear(name + "in_proj", x, model.mamba_bias)
        conv = name + "conv1d."
        weight = graph.weight(conv + "weight", lambda: self._read(conv + "weight").squeeze(1))
        bias = conv + "bias"
        bias = self._tensor(bias) if model.conv_bias else graph.constant(bias, torch.zeros(model.conv_channels), _FP32)
        A_log, D, dt_bias = (self._tensor(name + own, _FP32) for own in ("A_log", "D", "dt_bias"))
        y = self._mixers(layer, name, projected, (weight, bias), A_log, D, dt_bias, model.time_step_limit)
        bounds = (graph.constant(f"z.{end}", [at], torch.int64) for end, at in (("begin", 0), ("end", model.d_inner)))
        z = graph.node("Slice", name + "z", projected, *bounds, graph.constant("axis.2", [2], torch.int64))
        # Mamba-2 gates before it norms, and norms in groups.
        z, y = self._cast(z, TensorProto.FLOAT), self._cast(y, TensorProto.FLOAT)
        gate = graph.node("Mul", name + "gate", z, graph.node("Sigmoid", name + "sigmoid", z))
        y = graph.node("Mul", name + "gated", y, gate)
        if model.mamba_groups == 1:
            return self.linear(name + "out_proj", self.norm(name + "norm", y), model.mamba_bias)
        per_group = model.d_inner // model.mamba_groups
        grouped = graph.constant("groups", [0, 0, model.mamba_groups, per_group], torch.int64)
        y = graph.node("Reshape", name + "grouped", y, grouped)
        ones = graph.constant("groups.ones", torch.ones(per_group), _FP32)
        y = graph.node("RMSNormalization", name + "norm", y, ones, axis=-1, epsilon=model.norm_eps)
        y = graph.node("Reshape", name + "flat", y, graph.constant("flat", [0, 0, model.d_inner], torch.int64))
        y = graph.node("Mul", name + "normed", y, self._tensor(name + "norm.weight", _FP32))
        return self.linear(name + "out_proj", self._cast(y, self.kind), model.mamba_bias)

    def _attention(self, name: str, x: str) -> str:
        """Keys and values of a row's new tokens go to `positions` of its cache row. What stands behind the row's tokens
        is undefined and would be written too: 0 takes its place, since a masked value still meets a weight of 0, and
        0 · NaN is NaN.
        """
        graph, model, rows = self.graph, self.model, self._cache_rows
        layer = self._attention_layers
        self._attention_layers += 1
        x = graph.node("Where", name + "live", rows.live, x, graph.constant("zero", 0, graph.dtype))
        q = self._heads(name + "q", self.linear(name + "q_proj", x), model.attention_heads)
        cached = []
        for key, cache in (("k", "key_cache"), ("v", "value_cache")):
            shape = ["B", model.kv_heads, self.config.kv_capacity, model.head_dim]
            old, new = graph.input(f"{cache}.{layer}", self.kind, shape), f"new_{cache}.{layer}"
            update = self._heads(name + key, self.linear(f"{name}{key}_proj", x), model.kv_heads)
            scatter = dict(output=new, axis=-2, mode="linear")
            cached.append(graph.node("TensorScatter", f"{name}{key}_cache", old, update, rows.write_at, **scatter))
            graph.output(new, self.kind, shape)
        y = (self._trt_attention if self.config.trt_attention else self._masked_attention)(name, q, *cached)
        y = graph.node("Transpose", name + "by_token", y, perm=[0, 2, 1, 3])
        width = model.attention_heads * model.head_dim
        y = graph.node("Reshape", name + "joined", y, graph.constant("joined", [0, 0, width], torch.int64))
        return self.linear(name + "o_proj", y)

    def _masked_attention(self, name: str, q: str, keys: str, values: str) -> str:
        """The query heads of a key head stand in for query tokens: TensorRT would copy the cache for each of them."""
        graph, model = self.graph, self.model
        shape = graph.constant("heads.shared", [0, model.kv_heads, -1, model.head_dim], torch.int64)
        q = graph.node("Reshape", name + "q/shared", q, shape)
        y = graph.node("Attention", name + "attention", q, keys, values, self._mask)
        shape = graph.constant("heads.each", [0, model.attention_heads, -1, model.head_dim], torch.int64)
        return graph.node("Reshape", name + "each", y, shape)

    def _trt_attention(self, name: str, q: str, keys: str, values: str) -> str:
        """TensorRT's own node, which reads a row's keys only as far as they go. It ignores `scale`: q is scaled."""
        graph = self.graph
        scale = graph.constant("attention_scale", self.model.head_dim**-0.5, _FP32)
        q = graph.node("Mul", name + "scaled", self._cast(q, TensorProto.FLOAT), scale)
        inputs = self._cast(q, self.kind), keys, values, "", "", self._lengths
        return graph.node("TRT_Attention", name + "attention", *inputs, domain="trt", causal_kind="lower_right")

    def _heads(self, name: str, x: str, heads: int) -> str:
        """[B, S, heads · d] -> [B, heads, S, d]."""
        shape = self.graph.constant(f"heads.{heads}", [0, 0, heads, self.model.head_dim], torch.int64)
        x = self.graph.node("Reshape", name + "/heads", x, shape)
        return self.graph.node("Transpose", name + "/by_head", x, perm=[0, 2, 1, 3])

    def _mlp(self, name: str, x: str) -> str:
        bias = self.model.mlp_bias
        return self.linear(name + "down_proj", self._relu2(name, self.linear(name + "up_proj", x, bias)), bias)

    def _relu2(self, name: str, x: str) -> str:
        x = self.graph.node("Relu", name + "relu", x)
        return self.graph.node("Mul", name + "relu2", x, x)

    def _moe(self, name: str, x: str) -> str:
        """All experts over all tokens as two matrix products, weighted by 0 where not chosen."""
        graph, model = self.graph, self.model
        experts = [f"{name}experts.{expert}." for expert in range(model.experts)]
        chosen = self._cast(self._router(name, x), self.kind)
        inner = self.linear(name + "fc1_latent_proj", x, model.mlp_bias) if model.latent_size else x

        def up() -> torch.Tensor:  # [width, experts · size]
            return torch.cat([self._read(expert + "up_proj.weight") for expert in experts]).T

        def down() -> torch.Tensor:  # [experts · size, width]
            return torch.cat([self._read(expert + "down_proj.weight").T for expert in experts])

        y = graph.node("MatMul", name + "experts.up", inner, graph.weight(name + "experts.up_proj.weight", up))
        y = self._relu2(name + "experts.", y)
        shape = graph.constant("experts", [0, 0, model.experts, model.expert_size], torch.int64)
        y = graph.node("Reshape", name + "experts.each", y, shape)
        last = graph.constant("axis.3", [3], torch.int64)
        y = graph.node("Mul", name + "experts.chosen", y, graph.node("Unsqueeze", name + "chosen", chosen, last))
        shape = graph.constant("experts.joined", [0, 0, model.experts * model.expert_size], torch.int64)
        y = graph.node("Reshape", name + "experts.joined", y, shape)
        y = graph.node("MatMul", name + "experts.down", y, graph.weight(name + "experts.down_proj.weight", down))
        if model.latent_size:
            y = self.linear(name + "fc2_latent_proj", y, model.mlp_bias)
        return graph.node("Add", name + "both", y, self._mlp(name + "shared_experts.", x))

    def _router(self, name: str, x: str) -> str:
        """fp32 [B, S, experts]: a token's weight for each expert, 0 for those not chosen."""
        graph, model = self.graph, self.model
        gate = name + "gate."
        x = self._cast(x, TensorProto.FLOAT)
        scores = graph.node("MatMul", gate + "product", x, self._transposed(gate + "weight", _FP32))
        scores = graph.node("Sigmoid", gate + "scores", scores)
        correction = self._tensor(gate + "e_score_correction_bias", _FP32)
        preference = graph.node("Add", gate + "preference", scores, correction)
        zeros = graph.node("Sub", gate + "zeros", scores, scores)
        if model.expert_groups_per_token < model.expert_groups:
            preference = self._within_best_groups(gate, preference)
        experts = self._best(gate + "experts", preference, model.experts_per_token)[1]
        weights = graph.node("GatherElements", gate + "weights", scores, experts, axis=2)
        if model.normalize_expert_weights:
            total = graph.node("ReduceSum", gate + "total", weights, graph.constant("axis.last", [-1], torch.int64))
            total = graph.node("Add", gate + "divisor", total, graph.constant("tiny", 1e-20, _FP32))
            weights = graph.node("Div", gate + "shares", weights, total)
        scale = graph.constant("expert_scale", model.expert_scale, _FP32)
        weights = graph.node("Mul", gate + "scaled", weights, scale)
        return graph.node("ScatterElements", gate + "spread", zeros, experts, weights, axis=2)

    def _within_best_groups(self, gate: str, preference: str) -> str:
        """-inf outside of a token's best groups of experts. A group counts by its two best."""
        graph, model = self.graph, self.model
        shape = [0, 0, model.expert_groups, model.experts // model.expert_groups]
        grouped = graph.node(
            "Reshape", gate + "grouped", preference, graph.constant("expert_groups", shape, torch.int64)
        )
        two = self._best(gate + "two_best", grouped, 2)[0]
        last = graph.constant("axis.last", [-1], torch.int64)
        worth = graph.node("ReduceSum", gate + "worth", two, last, keepdims=0)
        values, _ = self._best(gate + "groups", worth, model.expert_groups_per_token)
        least = graph.node("ReduceMin", gate + "least", values, last)
        open_ = graph.node("GreaterOrEqual", gate + "open", worth, least)
        open_ = graph.node("Unsqueeze", gate + "open_column", open_, graph.constant("axis.3", [3], torch.int64))
        grouped = graph.node("Where", gate + "limited", open_, grouped, graph.constant("minus_inf", -torch.inf, _FP32))
        shape = graph.constant("experts.flat", [0, 0, model.experts], torch.int64)
        return graph.node("Reshape", gate + "flat", grouped, shape)

    # ---- weights ----

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._weights.read(name, dtype or self.graph.dtype, torch.device("cpu"))

    def _tensor(self, name: str, dtype: torch.dtype | None = None) -> str:
        return self.graph.weight(name, lambda: self._read(name, dtype))

    def _transposed(self, name: str, dtype: torch.dtype | None = None) -> str:
        return self.graph.weight(name, lambda: self._read(name, dtype).T)

    def _best(self, name: str, x: str, count: int) -> tuple[str, str]:
        """Values and indices of the largest in the last dimension."""
        return self.graph.top_k(name, x, self.graph.constant(f"best.{count}", [count], torch.int64))

    def _cast(self, x: str, kind: int, output: str | None = None) -> str:
        """x in another dtype; x itself if the graph computes in it anyway."""
        if kind == TensorProto.FLOAT and self.kind == TensorProto.FLOAT and output is None:
            return x
        name = f"{x}/{TensorProto.DataType.Name(kind).lower()}"
        return self.graph.node("Cast", name, x, output=output, to=kind)
