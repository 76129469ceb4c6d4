# SPDX-License-Identifier: Apache-2.0
"""ReplaySSM decoding over the states of one cache manager.

The manager's own states are the checkpoints, so that none is held twice; the pool adds rings of records, read copies
and cursors. A step's life, all of it on the device and capturable:

    contexts     TensorRT-LLM's prefill writes their states; `adopt` begins their slots anew, whatever was in them, so
                 that new, chunked and resumed requests need no distinction; then the read copies are cast
    first layer  plans the decoding rows
    every layer  runs its step in place of the stock kernel
    last layer   commits, if each row brought one token and TensorRT-LLM will not ask
    acceptance   of drafts (update_mamba_states) commits, and moves the accepted convolution window into place

Batches are padded: rows of dummy requests are masked, and of rows that name one slot (padding requests share theirs)
only the first counts. Masked rows read and write no state, and their outputs are zero.
"""

import warnings
from typing import NamedTuple

import torch

from ... import _core, ops, self_test
from ...config import ReplayConfig
from ...geometry import MambaGeometry
from ...plan import Plan
from ...pool import StatePool
from .log import logger
from .probe import Mismatch
from .settings import Settings
from .shadow import Shadow

_PROMOTED_BYTES = 64 << 20  # of convolution windows on their way
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Head(NamedTuple):
    """What a mixer knows of its heads, each [H], fp32."""

    A_log: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor


class States(NamedTuple):
    """A manager's tensors. Windows are those after each token of a verification, None without speculation."""

    conv: torch.Tensor  # [layers, slots, channels, K-1]
    ssm: torch.Tensor  # [layers, slots, H, P, N]
    windows: torch.Tensor | None  # [layers, rows, T, channels, K-1]


