# SPDX-License-Identifier: Apache-2.0
"""The memory of all sequences: slots, cursors, and what moves them."""

from collections.abc import Callable, Iterable, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

import torch

from . import _core, snapshot
from .config import ReplayConfig
from .geometry import MambaGeometry, int32_field
from .layout import SlotLayout
from .operators import ACTIVATIONS, DTYPE_CODES, core_spec, pool_spec
from .plan import FOLDED, STEPPED, USE_CODES, Plan
from .rows import device_rows, distinct_slots, host_rows, upload
from .transfers import later

_ops = torch.ops.trtllm_replayssm
_INT32_MAX = 2**31 - 1
FLOATS = DTYPE_CODES.keys()
_FP32 = frozenset({torch.float32})
STRIDED, ROWS, WHOLE = range(3)  # how dense `require_tensor` wants its tensor


class Cursors(NamedTuple):
    """Where slots stand; each int64 [rows] on the CPU."""

    tokens: torch.Tensor  # committed tokens since the reset
    stream: torch.Tensor  # the sequence's identity (the bits of a uint64)
    writes: torch.Tensor  # how often the checkpoint was written
    history: torch.Tensor  # committed tokens whose records are not in the checkpoint; flag 8: the live snapshot, from 1
    flags: torch.Tensor  # 1: a plan is outstanding, 2: abandoned, 4: half restored, 8: the state is a snapshot


class RowError(NamedTuple):
    """What a row met on the device."""

    row: int  # of the batch
    text: str


def described(word: list[int]) -> RowError | None:
    """The error in an error word; None if there is none."""
    code, row, given_low, given_high, expected_low, expected_high, *_ = word
    if not code:
        return None
    return RowError(row, _core.describe(code, row, _int64(given_low, given_high), _int64(expected_low, expected_high)))


