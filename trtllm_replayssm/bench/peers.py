# SPDX-License-Identifier: Apache-2.0
"""Steps of other libraries, conventional and ReplaySSM, where they are installed, behind one call.

A peer's `update` takes a layer's inputs and updates its memory in place; its `settings` are the launch parameters that
it is tuned over. What a row's accepted tokens change from step to step, its cursors, is laid out beforehand: a peer is
not charged for how torch would move them. A peer that is not installed says so; nothing stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..operators import ACTIVATIONS

if TYPE_CHECKING:
    from .kernel import Case


class Library:
    """A module of another package.

    settings: what its call is tuned over, dicts that go into records.
    """

    settings: list[dict] = [{}]

    def __init__(self, package: str, module: str):
        self._package, self._module = package, module

    def missing(self) -> str | None:
        """Why it cannot be measured here, None if it can."""
        try:
            self.module()
        except Exception as error:  # an installation may fail in any way: it is not ours
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None if torch.cuda.is_available() else "needs a GPU"

    def module(self):
        return importlib.import_module(self._module)

    def version(self) -> str:
        try:
            return importlib.metadata.version(self._package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


class Peer(Library, ABC):
    """A library's step of a layer. The first of its settings is the library's own choice.

    longest_window: 0, or of a library's ReplaySSM, which keeps records and writes the state once a window.
    longest_step: how many tokens of a row a step may verify; a conventional kernel then stores a state after each, and
    the next step starts from that of the last token accepted.
    checkpoints: formats of the state that it takes.
    """

    longest_window = 0
    longest_step = 1
    checkpoints: tuple[str, ...] = ("fp32", "bf16", "fp16")

    def tuned_over(self, case: Case) -> list[dict]:
        """The settings that the case has."""
        return self.settings

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a layer as the library wants them, once."""
        return inputs

    def memory(self, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
        """What a layer keeps, zeros: "state" [states,H,P,N], and records."""
        geometry, states = case.sizes, case.batch
        if not self.longest_window and case.tokens > 1:
            states *= case.tokens
        shape = (states, geometry.num_heads, geometry.head_dim, geometry.state_dim)
        return {"state": torch.zeros(shape, dtype=ACTIVATIONS[case.checkpoint.removesuffix("_sr")], device=device)}

    def cursors(self, case: Case, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the layers share, of rows that hold so many records, int32 [batch]: tensors [batch]."""
        return {}

    def flushing(self, case: Case, cursors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Which rows write their state at the next step, bool [batch]."""
        raise NotImplementedError

    def advance(self, case: Case, cursors: dict[str, torch.Tensor], accepted: torch.Tensor) -> dict[str, torch.Tensor]:
        """The cursors after a step of which so many tokens were accepted, int32 [batch]."""
        return cursors

    @abstractmethod
    def update(self, case: Case, memory: dict, inputs: dict[str, torch.Tensor], setting: dict) -> torch.Tensor:
        """A step of every row. memory: a layer's and the cursors, the layer's updated in place; inputs: prepared; x
        [batch*tokens,H,P], A = -exp(A_log) fp32 [H], the others as for `ops.step` -> y like x.
        """


def _broadcast(inputs: dict[str, torch.Tensor], head_dim: int, state_dim: int) -> dict[str, torch.Tensor]:
    """x, dt, A, B, C, D and dt_bias as these libraries take them: views of stride 0 along head_dim and state_dim, which
    they know for what they are.
    """
    return {name: inputs[name] for name in ("x", "B", "C")} | {
        "dt": inputs["dt"][..., None].expand(*inputs["dt"].shape, head_dim),
        "A": inputs["A"][:, None, None].expand(-1, head_dim, state_dim),
        "D": inputs["D"][:, None].expand(-1, head_dim),
        "dt_bias": inputs["dt_bias"][:, None].expand(-1, head_dim),
    }


class ConventionalPeer(Peer):
    """A library's `selective_state_update`, which reads and writes a state, or of verified tokens one each."""

    def cursors(self, case, records):
        return {"num_accepted_tokens": torch.ones_like(records)} if case.tokens > 1 else {}

    def advance(self, case, cursors, accepted):
        return {"num_accepted_tokens": accepted.clone()} if case.tokens > 1 else {}

    def memory(self, case, device):
        memory = super().memory(case, device)
        if case.tokens > 1:
            rows = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
            states = torch.arange(case.batch * case.tokens, dtype=torch.int32, device=device)
            memory["cu_seqlens"] = rows * case.tokens
            memory["state_batch_indices"] = states.view(case.batch, case.tokens)
        return memory

    def update(self, case, memory, inputs, setting):
        state = memory["state"]
        given = _broadcast(inputs, *state.shape[2:]) | {"dt_softplus": True}
        others = {name: value for name, value in memory.items() if name != "state"}
        return self.call(case, state, given, others, setting)

    @abstractmethod
    def call(self, case: Case, state: torch.Tensor, given: dict, others: dict, setting: dict) -> torch.Tensor:
        """The library's function. others: what verification needs besides."""


class TritonPeer(ConventionalPeer):
    """A Triton kernel `_selective_scan_update_kernel` that its module launches with settings of its own. They are
    replaced at the launch: the module's kernel gives way to one that changes them.
    """

    settings = [
        {},
        *(
            {"BLOCK_SIZE_M": block, "num_warps": warps}
            for block, warps in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8))
        ),
    ]

    def __init__(self, package: str, module: str, gives_out: bool, longest_step: int):
        super().__init__(package, module)
        self._gives_out = gives_out  # whether the function makes its output, or takes it
        self.longest_step = longest_step

    def call(self, case, state, given, others, setting):
        module = self.module()
        if self._gives_out:
            with _launched(module, setting):
                return module.selective_state_update(state, **given)
        out = torch.empty_like(given["x"])
        if others:  # states are numbered from 0: none of them is the one that stands for nothing
            others = others | {"null_block_id": -1}
        with _launched(module, setting):
            module.selective_state_update(state, **given, **others, out=out)
        return out


