# SPDX-License-Identifier: Apache-2.0
"""Steps of other libraries, conventional and ReplaySSM, where they are installed, behind one call.

A peer's `update` takes a layer's inputs and updates its memory in place; its `settings` are the launch parameters that
it is tuned over. A peer that is not installed says so; nothing stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager

import torch

from .. import MambaGeometry


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
    """A library's single-token step of a layer. The first of its settings is the library's own choice.

    longest_window: 0, or of a library's ReplaySSM, which keeps records and writes the state once a window.
    """

    longest_window = 0

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a layer as the library wants them, once."""
        return inputs

    def memory(self, batch: int, geometry: MambaGeometry, window: int, dtype: torch.dtype, device) -> dict:
        """What a layer keeps, zeros: "state" [batch,H,P,N], and records."""
        shape = (batch, geometry.num_heads, geometry.head_dim, geometry.state_dim)
        return {"state": torch.zeros(shape, dtype=dtype, device=device)}

    def cursors(self, records: torch.Tensor, window: int) -> dict:
        """What the layers share, of rows that hold so many records, int32 [batch]."""
        return {}

    def flushing(self, cursors: dict, window: int) -> torch.Tensor:
        """Which rows write their state at the next token, bool [batch]."""
        raise NotImplementedError

    def advance(self, cursors: dict, window: int) -> None:
        """After a token of every layer: on the device, inside the graph."""

    def update(
        self,
        memory: dict,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        setting: dict,
    ) -> torch.Tensor:
        """One token a row. memory: a layer's and the cursors, updated in place; A = -exp(A_log) fp32 [H]; the others as
        for `ops.step` -> y [batch,H,P].
        """
        heads, head_dim, state_dim = memory["state"].shape[1:]
        # These libraries take views of stride 0 along head_dim and state_dim, and know them for what they are.
        return self.call(
            **memory,
            x=x,
            dt=dt[..., None].expand(-1, -1, head_dim),
            A=A[:, None, None].expand(heads, head_dim, state_dim),
            B=B,
            C=C,
            D=D[:, None].expand(heads, head_dim),
            dt_bias=dt_bias[:, None].expand(heads, head_dim),
            setting=setting,
        )

    @abstractmethod
    def call(self, state, x, dt, A, B, C, D, dt_bias, setting: dict, **records) -> torch.Tensor:
        """The library's function."""


class TritonPeer(Peer):
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

    def __init__(self, package: str, module: str, gives_out: bool):
        super().__init__(package, module)
        self._gives_out = gives_out  # whether the function makes its output, or takes it

    def call(self, state, x, dt, A, B, C, D, dt_bias, setting):
        module = self.module()
        out = None if self._gives_out else torch.empty_like(x)
        more = {} if self._gives_out else {"out": out}
        with _launched(module, setting):
            given = module.selective_state_update(state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True, **more)
        return given if self._gives_out else out


class FlashInfer(Peer):
    """FlashInfer's CUDA kernels; the settings are its algorithms. It reads D and dt_bias in the dtype of dt."""

    settings = [{"algorithm": name} for name in ("auto", "simple", "vertical", "horizontal")]

    def prepare(self, inputs):
        return inputs | {name: inputs[name].to(inputs["dt"].dtype) for name in ("D", "dt_bias")}

    def call(self, state, x, dt, A, B, C, D, dt_bias, setting):
        return self.module().selective_state_update(
            state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, out=torch.empty_like(x), **setting
        )


