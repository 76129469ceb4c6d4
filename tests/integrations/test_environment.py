# SPDX-License-Identifier: Apache-2.0
"""The base package in TensorRT-LLM's environment, which pins old versions, and on hosts that are no x86."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = Path(__file__).with_name("tensorrt-llm-constraints.txt")
# What the base package does without torch: sizes, layouts, every format of a slot, and the command line.
BASE = """
import sys
sys.modules["torch"] = sys.modules["safetensors"] = sys.modules["onnx"] = None
import zlib
import numpy as np
from trtllm_replayssm import MambaGeometry, ReplayConfig, SlotLayout, _core, cli
from trtllm_replayssm.integrations.trtllm_build import checkpoint, contract
geometry = MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=64, conv_kernel=4)
for checkpoint_format in _core.CHECKPOINT_FORMATS:
    for read_copy in _core.READ_COPY_FORMATS:
        try:
            layout = SlotLayout(geometry, ReplayConfig(window=8, checkpoint=checkpoint_format, read_copy=read_copy))
        except ValueError:
            continue
        blob = np.arange(2 * layout.slot_stride, dtype=np.uint32).astype(np.uint8).reshape(2, -1)
        parts = [np.ascontiguousarray(part) for part in layout.unpack(blob).values()]
        states = [layout.state(blob, name) for name in ("checkpoint", "read_copy") if name in layout.sections]
        print(checkpoint_format, read_copy, layout.slot_stride, [zlib.crc32(part.view(np.uint8)) for part in parts])
        print([zlib.crc32(np.nan_to_num(state)) for state in states], [str(state.dtype) for state in states])
assert cli.main(["trtllm-model-file"]) == 0 and cli.main(["info"]) == 0
print(len(contract.CONTRACT["modules"]), file=sys.stderr)
"""


def base_output(path=None):
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n" * (path is not None) + BASE
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    return child.stdout


PIP = [
    sys.executable,
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--constraint",
    str(CONSTRAINTS),
]


def test_the_base_package_needs_numpy_alone():
    needed = importlib.metadata.requires("trtllm-replayssm")
    assert [line for line in needed if "extra ==" not in line] == ["numpy>=1.26"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no wheels for Python 3.13 and later")
def test_the_base_package_resolves_beside_tensorrt_llm(tmp_path):
    """What pip would install of this checkout into TensorRT-LLM's environment: the package and the pinned numpy."""
    report = tmp_path / "report.json"
    dry = ["--dry-run", "--ignore-installed", "--no-build-isolation", "--report", str(report), str(ROOT)]
    subprocess.run([*PIP, *dry], check=True, timeout=240)
    chosen = {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}
    assert chosen.keys() == {"trtllm-replayssm", "numpy"} and chosen["numpy"].startswith("1.26.")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no wheels for Python 3.13 and later")
def test_it_is_the_same_under_the_numpy_that_tensorrt_llm_pins(tmp_path):
    """pip resolves the base requirements under TensorRT-LLM's constraints; what it takes gives the same output, to the
    bit, as the numpy of this environment."""
    subprocess.run([*PIP, "--target", str(tmp_path), "numpy>=1.26"], check=True, timeout=240)
    (found,) = tmp_path.glob("numpy-*.dist-info")
    assert found.name.startswith("numpy-1.26.") and np.__version__ >= "2"
    assert base_output(tmp_path) == base_output() != ""


def test_host_code_has_no_instructions_of_one_processor():
    """Hosts of GB200 and GB300 are Arm. What only a device's compiler sees may be PTX."""
    sources = [
        path
        for folder in ("cpp", "plugins", "trtllm_replayssm")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".c")
    ]
    assert len(sources) > 25
    pattern = re.compile(r"intrin\.h|arm_neon|\b_mm\d*_|__m(128|256|512)|\basm\b|__builtin_ia32|-march|-mavx|\bcpuid\b")
    for_devices = re.compile(r"^#if defined\(__CUDA_ARCH__\).*?^#(?=else|endif)", re.M | re.S)
    assert [path.name for path in sources if pattern.search(for_devices.sub("", path.read_text()))] == []
    assert not pattern.search((ROOT / "CMakeLists.txt").read_text())