class StatePool:
    """`num_slots` slots in each of `num_layers` Mamba-2 layers, and their cursors.

    A life of a slot: `reset`, then for prompt chunks and steps `plan`, per layer `ops.conv_step` and `ops.prefill` or
    `ops.step`, and `commit`.

    Slots, counts and accepted numbers may be ints and lists, checked at once, or int32 tensors on the pool's device,
    used as they are. A bad value in a CUDA tensor can't raise without a synchronisation: its row touches nothing, and
    `validate()` or `commit(check=True)` raises what went wrong first. On the CPU every error raises at once, and the
    pool is untouched.

    Args:
        geometry: sizes of a layer.
        config: window and formats.
        num_slots: at least 1.
        num_layers: 0 or more; a pool of 0 layers has cursors only.
        device: "cpu" or a CUDA device.
        first_head: index of the pool's head 0 among the heads of all tensor-parallel ranks. Stochastic rounding then
            gives a head the same bits whatever the rank that has it.
        external: sections that the pool does not hold. "checkpoint": the tensor [num_layers, num_slots, H, P, N] that
            an engine keeps its states in, of the checkpoint's dtype, any strides in its first two dimensions; a slot's
            state is then `adopt`ed there. "conv_ring": None; the engine runs the convolution. Such a pool does not
            `save`, `load`, `copy` or `restore`.

    Attributes:
        config: with a number for its window.
        layout: SlotLayout of a slot.
        data: uint8 [num_layers, num_slots, layout.slot_stride], the slots.
        checkpoint: the external checkpoint, or None.
        table: uint8, the error word, counters, cursors and restore marks.
        decay: per layer, the A_log that a layer op was last given, or None.
        snapshots_dtype, snapshots_shape: of a layer's snapshots for `ops.conventional_verify`: the checkpoint's dtype
            (None with formats that it does not take), (num_slots, max_step_tokens, H, P, N).
    """

    def __init__(
        self,
        geometry: MambaGeometry,
        config: ReplayConfig,
        num_slots: int,
        num_layers: int,
        device: torch.device | str = "cpu",
        first_head: int = 0,
        external: Mapping[str, torch.Tensor | None] = MappingProxyType({}),
    ):
        num_slots = int32_field("num_slots", num_slots)
        num_layers = int32_field("num_layers", num_layers)
        first_head = int32_field("first_head", first_head)
        if first_head < 0:
            raise ValueError(f"first_head: expected 0 or more, got {first_head}")
        if num_slots < 1:
            raise ValueError(f"num_slots: expected 1 or more, got {num_slots}")
        if num_layers < 0:
            raise ValueError(f"num_layers: expected 0 or more, got {num_layers}")
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(f"device: expected cpu or cuda, got {device!r}") from None
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device}")
        if device.type == "cuda" and not _core.has_cuda():
            raise NotImplementedError("device: this build has CPU ops only; install where nvcc is found for CUDA ops")
        self.geometry = geometry
        self.layout = SlotLayout(geometry, config, external)
        self.config = config = self.layout.config
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.first_head = first_head
        self.activation = ACTIVATIONS[config.activation]
        self.activations = frozenset({self.activation})
        self.snapshots_dtype = ACTIVATIONS.get(config.checkpoint) if config.read_copy == "none" else None
        self.snapshots_shape = (num_slots, config.max_step_tokens, *self._state_shapes(1)[0][1:])
        self.spec = pool_spec(geometry, config, num_slots, num_layers, first_head, self.layout.external)
        self._core = core_spec(self.spec)
        self.data = torch.zeros((num_layers, num_slots, self.layout.slot_stride), dtype=torch.uint8, device=device)
        self.table = torch.zeros(self._core.table_bytes, dtype=torch.uint8, device=device)
        self.device = self.data.device
        self.checkpoint = external.get("checkpoint")
        if "checkpoint" in external:
            self._require_checkpoint()
        if external.get("conv_ring") is not None:
            raise ValueError("external: expected None for conv_ring: no op touches it")
        self.decay: list[torch.Tensor | None] = [None] * num_layers
        self._next_stream = 0
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                _core.load_kernels()

    # ---- once a step ----

    def reset(self, slots, streams=None):
        """Empties slots, whatever their state; their memory is not touched, and nothing of it is read again.

        Args:
            slots: ints or int32 [rows]; -1 is skipped.
            streams: ids of the sequences, ints 0..2**64-1 or int64 [rows], the key of stochastic rounding. None: the
                next numbers of a counter of this pool.
        """
        self._begin(_ops.reset, slots, streams)

    def adopt(self, slots, streams=None):
        """What `reset` does, but the checkpoints hold the slots' states, written by another (an engine's prefill).

        With a read copy, `refresh_read_copy` must follow in every layer before the slots are planned.

        Args:
            slots: ints or int32 [rows]; -1 is skipped; a tensor may name a slot twice.
            streams: as for `reset`.
        """
        self._begin(_ops.adopt, slots, streams)

    def _begin(self, operator, slots, streams):
        slots = self._slots("slots", slots, padding=True)
        rows = slots.numel()
        counted = streams is None
        if counted:
            streams = torch.arange(self._next_stream, self._next_stream + rows, dtype=torch.int64, device=self.device)
        elif isinstance(streams, torch.Tensor):
            streams = device_rows("streams", streams, self.device, torch.int64)
        else:
            streams = host_rows("streams", streams, 0, 2**64 - 1)
            signed = [stream - 2**64 if stream >= 2**63 else stream for stream in streams]
            streams = upload("streams", signed, self.device, torch.int64)
        _require_rows("streams", streams.numel(), rows)
        operator(self.table, self.spec, slots, streams)
        if counted:
            self._next_stream += rows

    def plan(self, slots, tokens_per_row=1, out: Plan | None = None, most: int | None = None) -> Plan:
        """Plans a step of all layers: snapshots the slots' cursors, decides which rows flush, and opens the slots.

        Args:
            slots: ints or int32 [rows], distinct, -1 = padded row.
            tokens_per_row: new tokens of each row, 0 or more: an int for all, ints, or int32 [rows].
            out: a plan of as many rows, committed or abandoned, to reuse; its buffer keeps its address.
            most: an upper bound of the counts, 0 or more: where only the device knows them, ops launch no work for
                longer rows. A row that brings more is refused like other bad values.

        Returns:
            `out`, or a new plan.

        Raises:
            ValueError: an open, abandoned or half restored slot, a slot named twice or out of range, a negative count,
                one above `most`.
        """
        slots = self._slots("slots", slots, padding=True)
        rows = slots.numel()
        counts, uniform = None, 0
        if isinstance(tokens_per_row, torch.Tensor):
            counts = device_rows("tokens_per_row", tokens_per_row, self.device)
            known = None if counts.is_cuda else counts.tolist()
        else:
            known = host_rows("tokens_per_row", tokens_per_row, 0, _INT32_MAX)
            if not isinstance(tokens_per_row, Iterable):
                uniform = known[0]
                known = known * rows
            elif known and min(known) == max(known):
                uniform = known[0]
            else:
                counts = upload("tokens_per_row", known, self.device)
        if counts is not None:
            _require_rows("tokens_per_row", counts.numel(), rows)
        elif known is not None:
            _require_rows("tokens_per_row", len(known), rows)
        if known is not None and sum(known) > _INT32_MAX:
            raise ValueError(f"tokens_per_row: expected at most {_INT32_MAX} tokens in all, got {sum(known)}")
        if most is not None:
            most = int32_field("most", most)
            if most < 0:
                raise ValueError(f"most: expected 0 or more, got {most}")
            if known and max(known) > most:
                row = known.index(max(known))
                raise ValueError(f"tokens_per_row[{row}]: expected at most most = {most}, got {known[row]}")
        if out is None:
            out = Plan(self, rows)
        elif out.pool is not self or out.rows != rows:
            raise ValueError(f"out: expected a plan of this pool with {rows} rows, got one of {out.rows} rows")
        elif out.open:
            raise ValueError("out: expected a plan that was committed or abandoned, got an outstanding one")
        _ops.plan(self.table, self.spec, slots, counts, uniform, rows, out.buffer)
        out.begin(known, most)
        return out

    def commit(self, plan: Plan, accepted=None, check: bool = False):
        """Ends a plan: the first `accepted` tokens of each row become part of its sequence, the others never were.

        Args:
            plan: outstanding, and consumed by `ops.step`, `ops.prefill`, `ops.conventional_step` or
                `ops.conventional_verify` in every layer.
            accepted: ints or int32 [rows], 0 <= accepted <= tokens of the row; entries of padded rows are ignored, but
                ints must be in range. None: all tokens. Tokens of prefill and conventional_step are in the state: all
                must be accepted. Of those of conventional_verify accept one at least: 0 invalidates a slot whose state
                was a snapshot.
            check: synchronise and raise what the error word holds, as `validate` does.
        """
        plan.require_open(self)
        use = plan.use
        if use is None:
            if self.num_layers:
                raise ValueError("plan: expected one that ops.step or ops.prefill consumed, got one that none did")
            use = FOLDED if accepted is None else STEPPED
        elif len(plan.done) < self.num_layers:
            skipped = next(layer for layer in range(self.num_layers) if layer not in plan.done)
            raise ValueError(
                f"plan: expected one whose tokens went through every layer, got one without layer {skipped}"
            )
        if isinstance(accepted, torch.Tensor):
            accepted = device_rows("accepted", accepted, self.device)
        elif accepted is not None:
            accepted = self._accepted(plan, accepted)
        if accepted is not None:
            _require_rows("accepted", accepted.numel(), plan.rows)
        _ops.commit(self.table, self.spec, plan.buffer, plan.rows, accepted, USE_CODES[use])
        plan.open = False
        if check:
            self.validate()

    def abandon(self, plan: Plan):
        """Ends a plan with nothing committed.

        Slots whose state its ops may have written (those it flagged to flush, all after prefill, those whose state was
        a snapshot after conventional_verify) are invalid until they are reset, loaded or restored; the others continue
        as if the plan had never been.
        """
        plan.require_open(self)
        _ops.abandon(self.table, self.spec, plan.buffer, plan.rows, USE_CODES[plan.use or STEPPED])
        plan.open = False

    # ---- on demand ----

    def materialize(
        self, layer: int, slots, A_log: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """State and convolution inputs of a layer after the committed tokens. Disturbs nothing.

        Args:
            layer: 0..num_layers-1.
            slots: ints or int32 [rows], closed; -1 gives zeros.
            A_log: fp32, bf16 or fp16 [H]. None: the one that a layer op was last given for this layer.

        Returns:
            state, fp32 [rows, H, P, N], and conv_tail, fp32 [rows, K-1, conv_channels]: the last raw inputs, oldest
            first (0 before the sequence's first token); None in place of these if the convolution is another's.

        Raises:
            ValueError: among others, a slot with records while no A_log is known.
        """
        require_layer(layer, self.num_layers)
        slots = self._slots("slots", slots, padding=True)
        if A_log is None:
            A_log = self.decay[layer]
        else:
            require_tensor(self.device, "A_log", A_log, (self.geometry.num_heads,), FLOATS, WHOLE)
        state_shape, tail_shape = self._state_shapes(slots.numel())
        state = torch.zeros(state_shape, dtype=torch.float32, device=self.device)
        conv_tail = None
        if self.layout.sections["conv_ring"].offset >= 0:
            conv_tail = torch.zeros(tail_shape, dtype=torch.float32, device=self.device)
        call = (self.table, self.data, self.spec, layer, slots, A_log, state, conv_tail)
        _ops.materialize(*call, checkpoint=self.checkpoint)
        return state, conv_tail

    def restore(self, layer: int, slots, state: torch.Tensor, conv_tail: torch.Tensor):
        """The inverse of `materialize`, a layer at a time. A slot can be planned again when every layer was restored.

        Its stream stays; its token count starts anew (at K-1).

        Args:
            layer: 0..num_layers-1.
            slots: ints or int32 [rows], closed, distinct; -1 is skipped.
            state: fp32 [rows, H, P, N], contiguous.
            conv_tail: fp32 [rows, K-1, conv_channels], contiguous, oldest first.
        """
        self._require_whole("restore")
        require_layer(layer, self.num_layers)
        slots = self._slots("slots", slots, padding=True)
        state_shape, tail_shape = self._state_shapes(slots.numel())
        require_tensor(self.device, "state", state, state_shape, _FP32, WHOLE)
        require_tensor(self.device, "conv_tail", conv_tail, tail_shape, _FP32, WHOLE)
        _ops.restore(self.table, self.data, self.spec, layer, slots, state, conv_tail)

    def refresh_read_copy(self, layer: int, slots):
        """Casts the read copies of slots anew from their checkpoints, as stored, after another wrote those.

        Args:
            layer: 0..num_layers-1.
            slots: ints or int32 [rows], closed; -1 and empty slots are skipped; a tensor may name a slot twice.

        Raises:
            ValueError: among others, a pool without a read copy.
        """
        require_layer(layer, self.num_layers)
        slots = self._slots("slots", slots, padding=True)
        _ops.refresh_read_copy(self.table, self.data, self.spec, layer, slots, checkpoint=self.checkpoint)

    def copy(self, src_slots, dst_slots):
        """Copies whole slots, all layers and cursors: the copy continues bit for bit like its source.

        Args:
            src_slots: ints or int32 [rows], closed and valid.
            dst_slots: ints or int32 [rows], closed, distinct, no sources.
        """
        self._require_whole("copy")
        src = self._slots("src_slots", src_slots, padding=False, distinct=False)
        dst = self._slots("dst_slots", dst_slots, padding=False)
        _require_rows("dst_slots", dst.numel(), src.numel())
        _ops.copy(self.table, self.data, self.spec, src, dst)

    def save(self, slots) -> torch.Tensor:
        """Whole slots as bytes, self-describing. Synchronises.

        Args:
            slots: ints or an int tensor [rows], closed and valid.

        Returns:
            uint8 [bytes] on the CPU, a copy. Loaded into any slots of any pool of equal geometry, config, layers and
            first head, in any process, the sequences continue bit for bit.
        """
        self._require_whole("save")
        rows = distinct_slots("slots", host_rows("slots", slots, 0, self.num_slots - 1))
        picked = torch.tensor(rows, dtype=torch.int64, device=self.device)
        cursors = self._cursors.index_select(0, picked).cpu()
        for slot, flags in zip(rows, (cursors[:, 3] >> 32).tolist(), strict=True):
            if flags:
                raise ValueError(f"slots: expected closed, valid slots, got slot {slot} {_flag_text(flags)}")
        blob, parts = snapshot.allocate(self.layout, self.num_layers, self.first_head, len(rows))
        parts.cursors.copy_(cursors.view(torch.uint8))
        for layer in range(self.num_layers):
            parts.data[layer].copy_(self.data[layer].index_select(0, picked))
        return blob

    def load(self, slots, blob: torch.Tensor):
        """Puts saved slots back. Synchronises.

        Args:
            slots: ints or an int tensor [rows], closed; one for each saved slot.
            blob: what `save` gave.

        Raises:
            ValueError: what differs between the blob and this pool, before the pool is touched.
        """
        self._require_whole("load")
        rows = distinct_slots("slots", host_rows("slots", slots, 0, self.num_slots - 1))
        parts = snapshot.parse(blob, self.layout, self.num_layers, self.first_head, len(rows))
        cursors = parts.cursors.clone().view(torch.int64)
        for row, (tokens, _, writes, history) in enumerate(cursors.tolist()):  # flags, the upper half of history, are 0
            if not (0 <= history <= min(tokens, self.config.window) and tokens < 2**62 and 0 <= writes < 2**62) or (
                writes == 0 and history != tokens
            ):
                raise ValueError(f"blob: saved slot {row} has impossible cursors: {tokens=}, {writes=}, {history=}")
        picked = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for slot, flags in zip(rows, (self._cursors.index_select(0, picked)[:, 3] >> 32).tolist(), strict=True):
            if flags & (_core.SLOT_OPEN | _core.SLOT_SNAPSHOT):
                raise ValueError(f"slots: expected closed slots, got slot {slot} {_flag_text(flags)}")
        for layer in range(self.num_layers):
            self.data[layer].index_copy_(0, picked, parts.data[layer].to(self.device))
        self._cursors.index_copy_(0, picked, cursors.to(self.device))

    def allocate_snapshots(self) -> torch.Tensor:
        """Memory for `ops.conventional_verify`, uninitialised: snapshots_dtype [num_layers, *snapshots_shape].

        Raises:
            NotImplementedError: formats that the op does not take.
        """
        if self.snapshots_dtype is None:
            raise NotImplementedError(
                "conventional_verify: expected checkpoint='fp32', 'bf16' or 'fp16' and read_copy='none', got "
                f"checkpoint={self.config.checkpoint!r}, read_copy={self.config.read_copy!r}"
            )
        return torch.empty((self.num_layers, *self.snapshots_shape), dtype=self.snapshots_dtype, device=self.device)

    # ---- what the device knows ----

    def cursors(self, slots=None) -> Cursors:
        """Where slots (ints or an int tensor; None: all) stand. Synchronises."""
        rows = range(self.num_slots) if slots is None else host_rows("slots", slots, 0, self.num_slots - 1)
        tokens, stream, writes, packed = self._cursors.cpu()[list(rows)].unbind(1)
        return Cursors(tokens, stream, writes, packed & 0xFFFFFFFF, packed >> 32)

    def validate(self):
        """Raises ValueError with the first error that a row met on the device, and clears it. Synchronises.

        On any device, that may be a state that was stored with a NaN or an infinity: ops go on with it, and the only
        sign is this error.
        """
        if found := described(self._error.tolist()):
            self._error.zero_()
            raise ValueError(found.text)

    def take_error(self) -> torch.Tensor:
        """The error word, int32 [8] on the pool's device, and none is left there. Waits for nothing; `described` reads
        it."""
        word = self._error.clone()
        self._error.zero_()
        return word

    def stats(self) -> dict[str, int]:
        """Traffic since the pool was made, counted at commits. Synchronises.

        Returns:
            tokens and flushes (of sequences: each counts once, not once a layer); state_reads, state_writes,
            record_reads, record_writes (whole states and records of one layer); step_reads, those of the state_reads
            that steps without a flush did, from the read copy if there is one; state_bytes_read, state_bytes_written,
            record_bytes_read, record_bytes_written (bytes of all layers, in their formats).
        """
        return self.stats_later()()

    def stats_later(self) -> Callable[[], dict[str, int]]:
        """`stats` as they are at this place of the stream: the call of what is returned waits for them, this one does
        not."""
        counters = later(self._counters)

        def stats() -> dict[str, int]:
            values = counters()
            counts = {name: values[position] for name, position in _core.COUNTERS.items()}
            moved = self.layout.traffic_bytes(counts)
            return counts | {name: size * self.num_layers for name, size in moved.items()}

        return stats

    # ---- views of the table ----

    @property
    def _error(self) -> torch.Tensor:
        """int32 [8], the error struct."""
        offset = self._core.error_offset
        return self.table[offset : offset + _core.ERROR_BYTES].view(torch.int32)

    @property
    def _counters(self) -> torch.Tensor:
        """int64 [NUM_COUNTERS]."""
        offset = self._core.counters_offset
        return self.table[offset : offset + 8 * _core.NUM_COUNTERS].view(torch.int64)

    @property
    def _cursors(self) -> torch.Tensor:
        """int64 [num_slots, 4]: tokens, stream, writes, history | flags << 32."""
        offset = self._core.cursors_offset
        cursors = self.table[offset : offset + self.num_slots * _core.CURSOR_BYTES]
        return cursors.view(self.num_slots, _core.CURSOR_BYTES).view(torch.int64)

    # ---- arguments ----

    def _require_checkpoint(self):
        """TypeError or ValueError unless the external checkpoint is one of this pool."""
        shape = (self.num_layers, self.num_slots, *self._state_shapes(1)[0][1:])
        dtype = torch.float16 if self.config.checkpoint == "fp16_sr" else ACTIVATIONS[self.config.checkpoint]
        require_tensor(self.device, "external checkpoint", self.checkpoint, shape, frozenset({dtype}), STRIDED)
        if self.num_layers and not self.checkpoint[0, 0].is_contiguous():
            strides = self.checkpoint.stride()
            raise ValueError(f"external checkpoint: expected contiguous states [H, P, N], got strides {strides}")

    def _require_whole(self, what: str):
        """NotImplementedError if the blobs are not all there is of a slot."""
        if self.layout.external:
            raise NotImplementedError(f"{what}: expected a pool that holds whole slots, got one with external sections")

    def _slots(self, name: str, slots, padding: bool, distinct: bool = True) -> torch.Tensor:
        if isinstance(slots, torch.Tensor):
            return device_rows(name, slots, self.device)
        rows = host_rows(name, slots, -1 if padding else 0, self.num_slots - 1)
        return upload(name, distinct_slots(name, rows) if distinct else rows, self.device)

    def _accepted(self, plan: Plan, accepted) -> torch.Tensor:
        rows = host_rows("accepted", accepted, 0, _INT32_MAX)
        if not isinstance(accepted, Iterable):
            rows = rows * plan.rows
        _require_rows("accepted", len(rows), plan.rows)
        for row, (value, count) in enumerate(zip(rows, plan.counts or rows, strict=True)):
            if value > count:
                raise ValueError(f"accepted[{row}]: expected 0..{count}, the row's tokens, got {value}")
        return upload("accepted", rows, self.device)

    def _state_shapes(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        g = self.geometry
        return (rows, g.num_heads, g.head_dim, g.state_dim), (rows, g.conv_kernel - 1, g.conv_channels)


def require_layer(layer: int, num_layers: int):
    """TypeError or ValueError unless `layer` is one of a pool's layers."""
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise TypeError(f"layer: expected an int, got {layer!r}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0..{num_layers - 1} of {num_layers} layers, got {layer}")


def require_tensor(
    device: torch.device, name: str, tensor, shape: tuple[int, ...], dtypes: Set[torch.dtype], dense: int
):
    """Raises unless `tensor` lies on `device` with this shape and one of the dtypes.

    dense: STRIDED: any strides; ROWS: the last dimension is contiguous; WHOLE: all are.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if dense == ROWS and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")
    if dense == WHOLE and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def _require_rows(name: str, given: int, expected: int):
    if given != expected:
        raise ValueError(f"{name}: expected {expected} rows, got {given}")


def _flag_text(flags: int) -> str:
    if flags & _core.SLOT_OPEN:
        return "with an outstanding plan"
    if flags & _core.SLOT_SNAPSHOT:
        return "whose state is a snapshot of ops.conventional_verify (reset it first)"
    return "that was abandoned" if flags & _core.SLOT_INVALID else "that is half restored"


def _int64(low: int, high: int) -> int:
    return (high << 32) | (low & 0xFFFFFFFF)
