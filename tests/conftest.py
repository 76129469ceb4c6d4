# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    """The device of the ops under test: the CPU always, CUDA where there is one (ops/test_cuda.py tells if not)."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def wrong_libm(tmp_path_factory):
    """A library for LD_PRELOAD whose expf is off by 1e-4."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("libm")
    (folder / "expf.c").write_text("double exp(double);\nfloat expf(float x) { return 1.0001 * exp(x); }\n")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", folder / "expf.so", folder / "expf.c", "-lm"]
    subprocess.run(command, check=True)
    return folder / "expf.so"
