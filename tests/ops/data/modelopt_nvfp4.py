# SPDX-License-Identifier: Apache-2.0
"""Writes modelopt_nvfp4.safetensors beside itself: states and what NVIDIA Model Optimizer packs them to.

pip install nvidia-modelopt==0.47.0 requests safetensors torch
python tests/ops/data/modelopt_nvfp4.py
"""

from importlib.metadata import version
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file

P, N = 8, 128


def heads() -> torch.Tensor:
    """fp32 [H, P, N]: heads of many kinds, none all zero (Model Optimizer packs such a head to NaN)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn((12, P, N), generator=generator)
    state = normal.clone()
    state[1] = normal[1].sign() * normal[1].exp()  # a few values dominate
    state[2] *= torch.logspace(-6, 6, P)[:, None]  # rows below the smallest block scale
    state[3] *= 1e-30
    state[4] *= 1e37
    state[5, :, 16:48] = 0.0  # blocks of zeros
    state[6] = 0.0
    state[6, 3, 7] = -5.0  # a single value
    # Head scale and block scales 1: every tie of E2M1, its neighbours, both signs, and negative zero.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.stack([torch.nextafter(ties, ties - 1), ties, torch.nextafter(ties, ties + 1)]).flatten()
    state[7] = near.repeat(P * N // len(near) + 1)[: P * N].reshape(P, N) * normal[7].sign()
    state[7, :, ::16] = 6.0
    state[7, 1, 1] = -0.0
    state[7, 0, :16] = 2688.0
    # Block scales at the ties of E4M3.
    codes = torch.arange(1, 65).to(torch.uint8).view(torch.float8_e4m3fn).float()
    scales = (codes[:-1] + codes[1:]) / 2
    state[8] = normal[8].clamp(-6, 6)
    state[8, :, 0::16] = 6.0
    state[8].view(-1, 16)[:63] *= scales[:, None]
    state[8, 7, 112:] = 2688.0
    state[9] *= 1e-38  # its head scale is subnormal
    state[10] = normal[10].round()
    state[11] = normal[11] ** 5
    return state


def main():
    state = heads()
    head_scale = state.abs().amax((1, 2), keepdim=True) / (6 * 448)
    packed, block_scales, head_scale = NVFP4QTensor.quantize(state.clone(), 16, weights_scaling_factor_2=head_scale)
    save_file(
        {
            "state": state,
            "codes": packed._quantized_data,
            "block_scales": block_scales.view(torch.uint8),
            "head_scale": head_scale.flatten(),
        },
        Path(__file__).with_suffix(".safetensors"),
        metadata={name: version(name) for name in ("nvidia-modelopt", "torch")},
    )


if __name__ == "__main__":
    main()