class FlashInfer(ConventionalPeer):
    """FlashInfer's CUDA kernels; the settings are its algorithms, of which verification has the first two on Hopper. It
    reads D and dt_bias in the dtype of dt.
    """

    longest_step = 16
    checkpoints = ("fp32", "bf16", "fp16", "fp16_sr")
    settings = [{"algorithm": name} for name in ("auto", "simple", "vertical", "horizontal")]

    def tuned_over(self, case):
        return self.settings if case.tokens == 1 else self.settings[:2]

    def prepare(self, inputs):
        return inputs | {name: inputs[name].to(inputs["dt"].dtype) for name in ("D", "dt_bias")}

    def memory(self, case, device):
        return super().memory(case, device) | _seed(case, device)

    def call(self, case, state, given, others, setting):
        if case.tokens > 1:
            others = others | {
                "dst_state_batch_indices": others["state_batch_indices"],
                "cache_steps": case.tokens,
            }
        return self.module().selective_state_update(
            state, **given, **others, out=torch.empty_like(given["x"]), **setting
        )


def _seed(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """FlashInfer's seed of stochastic rounding; without one it rounds to nearest."""
    return {"rand_seed": torch.ones(1, dtype=torch.int64, device=device)} if case.checkpoint == "fp16_sr" else {}


def _zeros(case: Case, device: torch.device) -> Callable[..., torch.Tensor]:
    """Makes memory of all rows: zeros(*shape, dtype=...) [batch, *shape]."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((case.batch, *shape), dtype=dtype, device=device)

    return zeros


def _override(module: str, settings: dict[str, list[int]]) -> None:
    """Sets the dict that vLLM's ReplaySSM, beside whose `module` it lies, keeps for sweeps of its launch parameters."""
    overrides = importlib.import_module(module.rpartition(".")[0] + ".replayssm_config")._overrides
    overrides.clear()
    overrides.update({kernel: tuple(values) for kernel, values in settings.items()})


class VllmReplay(Peer):
    """vLLM's Triton kernels of ReplaySSM. A row is told its position in the window and when to flush; the step that
    flushes folds its own token too. It rounds stochastically on Blackwell only.
    """

    longest_window = 64
    settings = [
        {},
        *(
            {"config": [rows, warps, tile, flush_tile, 2]}
            for rows, warps, tile, flush_tile in itertools.product((8, 16, 32, 64), (1, 2, 4), (32, 64, 128), (64, 128))
            if rows * max(tile, flush_tile) <= 64 * 32 * warps  # FP32 values of a tile in registers; more would spill
        ),
    ]

    def memory(self, case, device):
        geometry, window, zeros = case.sizes, case.window, _zeros(case, device)
        return super().memory(case, device) | {
            "x_cache": zeros(geometry.num_heads, window, geometry.head_dim, dtype=torch.bfloat16),
            "dt_cache": zeros(geometry.num_heads, window, dtype=torch.float32),
            "B_cache": zeros(geometry.num_groups, window, geometry.state_dim, dtype=torch.bfloat16),
            "bc_pre": zeros(geometry.num_groups, window, dtype=torch.float32),
        }

    def cursors(self, case, records):
        return {"write_pos": records.clone(), "is_flush": records == case.window - 1}

    def flushing(self, case, cursors):
        return cursors["is_flush"]

    def advance(self, case, cursors, accepted):
        return self.cursors(case, (cursors["write_pos"] + accepted) % case.window)

    def update(self, case, memory, inputs, setting):
        _override(self._module, {"mamba2_output_only": setting["config"]} if setting else {})
        given = _broadcast(inputs, *memory["state"].shape[2:])
        return self.module().selective_state_update_replayssm_output_only(
            **memory, **given, dt_softplus=True, max_cache_len=case.window, out=torch.empty_like(given["x"])
        )


class ReferenceReplay(Peer):
    """The Triton kernels of ReplaySSM's authors, a fork of vLLM, in the form that verifies; of one token, too. Records
    are rows of one ring of x and B, whose length is a power of two.
    """

    longest_window = 64
    longest_step = 16
    settings = [
        {},
        *(
            {"verify": [rows, warps, tile, 2], "flush": list(flush)}
            for rows, warps, tile, flush in itertools.product(
                (16, 32, 64), (1, 2, 4), (64, 128), ((32, 2, 64, 2), (16, 1, 128, 2), (32, 4, 128, 2), (64, 4, 64, 2))
            )
            if rows * tile <= 64 * 32 * warps
        ),
    ]

    def _ring(self, case: Case) -> int:
        return 1 << (case.window + case.tokens - 1).bit_length()

    def prepare(self, inputs):
        packed = torch.cat([inputs[name].flatten(1) for name in ("x", "B", "C")], 1)
        return inputs | {"conv_out": packed}

    def memory(self, case, device):
        geometry, ring, zeros = case.sizes, self._ring(case), _zeros(case, device)
        channels = geometry.num_heads * geometry.head_dim + geometry.num_groups * geometry.state_dim
        rows = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
        step = 1 << (case.tokens - 1).bit_length()
        memory = super().memory(case, device)
        return {
            "state_checkpoint": memory["state"],
            "post_conv_cache": zeros(ring, channels, dtype=torch.bfloat16),
            "dt_cache": zeros(geometry.num_heads, ring, dtype=torch.float32),
            "bc_pre": zeros(geometry.num_groups, ring, step, dtype=torch.bfloat16),
            "query_start_loc": rows * case.tokens,
            "state_batch_indices": rows[:-1].clone(),
        }

    def cursors(self, case, records):
        return {
            "write_pos": records.clone(),
            "post_conv_state_pos": torch.zeros_like(records),
            "is_flush": (records + case.tokens > case.window).to(torch.int8),
        }

    def flushing(self, case, cursors):
        return cursors["is_flush"] != 0

    def advance(self, case, cursors, accepted):
        held, full = cursors["write_pos"], self.flushing(case, cursors)
        after = self.cursors(case, torch.where(full, accepted, held + accepted))
        after["post_conv_state_pos"] = (cursors["post_conv_state_pos"] + held * full) % self._ring(case)
        return after

    def update(self, case, memory, inputs, setting):
        _override(self._module, {f"mamba2_spec_{kernel}": values for kernel, values in setting.items()})
        geometry = case.sizes
        return self.module().selective_state_update_replayssm_spec(
            **memory,
            conv_out=inputs["conv_out"],
            dt_spec=inputs["dt"],
            A=inputs["A"][:, None, None].expand(-1, geometry.head_dim, geometry.state_dim),
            D=inputs["D"][:, None].expand(-1, geometry.head_dim),
            dt_bias=inputs["dt_bias"],
            dt_softplus=True,
            max_cache_len=case.window + case.tokens,
            max_spec_len=case.tokens,
            d_inner=geometry.num_heads * geometry.head_dim,
            ngroups=geometry.num_groups,
            dstate=geometry.state_dim,
            null_block_id=-1,
        )


class FlashInferReplay(Peer):
    """FlashInfer's CUDA kernels of ReplaySSM: a ring of a step more than the window; a row flushes by itself, before
    its tokens, when the window has no room for them. A tactic is of one kernel, (0, 0, 0, d_split), or of two:
    (pipeline stages, CTAs a processor, heads a CTA of the first, d_split); null is what the library takes by itself.
    """

    longest_window = 16
    longest_step = 16
    checkpoints = ("fp32", "bf16", "fp16", "fp16_sr")
    settings = [
        {"tactic": tactic, "enable_pdl": pdl}
        for tactic, pdl in itertools.product(
            (None, (0, 0, 0, 1), (0, 0, 0, 2), *itertools.product((1, 2), (4, 8, 12, 16, 32), (4, 8, 16), (1, 2))),
            (False, True),
        )
    ]

    def tuned_over(self, case):
        """Without tactics that only allow more CTAs than there is work for."""
        kept, launches = [], set()
        processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1
        for setting in self.settings:
            stages, ctas, heads, split = setting["tactic"] or (None,) * 4
            most = ctas and min(ctas * processors, case.batch * case.sizes.num_heads * split)
            launch = stages, most, heads, split, setting["enable_pdl"]
            if launch not in launches:
                launches.add(launch)
                kept.append(setting)
        return kept

    def memory(self, case, device):
        geometry, ring, zeros = case.sizes, case.window + case.tokens, _zeros(case, device)
        scratch = self.module().allocate_checkpointing_ssu_scratch(
            case.batch, geometry.num_heads, case.tokens, case.window, torch.bfloat16, device
        )
        return (
            super().memory(case, device)
            | {
                "x_cache": zeros(geometry.num_heads, ring, geometry.head_dim, dtype=torch.bfloat16),
                "B_cache": zeros(geometry.num_groups, ring, geometry.state_dim, dtype=torch.bfloat16),
                "dt_cache": zeros(geometry.num_heads, ring, dtype=torch.float32),
            }
            | dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True))
            | _seed(case, device)
        )

    def cursors(self, case, records):
        return {"ring_start": torch.zeros_like(records), "prev_num_accepted_tokens": records.clone()}

    def flushing(self, case, cursors):
        return cursors["prev_num_accepted_tokens"] + case.tokens > case.window

    def advance(self, case, cursors, accepted):
        held, full = cursors["prev_num_accepted_tokens"], self.flushing(case, cursors)
        return {
            "ring_start": (cursors["ring_start"] + held * full) % (case.window + case.tokens),
            "prev_num_accepted_tokens": torch.where(full, accepted, held + accepted),
        }

    def update(self, case, memory, inputs, setting):
        given = _broadcast(inputs, *memory["state"].shape[2:])
        by_row = {
            name: given[name].unflatten(0, (case.batch, case.tokens)) for name in ("x", "dt", "B", "C")
        }  # a view of stride 0 stays one
        out = torch.empty_like(by_row["x"])
        with _tactic(setting["tactic"]):
            self.module().checkpointing_ssu(
                **memory, **(given | by_row), out=out, dt_softplus=True, enable_pdl=setting["enable_pdl"]
            )
        return out.flatten(0, 1)


