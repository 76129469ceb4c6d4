# SPDX-License-Identifier: Apache-2.0
"""Quantised linears of a rank, under TensorRT-LLM's names, and what config.json says of them.

Of a linear L [out, in] that becomes X, Model Optimizer's export beside TensorRT-LLM's legacy checkpoint:

    L.weight           X.weight                      NVFP4: two values a byte, FP8: one
    L.weight_scale     X.weights_scaling_factor      NVFP4: of blocks of 16 columns, FP8: one, [1]
    L.weight_scale_2   X.weights_scaling_factor_2    NVFP4 only, [1]
    L.input_scale      X.activation_scaling_factor   [1]

Values are cut, never changed: a block's scale stands for 16 columns, so a rank's columns must be a multiple of 16.
Linears that are put together (q | k | v) must have the same scales but for those of blocks.

TensorRT-LLM's quantised linears quantise their activations, too, and its embedding is never quantised. So embeddings,
and linears without an input_scale (weights only), become plain ones of the model's dtype: their values, rounded to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...runtime.model_config import CheckpointError
from ...runtime.quantization import BLOCK, NVFP4, input_scale
from ...runtime.weights import Weights
from .shards import EMBEDDING, Piece, Target

CONFIG = "quant_cfg.json"  # of mixed formats, beside config.json


def dequantized(target: Target, weights: Weights) -> tuple[str, ...]:
    """The quantised sources of a target that is a plain one nevertheless."""
    sources = tuple(piece.source for piece in target.pieces if piece.source in weights.quantized)
    plain = target.name == EMBEDDING or not any(input_scale(source) in weights for source in sources)
    return sources if plain else ()


def kept_format(target: Target, weights: Weights) -> str | None:
    """What a target is quantised as; None: it is plain. Its first source speaks for all."""
    if not target.pieces or dequantized(target, weights):
        return None
    return weights.quantized.get(target.pieces[0].source)


def with_scales(target: Target, weights: Weights) -> Iterator[Target]:
    """The target, or, if it is quantised, weight and scales."""
    if plain := dequantized(target, weights):
        pieces = tuple(replace(piece, dequantized=piece.source in plain) for piece in target.pieces)
        yield replace(target, pieces=pieces)
        return
    formats = {weights.quantized.get(piece.source) for piece in target.pieces} or {None}
    if formats == {None}:
        yield target
        return
    sources = [piece.source for piece in target.pieces]
    if len(formats) > 1:
        raise CheckpointError(f"{weights.checkpoint}: {sources} become one linear, but not all are of one format")
    (kind,), module = formats, target.name.removesuffix(".weight")
    rows, columns = target.shape
    pieces = target.pieces
    scales = [("activation_scaling_factor", input_scale)]
    if kind == NVFP4:
        scales.append(("weights_scaling_factor_2", lambda source: source + "_scale_2"))
        yield replace(
            target, dtype="uint8", shape=(rows, columns // 2), pieces=tuple(_packed(piece, 2) for piece in pieces)
        )
        blocks = tuple(replace(_packed(piece, BLOCK), source=piece.source + "_scale") for piece in pieces)
        yield Target(f"{module}.weights_scaling_factor", "float8_e4m3fn", (rows, columns // BLOCK), blocks)
    else:
        scales.append(("weights_scaling_factor", lambda source: source + "_scale"))
        yield replace(target, dtype="float8_e4m3fn")
    for name, scale in scales:
        shared = [scale(source) for source in dict.fromkeys(sources)]
        yield Target(f"{module}.{name}", "float32", (1,), (Piece(_one_of(shared, weights)),))


def quantization(targets: Iterable[Target], weights: Weights) -> tuple[dict, dict | None]:
    """config.json's "quantization" and, if formats are mixed, the content of quant_cfg.json. targets: of rank 0, before
    `with_scales`."""
    linears = {
        target.name.removesuffix(".weight"): kept_format(target, weights)
        for target in targets
        if len(target.shape) == 2 and target.name.endswith(".weight") and target.name != EMBEDDING
    }
    formats = set(linears.values()) - {None}
    common = {"kv_cache_quant_algo": None}
    if not formats:
        return {"quant_algo": None, **common}, None
    if len(formats) == 1:
        (kind,) = formats
        size = {"group_size": BLOCK} if kind == NVFP4 else {}
        plain = [module for module, given in linears.items() if given is None]
        return {"quant_algo": kind, **common, **size, "exclude_modules": plain}, None
    layers = {
        module: {"quant_algo": kind} | ({"group_size": BLOCK} if kind == NVFP4 else {})
        for module, kind in linears.items()
        if kind is not None
    }
    mixed = {"quant_algo": "MIXED_PRECISION", **common}
    return mixed, {**mixed, "quantized_layers": layers}


def _packed(piece: Piece, values: int) -> Piece:
    """The piece of a tensor that has one element for so many columns."""
    if piece.axis != 1:
        return piece
    if piece.start % BLOCK or piece.stop % BLOCK:
        raise CheckpointError(
            f"{piece.source!r}: NVFP4 columns {piece.start}..{piece.stop - 1} of a rank, expected whole blocks of "
            f"{BLOCK}; choose another tp"
        )
    return replace(piece, start=piece.start // values, stop=piece.stop // values)


def _one_of(names: list[str], weights: Weights) -> str:
    values = {}
    for name in names:
        if name not in weights:
            raise CheckpointError(
                f"{weights.checkpoint}: tensor {name!r} is missing, but of other parts of the same linear it is there"
            )
        values[name] = float(weights.stored(name))
    if len(set(values.values())) > 1:
        raise CheckpointError(f"{weights.checkpoint}: {values} become one linear with one such scale, but differ")
    return names[0]
