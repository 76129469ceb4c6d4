# SPDX-License-Identifier: Apache-2.0
"""Tests of the TensorRT plugins are collected where TensorRT's packages are; test_packages.py tells if not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from registry import MISSING  # noqa: E402

collect_ignore = ["test_registries.py", "test_engines.py", "test_faults.py"] if MISSING else []