@contextmanager
def _tactic(tactic: tuple | None):
    """While it lasts, FlashInfer's ReplaySSM is launched by this tactic, as if its tuner had chosen it."""
    module = importlib.import_module("flashinfer.mamba.checkpointing_ssu")
    tuner = module.AutoTuner
    if tactic is not None:
        module.AutoTuner = _Chosen(tactic)
    try:
        yield
    finally:
        module.AutoTuner = tuner


class _Chosen:
    """A tuner that has chosen."""

    def __init__(self, tactic: tuple):
        self._tactic = tactic

    def get(self) -> _Chosen:
        return self

    def choose_one(self, name: str, runners: list, config, inputs: list) -> tuple:
        return runners[0], self._tactic


@contextmanager
def _launched(module, setting: dict):
    """While it lasts, `module` launches its state update with `setting`."""
    kernel = module._selective_scan_update_kernel
    if setting:
        module._selective_scan_update_kernel = _Relaunched(kernel, setting)
    try:
        yield
    finally:
        module._selective_scan_update_kernel = kernel


class _Relaunched:
    """A Triton kernel with some of its launch parameters fixed."""

    def __init__(self, kernel, setting: dict):
        self._kernel, self._setting = kernel, setting

    def __getitem__(self, grid: Callable) -> Callable:
        def launch(*arguments, **options):
            arguments = list(arguments)
            for name, value in self._setting.items():
                place = self._kernel.arg_names.index(name) if name in self._kernel.arg_names else len(arguments)
                if place < len(arguments):
                    arguments[place] = value
                else:
                    options[name] = value
            return self._kernel[grid](*arguments, **options)

        return launch


_VLLM = "vllm.model_executor.layers.mamba.ops."
PEERS: dict[str, Peer] = {
    "mamba_ssm": TritonPeer("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update", gives_out=True, longest_step=1),
    "vllm": TritonPeer("vllm", _VLLM + "mamba_ssm", gives_out=False, longest_step=16),
    "flashinfer": FlashInfer("flashinfer-python", "flashinfer.mamba"),
    "vllm_replay": VllmReplay("vllm", _VLLM + "selective_state_update_replayssm_output_only"),
    "reference_replay": ReferenceReplay("vllm", _VLLM + "selective_state_update_replayssm_spec"),
    "flashinfer_replay": FlashInferReplay("flashinfer-python", "flashinfer.mamba"),
}
