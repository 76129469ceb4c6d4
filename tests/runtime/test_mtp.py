# SPDX-License-Identifier: Apache-2.0
"""Drafts of the multi-token-prediction head are what the head, computed independently, predicts."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm.runtime import CheckpointError, Engine, SamplingParams

from .conftest import SMALL, TINY, relative_error, write_checkpoint
from .prompts import PROMPTS

LONG = " ".join(PROMPTS)


@pytest.fixture(scope="module")
def trainer():
    """The model as it was trained."""
    sys.path.insert(0, str(TINY))
    try:
        import train
    finally:
        sys.path.remove(str(TINY))
    return train.load_model(TINY, "cpu")


@torch.inference_mode()
def expected_logits(model, tokens, drafts):
    """fp32 [drafts, vocab], from whole sequences that go through the head again and again.

    tokens: all that are accepted; the model has seen all but the last.
    """
    embedded = model.backbone.embeddings(torch.tensor([tokens[1:]]))
    hidden = model.backbone(torch.tensor([tokens[:-1]]))
    logits = []
    for _ in range(drafts):
        out = model.mtp(embedded, hidden)[:, -1:]
        logits.append(model.lm_head(out)[0, 0])
        hidden = torch.cat([hidden, out], 1)
        embedded = torch.cat([embedded, model.backbone.embeddings(logits[-1].argmax()[None, None])], 1)
    return torch.stack(logits)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 24, 512])
def test_drafts_are_the_heads_predictions(trainer, chunk, deterministic, device, in_step):
    """After each of several steps, accepted and rejected drafts alike; prompts in chunks."""
    engine = Engine(
        TINY, device=device, dtype="float32", max_batch=2, prefill_chunk=chunk, speculation="mtp", cuda_graphs=False,
        deterministic=deterministic,
    )  # fmt: skip
    seen, logits = [], engine.model.logits

    def recording(hidden):
        seen.append(logits(hidden))
        return seen[-1]

    engine.model.logits = recording
    text = engine.add_request(engine.tokenizer.encode(LONG)[:60], SamplingParams(max_tokens=40, stop_tokens=()))
    worst, kept = 0.0, set()
    while True:
        seen.clear()
        engine.step()
        if text.finish_reason is not None:
            break
        if text.tokens:
            given = torch.cat([rows[-1:] for rows in seen[-3:]]).cpu()
            assert given.argmax(-1).tolist() == text.drafts
            worst = max(worst, relative_error(given, expected_logits(trainer, text.prompt + text.tokens, 3)))
            kept |= {step for step in text.steps}
    print(f"relative error of the head's logits {worst:.1e}; steps {sorted(kept)}")
    assert worst <= 1e-5
    assert len({accepted for _, accepted in kept}) >= 3


def test_acceptance_of_the_shipped_checkpoint(device):
    """More than half of the first drafts are right, and further ones help."""
    rates = {}
    for drafts in (1, 3):
        engine = Engine(TINY, device=device, dtype="float32", max_batch=20, speculation="mtp", draft_tokens=drafts)
        engine.generate(PROMPTS, SamplingParams(max_tokens=64))
        rates[drafts] = engine.statistics()["acceptance"]
    print({drafts: (round(a.rate, 3), round(a.tokens_per_step, 3)) for drafts, a in rates.items()})
    assert rates[1].rate > 0.65
    assert rates[3].tokens_per_step > 2.2 > rates[1].tokens_per_step > 1.6


def test_other_layers_and_latent_experts(tmp_path):
    """A head with an MLP, two attention layers and LatentMoE drafts, and the text stays the same."""
    raw = SMALL | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-*E", "moe_latent_size": 48}
    checkpoint = write_checkpoint(tmp_path, raw)
    params = SamplingParams(max_tokens=40, stop_tokens=())
    engine = Engine(checkpoint, device="cpu", speculation="mtp", max_batch=2)
    texts = engine.generate(PROMPTS[:2], params)
    expected = Engine(checkpoint, device="cpu", max_batch=2).generate(PROMPTS[:2], params)
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert engine.memory.kv.keys.shape[0] == 1 + 2


MTP = SMALL | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (SMALL, r"speculation 'mtp' drafts with the checkpoint's mtp.\* tensors, but it has none"),
        (MTP | {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2 .*supports one MTP layer"),
        (MTP | {"mtp_hybrid_override_pattern": "M*"}, "MTP layers are mamba, attention; .*without Mamba"),
    ],
)
def test_heads_that_cannot_draft_are_refused(tmp_path, raw, message):
    checkpoint = write_checkpoint(tmp_path, raw)
    with pytest.raises(CheckpointError, match=message):
        Engine(checkpoint, device="cpu", speculation="mtp")
    Engine(checkpoint, device="cpu", speculation="ngram")


def test_head_that_the_weights_lack(tmp_path):
    """transformers drops the head on saving, and its configuration stays."""
    checkpoint = write_checkpoint(tmp_path, MTP)
    path = checkpoint / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("mtp.")}, path)
    with pytest.raises(CheckpointError, match="but it has none; 'ngram' needs no weights"):
        Engine(checkpoint, device="cpu", speculation="mtp")


def test_the_head_is_read_only_if_it_drafts(tmp_path, monkeypatch):
    from trtllm_replayssm.runtime.weights import Weights

    read, names = Weights.read, []
    monkeypatch.setattr(Weights, "read", lambda self, name, *more: names.append(name) or read(self, name, *more))
    checkpoint = write_checkpoint(tmp_path, MTP)
    for speculation in (None, "ngram", "mtp"):
        names.clear()
        Engine(checkpoint, device="cpu", speculation=speculation)
        assert any(name.startswith("mtp.") for name in names) == (speculation == "mtp")
