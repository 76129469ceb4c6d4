# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    """The device of the ops under test: the CPU always, CUDA where there is one (ops/test_cuda.py tells if not)."""
    return torch.device(request.param)
