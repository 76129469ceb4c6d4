# SPDX-License-Identifier: Apache-2.0
"""Writes a TensorRT-LLM checkpoint, tensor by tensor: memory for one tensor is enough."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import ReplayConfig
from ...builder.bundle import being_written
from ...builder.engine_config import ACTIVATIONS
from ...builder.layer_plan import recommended
from ...runtime.model_config import CheckpointError, ModelConfig
from ...runtime.weights import Weights
from .quantized_shards import CONFIG as QUANT_CONFIG
from .quantized_shards import dequantized, kept_format, quantization, with_scales
from .shards import Parallelism, Target, TensorRtLlmCheckpoint

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


@dataclass(frozen=True)
class Converted:
    """config: config.json's content. bytes: of each rank's file. dropped: what of the source is not taken along, and
    why. dequantized: quantised weights of the source that are plain ones now (quantized_shards.py says which)."""

    config: dict
    bytes: tuple[int, ...]
    dropped: tuple[str, ...]
    dequantized: tuple[str, ...]


def convert(
    checkpoint: str | Path,
    output: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    window: int | str | None = None,
    checkpoint_format: str | None = None,
    read_copy: str | None = None,
    seed: int = 0,
    allow: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Converted:
    """Makes the folder `output`, a TensorRT-LLM 1.2.x checkpoint, of a `nemotron_h` checkpoint: config.json and
    rank0.safetensors … of tp * pp ranks. Nothing is left of it if it fails.

    Args:
        tp, pp: ranks that share each layer, stages of layers.
        window, checkpoint_format, read_copy, seed: ReplayConfig's `window`, `checkpoint`, `read_copy`, `seed`; None: as
            the source's config.json recommends, else its default.
        allow: as for Weights.
        progress: called with a phase, steps done, steps in all.

    Raises:
        CheckpointError: the source, by file and tensor, or what of it cannot be had on this path. (Linears that
            stay quantised do so in one stage only: the names in lists of them are those of a stage's layers.)
        ValueError: tp, pp or a format, and why.
        FileExistsError: `output` is there.
    """
    source = Path(checkpoint)
    model = ModelConfig.read(source)
    given = {"window": window, "checkpoint": checkpoint_format, "read_copy": read_copy}
    known = recommended(source)
    chosen = {name: known.get(name) if value is None else value for name, value in given.items()}
    replay = ReplayConfig(
        max_step_tokens=1,
        activation=ACTIVATIONS[model.dtype],
        seed=seed,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    try:
        target = TensorRtLlmCheckpoint(model, replay, Parallelism(tp, pp))
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    weights = Weights(source, model, allow)
    weights.check_scales()
    stages = [tensor for stage in range(pp) for tensor in target.targets(stage * tp)]
    plain = tuple(dict.fromkeys(name for tensor in stages for name in dequantized(tensor, weights)))
    if pp > 1 and any(kept_format(tensor, weights) for tensor in stages):
        raise CheckpointError(
            f"{source}: is quantised, expected pp 1, got {pp}: the stages' layers have the same names"
        )
    lists, mixed = quantization(target.targets(0), weights)
    config = {**target.config, "quantization": lists}
    with being_written(output) as part:
        sizes = []
        for rank in range(target.parallelism.world):
            path = part / f"rank{rank}.safetensors"
            tensors = [tensor for whole in target.targets(rank) for tensor in with_scales(whole, weights)]
            _write_rank(path, weights, tensors, lambda *at, rank=rank: progress(f"rank {rank}", *at))
            sizes.append(path.stat().st_size)
        for name, content in (("config.json", config), (QUANT_CONFIG, mixed)):
            if content is not None:
                text = json.dumps(content, indent=2, allow_nan=False)
                (part / name).write_text(text + "\n", encoding="utf-8")
    dropped = []
    if weights.has_mtp:
        dropped.append("MTP head (TensorRT-LLM refuses speculative decoding for recurrent models)")
    if weights.kv_scales:
        dropped.append(f"{len(weights.kv_scales)} scales of an FP8 KV cache (the KV cache has the model's dtype)")
    return Converted(config, tuple(sizes), tuple(dropped), plain)


def _write_rank(path: Path, weights: Weights, targets: list[Target], progress: Callable[[int, int], None]) -> None:
    """A safetensors file: length of the header, the header as JSON, then the tensors after each other."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for target in targets:
        size = math.prod(target.shape) * getattr(torch, target.dtype).itemsize
        header[target.name] = {
            "dtype": _NAMES[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for done, target in enumerate(targets):
            progress(done, len(targets))
            before, expected = file.tell(), header[target.name]["data_offsets"]
            for piece in target.pieces:
                dtype = getattr(torch, target.dtype)
                if piece.dequantized:
                    values = weights.read(piece.source, dtype, torch.device("cpu"))
                    if piece.axis is not None:
                        values = values.narrow(piece.axis, piece.start, piece.stop - piece.start)
                elif piece.axis is None:
                    values = weights.stored(piece.source)
                else:
                    values = weights.slice(piece.source, piece.axis, piece.start, piece.stop)
                values = values.to(dtype).contiguous()
                file.write(memoryview(values.flatten().view(torch.uint8).numpy()))
            if not target.pieces:  # a vector that the source lacks counts as zero
                file.write(bytes(expected[1] - expected[0]))
            if file.tell() - before != expected[1] - expected[0]:
                raise RuntimeError(f"{path.name}: {target.name} took {file.tell() - before} bytes, expected {expected}")
        progress(len(targets), len(targets))
