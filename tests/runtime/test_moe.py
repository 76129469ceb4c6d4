# SPDX-License-Identifier: Apache-2.0
"""Both ways to run the experts give the same sum. (test_against_transformers.py compares the sum itself.)"""

import torch

from trtllm_replayssm.runtime import Engine
from trtllm_replayssm.runtime.model_config import MOE


def test_every_expert_and_hit_experts_agree(small):
    engine = Engine(small, device="cpu")
    _, moe = engine.model.stack.layers[engine.config.layers.index(MOE)]
    x = torch.randn(21, engine.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = moe.router(x)
    assert (weights > 0).sum(-1).eq(engine.config.experts_per_token).all()
    torch.testing.assert_close(moe.every_expert(x, weights), moe.hit_experts(x, weights), rtol=1e-4, atol=1e-5)


def test_an_expert_that_no_row_chose_is_not_run(small):
    engine = Engine(small, device="cpu")
    _, moe = engine.model.stack.layers[engine.config.layers.index(MOE)]
    x = torch.randn(3, engine.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = moe.router(x)
    moe.up[~weights.any(0)] = float("nan")
    assert moe.hit_experts(x, weights).isfinite().all()
