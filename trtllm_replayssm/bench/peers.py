# SPDX-License-Identifier: Apache-2.0
"""State updates of other libraries, where they are installed, behind one call.

A peer's `update` takes a layer's inputs and writes the state in place; its `settings` are the launch
parameters that it is tuned over. A peer that is not installed says so; nothing stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager

import torch


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
    """A library's single-token state update. The first of its settings is the library's own choice."""

    def update(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        setting: dict,
    ) -> torch.Tensor:
        """One token a row. state [batch,H,P,N], updated in place; A = -exp(A_log) fp32 [H]; the others as for
        `ops.step` -> y [batch,H,P].
        """
        heads, head_dim, state_dim = state.shape[1:]
        # These libraries take views of stride 0 along head_dim and state_dim, and know them for what they are.
        return self.call(
            state,
            x,
            dt[..., None].expand(-1, -1, head_dim),
            A[:, None, None].expand(heads, head_dim, state_dim),
            B,
            C,
            D[:, None].expand(heads, head_dim),
            dt_bias[:, None].expand(heads, head_dim),
            setting,
        )

    @abstractmethod
    def call(self, state, x, dt, A, B, C, D, dt_bias, setting: dict) -> torch.Tensor:
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
    """FlashInfer's CUDA kernels; the settings are its algorithms."""

    settings = [{"algorithm": name} for name in ("auto", "simple", "vertical", "horizontal")]

    def call(self, state, x, dt, A, B, C, D, dt_bias, setting):
        return self.module().selective_state_update(
            state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, out=torch.empty_like(x), **setting
        )


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
}
