# SPDX-License-Identifier: Apache-2.0
import platform

import pytest
from registry import MISSING


def test_tensorrt_packages_are_installed():
    """The other tests of this folder need them. They exist for x86-64 only."""
    if MISSING and platform.machine() != "x86_64":
        pytest.skip(f"no {', '.join(MISSING)}: no test of the TensorRT plugins runs")
    assert not MISSING, "pip install trtllm-replayssm[test]"
