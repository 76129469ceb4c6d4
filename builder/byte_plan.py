# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a GPU go, and how many requests fit: with ReplaySSM, and with a snapshot for every draft."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .. import ReplayConfig
from ..runtime.model_config import ATTENTION, ModelConfig
from ..runtime.weights import Weights
from .layer_plan import ReplayLayerPlan, plan_layers

GB = 10**9
# Memory of one GPU as NVIDIA states it.
GPUS = {"h100": 80 * GB, "h200": 141 * GB, "b200": 180 * GB, "gb200": 186 * GB, "b300": 288 * GB, "gb300": 288 * GB}
FRACTION = 0.9  # of what weights leave: TensorRT-LLM's own default for caches
KV_BYTES = {"bf16": 2, "fp8": 1}

# Tensors that every rank has whole. All others are divided, but for the exceptions in `_share`.
_WHOLE = ("*norm*.weight", "*.gate.*", "*_latent_proj.*", "*.eh_proj.weight")


@dataclass(frozen=True)
class BytePlan:
    """Bytes on one GPU of `tp`.

    weights: by format ("NVFP4", "FP8", "BF16", "F32" …). memory: of the GPU. available: what requests can have.
    request_*: of one request of `tokens` tokens: its KV cache, its states under ReplaySSM, and its states under
    conventional decoding, which in steps of T > 1 tokens keeps the state after each of them.
    """

    layers: list[ReplayLayerPlan]
    tokens: int
    weights: dict[str, int]
    memory: int
    request_kv: int
    request_replay: int
    request_conventional: int

    @property
    def available(self) -> int:
        return max(0, int((self.memory - sum(self.weights.values())) * FRACTION))

    @property
    def fit_replay(self) -> int:
        """Requests at once."""
        return self.available // (self.request_kv + self.request_replay)

    @property
    def fit_conventional(self) -> int:
        return self.available // (self.request_kv + self.request_conventional)

    def to_json(self) -> dict:
        layers = [layer.to_json() for layer in self.layers]
        return {
            "tp": self.layers[0].slice.tp,
            "memory": self.memory,
            "weights": self.weights,
            "available": self.available,
            "tokens": self.tokens,
            "request": {
                "kv": self.request_kv,
                "replay": self.request_replay,
                "conventional": self.request_conventional,
            },
            "requests": {"replay": self.fit_replay, "conventional": self.fit_conventional},
            "layers": layers,
        }


def plan_bytes(
    model: ModelConfig,
    weights: Weights,
    replay: ReplayConfig,
    *,
    memory: int,
    tokens: int,
    tp: int = 1,
    kv_dtype: str = "bf16",
) -> BytePlan:
    """The plan of rank 0; others need no more.

    Args:
        replay: its max_step_tokens > 1 is speculation: the MTP head's weights and KV cache count then.
        tokens: of a request, prompt and answer together.

    Raises:
        ValueError: the layers cannot be divided among `tp` ranks.
    """
    layers = plan_layers(model, replay, tp)
    steps = replay.max_step_tokens
    with_mtp = weights.has_mtp and steps > 1
    attention = model.layers.count(ATTENTION) + (model.mtp_layers.count(ATTENTION) if with_mtp else 0)
    stored: Counter[str] = Counter()
    for name in weights.names:
        if with_mtp or not name.startswith("mtp."):
            format = weights.quantized.get(name) or weights.dtype(name)
            stored[format] += round(weights.stored_bytes(name) * _share(name, model, layers[0]))
    if attention:
        if model.attention_heads % tp:
            raise ValueError(f"{model.attention_heads} attention heads cannot be divided among {tp} ranks")
        kv_heads = max(1, model.kv_heads // tp)
        kv = 2 * attention * kv_heads * model.head_dim * (tokens + steps) * KV_BYTES[kv_dtype]
    else:
        kv = 0
    # A plain slot holds what conventional decoding keeps but for the snapshots: the state and the inputs of the
    # convolution, which roll back by themselves.
    states = sum(layer.state_bytes for layer in layers) * (1 + (steps if steps > 1 else 0))
    return BytePlan(
        layers=layers,
        tokens=tokens,
        weights=dict(stored),
        memory=memory,
        request_kv=kv,
        request_replay=sum(layer.slot_bytes for layer in layers),
        request_conventional=states + sum(layer.layout.sections["conv_ring"].bytes for layer in layers),
    )


def _share(name: str, model: ModelConfig, layer: ReplayLayerPlan) -> float:
    """Of a tensor, on one rank."""
    part, whole = layer.slice, model.geometry
    if part.tp == 1 or any(fnmatchcase(name, pattern) for pattern in _WHOLE) and "mixer.norm" not in name:
        return 1.0
    if ".in_proj." in name:
        rows = part.in_proj_rows(whole)
        return sum(map(len, rows)) / (model.d_inner + whole.conv_channels + whole.num_heads)
    if ".conv1d." in name:
        return sum(map(len, part.conv_channels(whole))) / whole.conv_channels
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return max(1, model.kv_heads // part.tp) / model.kv_heads
    return 1 / part.tp