class VllmReplay(Peer):
    """vLLM's Triton kernels of ReplaySSM. A row is told its position in the window and when to flush; the step that
    flushes folds its own token too.
    """

    longest_window = 64
    settings = [
        {},
        *({"config": [rows, warps, 64, 128, 2]} for rows, warps in itertools.product((16, 32, 64), (1, 2, 4))),
    ]

    def memory(self, batch, geometry, window, dtype, device):
        heads, groups = geometry.num_heads, geometry.num_groups

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((batch, *shape), dtype=dtype, device=device)

        return super().memory(batch, geometry, window, dtype, device) | {
            "x_cache": zeros(heads, window, geometry.head_dim, dtype=torch.bfloat16),
            "dt_cache": zeros(heads, window, dtype=torch.float32),
            "B_cache": zeros(groups, window, geometry.state_dim, dtype=torch.bfloat16),
            "bc_pre": zeros(groups, window, dtype=torch.float32),
        }

    def cursors(self, records, window):
        return {"write_pos": records.clone(), "is_flush": records == window - 1}

    def flushing(self, cursors, window):
        return cursors["is_flush"]

    def advance(self, cursors, window):
        cursors["write_pos"].add_(1).remainder_(window)
        torch.eq(cursors["write_pos"], window - 1, out=cursors["is_flush"])

    def call(self, state, x, dt, A, B, C, D, dt_bias, setting, **records):
        # The dict that the library keeps for sweeps of its launch parameters.
        config = importlib.import_module(self._module.rpartition(".")[0] + ".replayssm_config")
        config._overrides.clear()
        if setting:
            config._overrides["mamba2_output_only"] = tuple(setting["config"])
        return self.module().selective_state_update_replayssm_output_only(
            state,
            x,
            dt,
            A,
            B,
            C,
            D,
            dt_bias,
            dt_softplus=True,
            max_cache_len=records["x_cache"].shape[2],
            out=torch.empty_like(x),
            **records,
        )


class FlashInferReplay(Peer):
    """FlashInfer's CUDA kernels of ReplaySSM: a ring of a row more than the window; a row flushes by itself, before its
    token, when the window is full.
    """

    longest_window = 16
    settings = [{"algorithm": name} for name in ("auto", "monolith", "two-kernel")]

    def memory(self, batch, geometry, window, dtype, device):
        heads, rows = geometry.num_heads, window + 1

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((batch, *shape), dtype=dtype, device=device)

        scratch = self.module().allocate_checkpointing_ssu_scratch(batch, heads, 1, window, torch.bfloat16, device)
        return super().memory(batch, geometry, window, dtype, device) | {
            "x_cache": zeros(heads, rows, geometry.head_dim, dtype=torch.bfloat16),
            "B_cache": zeros(geometry.num_groups, rows, geometry.state_dim, dtype=torch.bfloat16),
            "dt_cache": zeros(heads, rows, dtype=torch.float32),
            **dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True)),
        }

    def cursors(self, records, window):
        return {"ring_start": torch.zeros_like(records), "prev_num_accepted_tokens": records.clone()}

    def flushing(self, cursors, window):
        return cursors["prev_num_accepted_tokens"] >= window

    def advance(self, cursors, window):
        held, full = cursors["prev_num_accepted_tokens"], self.flushing(cursors, window)
        cursors["ring_start"].add_(held * full).remainder_(window + 1)
        held.copy_(torch.where(full, 1, held + 1))

    def call(self, state, x, dt, A, B, C, D, dt_bias, setting, **records):
        x, dt, B, C = (tensor[:, None] for tensor in (x, dt, B, C))  # a token a row
        out = torch.empty_like(x)
        self.module().checkpointing_ssu(
            state,
            x=x,
            dt=dt,
            A=A,
            B=B,
            C=C,
            out=out,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=True,
            **records,
            **setting,
        )
        return out[:, 0]


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


PEERS: dict[str, Peer] = {
    "mamba_ssm": TritonPeer("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update", gives_out=True),
    "vllm": TritonPeer("vllm", "vllm.model_executor.layers.mamba.ops.mamba_ssm", gives_out=False),
    "flashinfer": FlashInfer("flashinfer-python", "flashinfer.mamba"),
    "vllm_replay": VllmReplay(
        "vllm", "vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only"
    ),
    "flashinfer_replay": FlashInferReplay("flashinfer-python", "flashinfer.mamba"),
}
