# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face `nemotron_h` config.json says about the model, checked and in our words."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import MambaGeometry

MAMBA, ATTENTION, MLP, MOE = "mamba", "attention", "mlp", "moe"

# The hub writes one letter a layer, transformers >= 5.17 a list of words, older versions other words.
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
_WORDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: which file, what was found, what is expected."""


@dataclass(frozen=True)
class ModelConfig:
    """A `nemotron_h` model. Sizes are element counts; a group of fields is None where no layer needs it."""

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]  # "mamba" | "attention" | "mlp" | "moe", one a layer
    mtp_layers: tuple[str, ...]  # inner layers of the multi-token-prediction head, all draft depths; () if none
    mtp_depths: int  # num_nextn_predict_layers
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    stop_tokens: tuple[int, ...]  # eos_token_id
    dtype: str  # "float32" | "bfloat16" | "float16": what the weights were saved in

    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool
    mamba_bias: bool  # in_proj and out_proj
    time_step_limit: tuple[float, float]  # the only clamp of the time step

    attention_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    intermediate_size: int | None = None
    mlp_bias: bool = False

    experts: int | None = None
    experts_per_token: int | None = None
    expert_size: int | None = None
    shared_expert_size: int | None = None
    latent_size: int | None = None  # LatentMoE: experts work in this width instead of hidden_size
    expert_groups: int = 1
    expert_groups_per_token: int = 1
    normalize_expert_weights: bool = True
    expert_scale: float = 1.0

    @property
    def geometry(self) -> MambaGeometry:
        """Sizes of a Mamba layer."""
        return MambaGeometry(
            num_heads=self.mamba_heads,
            head_dim=self.mamba_head_dim,
            num_groups=self.mamba_groups,
            state_dim=self.state_dim,
            conv_kernel=self.conv_kernel,
        )

    @property
    def d_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.d_inner + 2 * self.mamba_groups * self.state_dim

    @classmethod
    def read(cls, checkpoint: str | Path) -> ModelConfig:
        """Reads `checkpoint`/config.json. Raises CheckpointError naming the key that is missing or not understood."""
        path = Path(checkpoint) / "config.json"
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_float_objects)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: no such file; a checkpoint is a directory with config.json and safetensors"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: holds a {type(raw).__name__}, expected a JSON object")
        return _Reader(path, raw).model()


def _float_objects(obj: dict) -> Any:
    """transformers writes an infinite float as {"__float__": "Infinity"}, since JSON has none."""
    return float(obj["__float__"]) if set(obj) == {"__float__"} else obj


class _Reader:
    def __init__(self, path: Path, raw: dict):
        self.path, self.raw = path, raw

    def fail(self, message: str):
        raise CheckpointError(f"{self.path}: {message}")

    def get(self, kind: type, *names: str, default: Any = ...) -> Any:
        """The value of the first of `names` (later ones: older spellings) that is present, as `kind`."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                self.fail(f"{name} is {value!r}, expected {kind.__name__}")
            return kind(value)
        if default is ...:
            self.fail(f"key {names[0]!r} is missing")
        return default

    def size(self, *names: str, **default) -> int:
        value = self.get(int, *names, **default)
        if value is not None and value < 1:
            self.fail(f"{names[0]} is {value}, expected a positive number")
        return value

    def layer_kinds(self, list_keys: tuple[str, ...], pattern_key: str) -> tuple[str, ...] | None:
        for key in list_keys:
            if isinstance(words := self.raw.get(key), list):
                if unknown := [word for word in words if word not in _WORDS]:
                    self.fail(f"{key} names the unknown layer {unknown[0]!r}, known are {', '.join(_WORDS)}")
                return tuple(_WORDS[word] for word in words)
        if (pattern := self.get(str, pattern_key, default=None)) is None:
            return None
        for position, letter in enumerate(pattern):
            if letter not in _LETTERS:
                self.fail(
                    f"{pattern_key} has the unknown layer letter {letter!r} at position {position}, "
                    f"known are {' '.join(_LETTERS)}"
                )
        return tuple(_LETTERS[letter] for letter in pattern)

    def model(self) -> ModelConfig:
        if (kind := self.raw.get("model_type")) != "nemotron_h":
            self.fail(f"model_type is {kind!r}, expected 'nemotron_h'")
        # Set in no released checkpoint: refusing is better than a guess that nothing verifies.
        for key in ("attention_bias", "sliding_window"):
            if self.raw.get(key):
                self.fail(f"{key} = {self.raw[key]!r} is not supported")
        for key, only in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
            if (value := self.get(str, key, default=only)) != only:
                self.fail(f"{key} is {value!r}, supported is {only!r}")

        layers = self.layer_kinds(("layers_block_type", "layer_types"), "hybrid_override_pattern")
        if layers is None:
            self.fail("neither 'layers_block_type' nor 'hybrid_override_pattern' is present")
        if (count := self.get(int, "num_hidden_layers", default=len(layers))) != len(layers):
            self.fail(f"num_hidden_layers is {count}, but the layer pattern has {len(layers)} layers")
        if MAMBA not in layers:
            self.fail("the layer pattern has no Mamba layer ('M'), expected at least one")
        depths = self.get(int, "num_nextn_predict_layers", default=0)
        pattern = self.layer_kinds(("mtp_layers_block_type",), "mtp_hybrid_override_pattern")
        if depths and not pattern:
            self.fail(
                f"num_nextn_predict_layers is {depths}, but neither 'mtp_layers_block_type' nor "
                "'mtp_hybrid_override_pattern' is present"
            )
        mtp_layers = (pattern or ()) * depths
        used = set(layers) | set(mtp_layers)
        return ModelConfig(
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            layers=layers,
            mtp_layers=mtp_layers,
            mtp_depths=depths,
            norm_eps=self.get(float, "layer_norm_epsilon", "norm_eps"),
            tie_word_embeddings=self.get(bool, "tie_word_embeddings", default=False),
            max_position_embeddings=self.size("max_position_embeddings"),
            stop_tokens=self.stop_tokens(),
            dtype=self.dtype(),
            **self.mamba(),
            **(self.attention() if ATTENTION in used else {}),
            **({"intermediate_size": self.size("intermediate_size")} if MLP in used else {}),
            mlp_bias=self.get(bool, "mlp_bias", default=False),
            **(self.moe() if MOE in used else {}),
        )

    def mamba(self) -> dict:
        heads, groups = self.size("mamba_num_heads"), self.size("n_groups", "mamba_n_groups")
        if heads % groups:
            self.fail(f"mamba_num_heads {heads} is no multiple of n_groups {groups}")
        return dict(
            mamba_heads=heads,
            mamba_groups=groups,
            mamba_head_dim=self.size("mamba_head_dim"),
            state_dim=self.size("ssm_state_size"),
            conv_kernel=self.size("conv_kernel", "mamba_d_conv"),
            conv_bias=self.get(bool, "use_conv_bias", "mamba_conv_bias", default=True),
            mamba_bias=self.get(bool, "use_bias", "mamba_proj_bias", default=False),
            time_step_limit=self.time_step_limit(),
        )

    def time_step_limit(self) -> tuple[float, float]:
        """time_step_min/max/floor are initialisation values and never clamp: they are not read."""
        key = "mamba_dt_limit" if "mamba_dt_limit" in self.raw else "time_step_limit"
        value = self.raw.get(key)
        if value is None:
            return 0.0, math.inf
        if not (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
            and 0 <= value[0] <= value[1]
        ):
            self.fail(f"{key} is {value!r}, expected [low, high] with 0 <= low <= high")
        return float(value[0]), float(value[1])

    def attention(self) -> dict:
        heads, kv_heads = self.size("num_attention_heads"), self.size("num_key_value_heads")
        if heads % kv_heads:
            self.fail(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        return dict(attention_heads=heads, kv_heads=kv_heads, head_dim=self.size("head_dim", "attention_head_dim"))

    def moe(self) -> dict:
        experts, chosen = self.size("n_routed_experts"), self.size("num_experts_per_tok")
        groups, groups_chosen = self.size("n_group", default=1), self.size("topk_group", default=1)
        if experts % groups or groups_chosen > groups:
            self.fail(
                f"{experts} experts in n_group {groups} of which topk_group {groups_chosen} are chosen do not fit"
            )
        if groups_chosen < groups and experts // groups < 2:
            self.fail(
                f"n_group {groups} leaves less than 2 of {experts} experts a group, but a group counts by its two best"
            )
        if (shared := self.get(int, "n_shared_experts", default=1)) != 1:
            self.fail(f"n_shared_experts is {shared}, supported is 1")
        if chosen > experts // groups * groups_chosen:
            self.fail(f"num_experts_per_tok is {chosen}, but only {experts // groups * groups_chosen} can be chosen")
        return dict(
            experts=experts,
            experts_per_token=chosen,
            expert_size=self.size("moe_intermediate_size"),
            shared_expert_size=self.size("moe_shared_expert_intermediate_size"),
            latent_size=self.size("moe_latent_size", default=None),
            expert_groups=groups,
            expert_groups_per_token=groups_chosen,
            normalize_expert_weights=self.get(bool, "norm_topk_prob", default=True),
            expert_scale=self.get(float, "routed_scaling_factor", default=1.0),
        )

    def stop_tokens(self) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in tokens):
            self.fail(f"eos_token_id is {value!r}, expected a token id or a list of them")
        return tuple(tokens)

    def dtype(self) -> str:
        name = self.get(str, "dtype", "torch_dtype", default="bfloat16")
        if name not in ("float32", "bfloat16", "float16"):
            self.fail(f"dtype is {name!r}, expected float32, bfloat16 or float16")
        return name
