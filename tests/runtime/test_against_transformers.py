# SPDX-License-Identifier: Apache-2.0
"""The model computes what transformers' NemotronH computes, in fp32."""

import pytest
import torch

from trtllm_replayssm.runtime import Engine, SamplingParams

from .conftest import MARGIN, SMALL, TINY, relative_error, write_checkpoint
from .prompts import PROMPTS

transformers = pytest.importorskip("transformers")


def reference(checkpoint, time_step_limit=(0.0, float("inf"))):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # it clamps to [time_step_min, inf) instead of the checkpoint's limit
            module.time_step_limit = time_step_limit
    return model


@torch.inference_mode()
def logits_of(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.fixture(scope="module")
def tiny_reference():
    return reference(TINY)


@pytest.mark.parametrize("mode", ["replay", "conventional"])
def test_prefill_and_512_decoded_tokens(tiny_reference, recorded, device, mode):
    engine = Engine(TINY, mode=mode, device=device, dtype="float32", max_batch=1)
    (text,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=513, stop_tokens=()))
    expected = logits_of(tiny_reference, text.prompt + text.tokens)
    prompt = len(text.prompt)
    prefill = relative_error(engine.logits(text.prompt).cpu(), expected[:prompt])
    decode = relative_error(torch.cat(recorded).cpu(), expected[prompt - 1 : -1])
    print(f"relative error of logits: prefill {prefill:.2e}, decode {decode:.2e}")
    assert prefill <= 1e-3
    assert decode <= 1e-3


@pytest.mark.parametrize("mode", ["replay", "conventional"])
def test_greedy_texts_of_20_prompts(tiny_reference, device, mode):
    assert len(PROMPTS) == 20
    engine = Engine(TINY, mode=mode, device=device, dtype="float32", max_batch=8)
    for text in engine.generate(PROMPTS, SamplingParams(max_tokens=48)):
        # Greedy texts are equal if every token is the other model's choice after the same tokens.
        logits = logits_of(tiny_reference, text.prompt + text.tokens)[len(text.prompt) - 1 : -1]
        best = logits.topk(2).values
        choice = logits.argmax(-1)
        for index, token in enumerate(text.tokens):
            if choice[index] != token:
                assert float(best[index, 0] - best[index, 1]) <= MARGIN[torch.float32], f"{text.text!r} at {index}"
                break


VARIANTS = {
    "every-layer": {},
    "latent-moe": {"moe_latent_size": 48, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    "unnormalised-experts": {"norm_topk_prob": False, "n_group": 2, "topk_group": 1},
    "biases": {"use_bias": True, "mlp_bias": True, "hybrid_override_pattern": "M-*M"},
    "no-conv-bias": {"use_conv_bias": False, "conv_kernel": 3, "hybrid_override_pattern": "M*M"},
    "head-dim-80": {"mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 1, "hybrid_override_pattern": "M*M-"},
    "words": {"hybrid_override_pattern": None, "layers_block_type": ["linear_attention", "full_attention", "moe"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models(tmp_path, recorded, variant):
    raw = {key: value for key, value in (SMALL | VARIANTS[variant]).items() if value is not None}
    checkpoint = write_checkpoint(tmp_path, raw)
    engine = Engine(checkpoint, max_batch=1, device="cpu", window=8)
    (text,) = engine.generate([PROMPTS[4]], SamplingParams(max_tokens=40, stop_tokens=()))
    expected = logits_of(reference(checkpoint), text.prompt + text.tokens)
    assert relative_error(engine.logits(text.prompt), expected[: len(text.prompt)]) <= 1e-4
    assert relative_error(torch.cat(recorded), expected[len(text.prompt) - 1 : -1]) <= 1e-4


def test_time_step_limit_is_the_only_clamp(tmp_path, recorded):
    """A30. Time steps here lie far below and above the limit, and time_step_min/max/floor must not matter."""
    limit = [0.02, 0.06]
    raw = SMALL | {"time_step_limit": limit, "time_step_min": 0.5, "time_step_max": 0.6, "time_step_floor": 0.5}
    checkpoint = write_checkpoint(tmp_path, raw)
    engine = Engine(checkpoint, max_batch=1, device="cpu")
    (text,) = engine.generate([PROMPTS[4]], SamplingParams(max_tokens=24, stop_tokens=()))
    expected = logits_of(reference(checkpoint, tuple(limit)), text.prompt + text.tokens)
    assert relative_error(torch.cat(recorded), expected[len(text.prompt) - 1 : -1]) <= 1e-4
    unclamped = logits_of(reference(checkpoint), text.prompt + text.tokens)
    assert relative_error(unclamped, expected) > 1e-2
