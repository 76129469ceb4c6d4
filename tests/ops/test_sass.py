# SPDX-License-Identifier: Apache-2.0
"""The conversions of stored states are single instructions on the targets that have them.

This is all that is known of them without such a GPU: that they are there, not what they do.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# SASS names: F2FP packs or unpacks pairs; .RS rounds stochastically.
E4M3 = {"F2FP.F16.E4M3.UNPACK_B", "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"}
E2M1 = {"F2FP.F16.E2M1.UNPACK_B", "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"}
STOCHASTIC = {"F2FP.F16.F32.PACK_AB.RS", "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C.RS"}


def find_disassembler() -> str | None:
    """cuobjdump of a toolkit, or the one that triton brings."""
    triton = importlib.util.find_spec("triton")
    places = [Path(place) / "backends/nvidia/bin" for place in triton.submodule_search_locations] if triton else []
    return shutil.which("cuobjdump") or next(filter(None, (shutil.which("cuobjdump", path=p) for p in places)), None)


@pytest.mark.parametrize(
    "architecture, expected",
    [("90a", E4M3), ("100a", E4M3 | E2M1 | STOCHASTIC), ("103a", E4M3 | E2M1 | STOCHASTIC)],
)
def test_flush_converts_by_instruction(architecture, expected, pytestconfig, tmp_path):
    nvcc, disassembler = shutil.which("nvcc"), find_disassembler()
    if not nvcc or not disassembler:
        pytest.skip("needs nvcc and cuobjdump on PATH; with them run pytest tests/ops/test_sass.py")
    sources, cubin = pytestconfig.rootpath / "cpp", tmp_path / "fold.cubin"
    includes = [f"-I{sources / path}" for path in ("include", "src", "src/cuda")]
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-cubin", *includes]
    subprocess.run([*command, sources / "src/cuda/fold.cu", "-o", cubin], check=True, timeout=240)
    sass = subprocess.run([disassembler, "-sass", cubin], check=True, capture_output=True, text=True, timeout=60).stdout
    found = set(re.findall(r"F2FP\.[A-Z0-9_.]+", sass))
    assert expected <= found
    assert (E4M3 | E2M1 | STOCHASTIC) & found == expected