class ReplayDecoder:
    """ReplaySSM for the Mamba layers of one rank.

    Args:
        states: the manager's.
        step_tokens: most tokens a step brings a row: 1 + drafts.
        rounding: whether the server rounds float16 states stochastically.
        first_head: index of this rank's head 0 among all ranks' heads.
        settings: the user's.

    Attributes:
        known: ids of the running requests whose prompts were processed here.

    Raises:
        Mismatch: states that ReplaySSM can't continue from, too many drafts, or ops that give wrong numbers here.
    """

    def __init__(self, states: States, step_tokens: int, rounding: bool, first_head: int, settings: Settings):
        self.states = states
        self.pool = _pool(states, step_tokens, rounding, first_head, settings)
        self.known: set[int] = set()
        self._plan_memory = self._memory(self.pool.num_slots)
        self._plans: dict[int, Plan] = {}
        self._plan: Plan | None = None
        self._slots = self._first = None  # of the planned rows: their slots, and the first row of the same slot
        self.shadow = Shadow(self.pool, settings.shadow) if settings.shadow else None

    @property
    def num_layers(self) -> int:
        return self.pool.num_layers

    def adopt(self, slots: torch.Tensor):
        """Once a step with contexts: slots int32 [contexts] begin anew with the states that prefill writes."""
        self.pool.adopt(slots)

    def refresh(self, layer: int, slots: torch.Tensor):
        """After a layer's prefill."""
        if self.pool.config.read_copy != "none":
            self.pool.refresh_read_copy(layer, slots)

    def step(self, layer: int, head: Head, x, dt, B, C, slots, dummies, out, stock=None) -> torch.Tensor:
        """What the stock decode kernel gives for these rows.

        Args:
            layer: index among the rank's Mamba layers.
            head: the layer's weights.
            x: [rows, H, P], or with T tokens a row, whose acceptance is told later, [rows, T, H, P].
            dt: [rows, (T,) H], raw.
            B, C: [rows, (T,) G, N].
            slots: int32 [rows].
            dummies: bool [rows], or None: those rows are padding.
            out: like `x`, contiguous.
            stock: the stock kernel as a function of (state, slots, out), for the shadow.
        """
        verify = x.dim() == 4
        if layer == 0:
            self._begin(slots, dummies, x.shape[1] if verify else 1)
        plan = self._plan
        tokens = [tensor.flatten(0, 1) if verify else tensor for tensor in (x, B, C, dt)]
        target = out.view(-1, *out.shape[-2:])
        target.zero_()
        ops.step(self.pool, layer, plan, *tokens, *head, out=target)
        if self.shadow and stock:
            self.shadow.compare(layer, out, stock)
        if layer == self.num_layers - 1 and not verify:
            self.pool.commit(plan)
            self._plan = None
        return out

    def accept(self, num_contexts: int, accepted: torch.Tensor):
        """Ends a verification. accepted: int [sequences], contexts first; tokens of each row that stay, 1..T."""
        if self._plan is None:
            return
        plan, self._plan = self._plan, None
        accepted = accepted[num_contexts : num_contexts + plan.rows].to(torch.int32).contiguous()
        self.pool.commit(plan, accepted)
        _promote(self.states.conv, self.states.windows, self._slots.long(), self._first, accepted.long())

    def _begin(self, slots: torch.Tensor, dummies: torch.Tensor | None, tokens: int):
        self._settle()
        rows = slots.numel()
        first = (slots[:, None] == slots[None, :]).int().argmax(1)
        live = (first == torch.arange(rows, device=slots.device)) & (slots >= 0)
        if dummies is not None:
            live = live & ~dummies
        planned = torch.where(live, slots, -1)
        if self.shadow:
            self.shadow.begin(planned)
        if rows not in self._plans:
            fits = rows <= self.pool.num_slots
            self._plans[rows] = Plan(self.pool, rows, self._plan_memory if fits else self._memory(rows))
        self._plan = self.pool.plan(planned, tokens, out=self._plans[rows])
        self._slots, self._first = slots, first

    def _settle(self):
        """A verification that nobody accepted (a step that failed, or a warm-up of layers only) leaves no trace."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if len(plan.done) == self.num_layers:
            self.pool.commit(plan, torch.zeros(plan.rows, dtype=torch.int32, device=self.pool.device))
        else:
            self.pool.abandon(plan)

    def _memory(self, rows: int) -> torch.Tensor:
        """Of a plan: allocated before any graph is captured, and one for all numbers of rows."""
        return torch.empty(_core.plan_bytes(rows), dtype=torch.uint8, device=self.pool.device)


def _pool(states: States, step_tokens: int, rounding: bool, first_head: int, settings: Settings) -> StatePool:
    layers, slots, heads, head_dim, state_dim = states.ssm.shape
    channels, kept = states.conv.shape[2:]
    groups, rest = divmod(channels - heads * head_dim, 2 * state_dim)
    if rest or groups < 1:
        raise Mismatch(f"conv states: expected x | B | C channels of {tuple(states.ssm.shape)} states, got {channels}")
    if states.ssm.dtype not in _FORMATS or states.conv.dtype not in _FORMATS:
        raise Mismatch(f"states: expected float32, bfloat16 or float16, got {states.ssm.dtype}, {states.conv.dtype}")
    checkpoint = _FORMATS[states.ssm.dtype]
    if settings.stochastic_rounding != "auto":
        rounding = settings.stochastic_rounding == "1"
    if rounding and checkpoint != "fp16":
        raise Mismatch(f"stochastic rounding: expected mamba_ssm_cache_dtype float16, got {states.ssm.dtype}")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            config = ReplayConfig(
                settings.window,
                step_tokens,
                "fp16_sr" if rounding else checkpoint,
                settings.read_copy,
                _FORMATS[states.conv.dtype],
                settings.seed,
            )
        for warning in told:
            logger.warning(f"ReplaySSM: {warning.message}")
        pool = StatePool(
            MambaGeometry(heads, head_dim, groups, state_dim, kept + 1),
            config,
            slots,
            layers,
            states.ssm.device,
            first_head,
            {"checkpoint": states.ssm, "conv_ring": None},
        )
        self_test.require(pool.device, pool.geometry, pool.config)
        return pool
    except (ValueError, NotImplementedError, self_test.SelfTestError) as error:
        raise Mismatch(str(error)) from error


def _promote(conv, windows, slots, first, accepted):
    """conv[slot] = the row's window after its last accepted token. Rows of one slot all write what the first has, rows
    without a slot what a row with one has. As many layers at once as their windows are small: copies are made on the
    way.
    """
    has_slot = slots >= 0
    first = torch.where(has_slot, first, has_slot.int().argmax())
    slots = slots[first].clamp(min=0)  # -1 if no row has one: then slot 0 is given what it holds
    last = accepted[first] - 1
    layers = max(1, _PROMOTED_BYTES // max(1, len(slots) * conv[0, 0].nbytes))
    for into, out_of in zip(conv.split(layers), windows.split(layers), strict=True):
        into[:, slots] = torch.where(has_slot.any(), out_of[:, first, last], into[:, slots])
