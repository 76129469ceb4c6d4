# SPDX-License-Identifier: Apache-2.0
"""benchmarks/read_copies.py on the shipped checkpoint."""

import runpy
from pathlib import Path

import pytest
import torch

from trtllm_replayssm.evaluation.subject import Subject
from trtllm_replayssm.runtime.texts import read_rows

ROOT = Path(__file__).parents[2]


def test_errors_of_simulated_copies():
    """The steps of FP8 are a quarter of those of NVFP4. KL divergence is quadratic in small errors."""
    study = runpy.run_path(str(ROOT / "benchmarks" / "read_copies.py"))["study"]
    subject = Subject(ROOT / "examples" / "tiny-nemotron-h", torch.device("cpu"), "float32")
    texts = read_rows(subject.tokenizer, [ROOT / "LICENSE"], 2, 64)
    plain, fp8 = study(subject, texts[:1], texts[1:], 16, ["plain: amax/6", "FP8"])
    assert (plain["bits"], plain["kl_gain"], plain["read_error_gain"]) == (4.5, 1, 1)
    assert 0 < fp8["kl"] < plain["kl"] / 4
    assert fp8["read_error"] == pytest.approx(plain["read_error"] / 4, rel=0.25)
