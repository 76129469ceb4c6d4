# SPDX-License-Identifier: Apache-2.0
"""What an engine is built for: how many sequences, how long, and how their state is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index

from .. import MambaGeometry, ReplayConfig, SlotLayout, _core

STATE_IO = ("alias", "same_pointer", "host_pointer")
# Names of dtypes: a checkpoint's, the plugins', bytes of a value.
ACTIVATIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_DRAFTS = 15  # a step takes 16 tokens a row at most
_MOST_TOKENS = 2**24  # a graph holds the numbers of all positions of a KV row, 4 bytes each
_KV_MULTIPLE = 16  # rows of a KV cache, so that masks and keys are whole vectors


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and formats of an engine.

    Args:
        max_batch: rows of a decode step. Also the number of slots of the state pool, and of rows of the KV cache.
        max_seq_len: most tokens of a sequence, prompt and generated together.
        draft_tokens: most drafts that a step verifies, 0..15; with the token before them that makes T_max tokens a row.
        max_prefill_tokens: most tokens of a prompt chunk, more than T_max; max_seq_len if that is less.
        window, checkpoint_format, read_copy, seed: ReplayConfig's `window`, `checkpoint`, `read_copy`, `seed`.
        dtype: of weights, activations and KV cache: "bfloat16", "float16", or "float32", which is for evaluation:
            TensorRT has no attention kernel for it.
        state_io: how the plugins get the state, docs/plugins.md, section 2.
        trt_attention: TensorRT 11's own attention node, which reads a row's keys only as far as they go, in place of
            the standard one, which reads the whole cache under a mask. Builds; its numbers were never checked on a GPU.
        allow_dense_moe: evaluate all experts of layers that have more than 16.

    Raises:
        TypeError, ValueError: an argument, by name, with what was given and what is expected.
    """

    max_batch: int = 8
    max_seq_len: int = 4096
    draft_tokens: int = 0
    max_prefill_tokens: int = 512
    window: int | str = "auto"
    checkpoint_format: str = "fp32"
    read_copy: str = "none"
    seed: int = 0
    dtype: str = "bfloat16"
    state_io: str = "alias"
    trt_attention: bool = False
    allow_dense_moe: bool = False

    def __post_init__(self):
        for name, least, most in (
            ("max_batch", 1, 2**31 - 1),
            ("max_seq_len", 2, _MOST_TOKENS),
            ("draft_tokens", 0, MAX_DRAFTS),
            ("max_prefill_tokens", 1, _MOST_TOKENS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if not least <= index(value) <= most:
                raise ValueError(f"{name}: expected {least}..{most}, got {value}")
        object.__setattr__(self, "max_prefill_tokens", min(self.max_prefill_tokens, self.max_seq_len))
        if self.max_prefill_tokens <= self.step_tokens:
            raise ValueError(
                f"max_prefill_tokens: expected more than the {self.step_tokens} tokens of a step (1 + draft_tokens), "
                f"got {self.max_prefill_tokens}: longer rows are what tells prompts from steps"
            )
        for name, known in (("dtype", tuple(ACTIVATIONS)), ("state_io", STATE_IO)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        self.replay  # noqa: B018 - checks window and formats

    @property
    def step_tokens(self) -> int:
        """T_max."""
        return 1 + self.draft_tokens

    @cached_property
    def replay(self) -> ReplayConfig:
        return ReplayConfig(
            window=self.window,
            max_step_tokens=self.step_tokens,
            checkpoint=self.checkpoint_format,
            read_copy=self.read_copy,
            activation=ACTIVATIONS[self.dtype],
            seed=self.seed,
        )

    @property
    def kv_capacity(self) -> int:
        """Positions of a KV row: the longest sequence and what a padded step may write behind its end."""
        return -(-(self.max_seq_len + self.step_tokens) // _KV_MULTIPLE) * _KV_MULTIPLE


@dataclass(frozen=True)
class Pool:
    """The state of an engine's Mamba layers."""

    geometry: MambaGeometry
    replay: ReplayConfig  # with a number for its window
    num_slots: int
    num_layers: int

    @classmethod
    def of(cls, geometry: MambaGeometry, config: EngineConfig, num_layers: int) -> Pool:
        return cls(geometry, SlotLayout(geometry, config.replay).config, config.max_batch, num_layers)

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.geometry, self.replay)

    @property
    def core(self) -> _core.Spec:
        return _core.Spec(self.geometry.core, self.replay.core, self.num_slots, self.num_layers, 0)

    @property
    def slot_words(self) -> int:
        """INT32 words of a slot of one layer."""
        return self.layout.slot_stride // 4

    @property
    def table_words(self) -> int:
        """INT32 words of the table."""
        return self.core.table_bytes // 4
