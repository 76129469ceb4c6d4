# SPDX-License-Identifier: Apache-2.0
"""The five families of `nemotron_h` models are taken in; wrong checkpoints are refused by file and tensor."""

import pytest

from trtllm_replayssm.runtime import ModelConfig
from trtllm_replayssm.runtime.weights import Weights

from .checkpoints import FAMILIES, write_family


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    config = ModelConfig.read(write_family(tmp_path, family, shards=3))
    assert len(config.layers) == FAMILIES[family]["num_hidden_layers"]
    assert Weights(tmp_path, config).has_mtp == (family in ("super-120b-a12b", "ultra-550b-a55b"))
