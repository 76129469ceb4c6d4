# SPDX-License-Identifier: Apache-2.0
"""Drift runs on the shipped checkpoint, with this repository's licence as the text."""

import datetime
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.numpy import save_file

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, measurement
from trtllm_replayssm.cli import main
from trtllm_replayssm.evaluation import decays, drift, generation, subject
from trtllm_replayssm.evaluation.drift import Drift, Settings
from trtllm_replayssm.runtime import Engine, SamplingParams

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY, TEXT = ROOT / "examples" / "tiny-nemotron-h", ROOT / "LICENSE"
ARGUMENTS = ["eval", "drift", "--checkpoint", str(TINY), "--text", str(TEXT), "--device", "cpu", "--rows", "2"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def settings(**changes):
    return Settings(TINY, (TEXT,), **{"rows": 2, "tokens": 96, "dtype": "float32"} | changes)


def run(folder, configurations, device=CPU, **changes):
    return Drift(settings(**changes), configurations, folder, device).run()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp32_states_do_not_drift_from_themselves(device, dtype, tmp_path):
    result = run(tmp_path, ["fp32:none"], device, dtype=dtype)["fp32:none"]
    assert result.kl.shape == (2, 96) and (result.kl == 0).all()
    assert result.same.all()
    assert (result.loss == result.reference_loss).all()
    summary = result.summary()
    assert summary["kl_end"] == summary["slope_last_half"] == 0 and summary["top1"] == 1


def test_coarser_states_drift_further(device, tmp_path):
    """bf16 rounds 8 times as coarsely as fp16, and KL divergence is quadratic in small errors: about 64 times."""
    results = run(tmp_path, ["bf16:none", "fp16:none"], device)
    bf16, fp16 = (results[name].kl.astype(np.float64) for name in ("bf16:none", "fp16:none"))
    # The first window reads no stored state, the first token of the next one does.
    assert (bf16[:, :16] == 0).all() and (bf16[:, 16] > 0).all()
    assert 16 < bf16.mean() / fp16.mean() < 256
    assert 1e-8 < bf16.mean() < 1e-5


def test_steps_of_any_length_flush_at_the_same_tokens(tmp_path):
    """So the rounding that is measured is the same; the sums around it are not, which bounds the agreement."""
    long, short = (run(tmp_path / str(t), ["bf16:none"], step_tokens=t)["bf16:none"] for t in (16, 2))
    assert (short.kl[:, :16] < 1e-10).all()
    assert short.kl.mean() == pytest.approx(long.kl.mean(), rel=0.05)


def test_the_reference_is_the_model(tmp_path):
    """Loss of every token, against prompt passes of the runtime's engine."""
    measurement = Drift(settings(), ["fp32:none"], tmp_path, CPU)
    loss = measurement.run()["fp32:none"].reference_loss
    engine = Engine(TINY, device="cpu", dtype="float32", max_batch=1)
    for tokens, found in zip(measurement.tokens, loss, strict=True):
        expected = F.cross_entropy(engine.logits(tokens.tolist())[:-1], tokens[1:], reduction="none")
        assert torch.from_numpy(found) == pytest.approx(expected, abs=2e-4)


def test_rows_are_different_texts(tmp_path):
    tokens = Drift(settings(rows=4), ["fp32:none"], tmp_path, CPU).tokens
    assert len({tuple(row) for row in tokens.tolist()}) == 4


def test_an_interrupted_run_continues_with_the_same_results(tmp_path, monkeypatch):
    names = ["fp16:none", "bf16:none"]
    whole = run(tmp_path / "whole", names, generate=4, prompt=16)

    steps, original = [], subject.Decoder.step

    def interrupted(self, *arguments):
        steps.append(self)
        if len(steps) > 2 * 6 + 2 * (1 + 3) + 5:  # in the middle of the second configuration
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(subject.Decoder, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", names, generate=4, prompt=16)
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["fp16+none.safetensors", "settings.json"]
    monkeypatch.setattr(subject.Decoder, "step", original)
    first = (tmp_path / "parts" / "fp16+none.safetensors").stat().st_mtime_ns
    parts = run(tmp_path / "parts", names, generate=4, prompt=16)
    assert (tmp_path / "parts" / "fp16+none.safetensors").stat().st_mtime_ns == first
    for name in names:
        for field in ("kl", "same", "loss", "reference_loss", "generated", "reference_generated"):
            assert (getattr(parts[name], field) == getattr(whole[name], field)).all()


def test_results_of_other_settings_are_not_continued(tmp_path):
    run(tmp_path, ["fp32:none"])
    with pytest.raises(ValueError, match=r"another run, which differs in rows, tokens; name another folder"):
        run(tmp_path, ["fp32:none"], rows=1, tokens=112)


def test_another_tokenizer_makes_other_texts(tmp_path):
    checkpoint = Path(shutil.copytree(TINY, tmp_path / "checkpoint"))
    other = Settings(checkpoint, (TEXT,), rows=1, tokens=32)
    before = other.identity(CPU)["checkpoint"]
    (checkpoint / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text() + "\n")
    after = other.identity(CPU)["checkpoint"]
    assert [name for name in after if after[name] != before[name]] == ["tokenizer.json"]


def replacing(metadata=None, **arrays):
    """Damage to a result: other arrays, or more metadata."""

    def damage(file):
        with safe_open(file, "np") as stored:
            whole = {name: stored.get_tensor(name) for name in stored.keys()} | arrays
            about = stored.metadata() | (metadata or {})
        save_file(whole, file, about)

    return damage


NAN = np.where(np.arange(96) == 5, np.float32("nan"), np.zeros((2, 96), np.float32))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-10]), "not fully covered"),
        (lambda file: file.write_bytes(b""), "header too small"),
        (lambda file: save_file({"kl": np.zeros((2, 96), np.float32)}, file), "lacks configuration, seconds"),
        (
            lambda file: save_file(
                {"kl": np.zeros((2, 96), np.float32)},
                file,
                dict.fromkeys(("seconds", "date", "commit", "command"), "1") | {"configuration": "fp16:none"},
            ),
            "does not contain tensor same",
        ),
        (replacing({"configuration": "bf16:none"}), "it is of configuration 'bf16:none', expected 'fp16:none'"),
        (replacing({"seconds": "long"}), "could not convert string to float: 'long'"),
        (replacing(kl=NAN[:, 1:]), r"kl is float32 \[2, 95\], expected float32 \[2, 96\]"),
        (replacing(kl=NAN[0]), r"kl is float32 \[96\], expected float32 \[2, 96\]"),
        (replacing(loss=np.zeros((2, 95))), r"loss is float64 \[2, 95\], expected float32 \[2, 95\]"),
        (replacing(kl=NAN), "kl is nan in row 0 at position 5, expected finite numbers"),
    ],
    ids=[
        "torn",
        "empty",
        "no metadata",
        "no arrays",
        "another configuration",
        "no seconds",
        "shape",
        "rank",
        "dtype",
        "not finite",
    ],
)
def test_damaged_results_are_named_before_anything_is_measured(damage, message, tmp_path, monkeypatch):
    measurement = Drift(settings(), ["bf16:none", "fp16:none"], tmp_path, CPU)
    file = tmp_path / "fp16+none.safetensors"
    run(tmp_path, ["fp16:none"])
    damage(file)
    content = file.read_bytes()
    monkeypatch.setattr(subject.Decoder, "step", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=rf"fp16\+none\.safetensors: not a whole result .*{message}.*; delete it"):
        measurement.run()
    assert file.read_bytes() == content


def test_figures_that_are_not_finite_are_not_written(tmp_path, monkeypatch):
    measurement = Drift(settings(), ["fp32:none"], tmp_path, CPU)
    original = subject.Decoder.step
    monkeypatch.setattr(subject.Decoder, "step", lambda *arguments: original(*arguments) * float("nan"))
    with pytest.raises(ValueError, match="configuration 'fp32:none': kl is nan in row 0 at position 0, expected fin"):
        measurement.run()
    assert [file.name for file in tmp_path.iterdir()] == ["settings.json"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", r"settings\.json: not the JSON of a run's settings: .*; name another folder or delete this one"),
        (b"\xff", r"settings\.json: not the JSON of a run's settings: .*; name another folder or delete this one"),
        (b"[]", r"settings\.json: expected the settings of a run, got list; name another folder or delete this one"),
    ],
)
def test_damaged_settings_are_named(content, message, tmp_path, capsys):
    (tmp_path / "settings.json").write_bytes(content)
    assert main([*ARGUMENTS, "--tokens", "64", "--configs", "fp32:none", "--no-plot", "--output", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (tmp_path / "settings.json").read_bytes() == content


@pytest.mark.parametrize(
    "configurations, changes, message",
    [
        (["fp31:none"], {}, r"configuration 'fp31:none': checkpoint: expected one of fp32, .*, got 'fp31'"),
        (["fp32:fp3"], {}, r"configuration 'fp32:fp3': read_copy: expected one of none, .*, got 'fp3'"),
        (["fp32"], {}, r"configuration 'fp32': expected CHECKPOINT:READ_COPY"),
        (["fp32:none", "fp32:none"], {}, r"expected different ones, got fp32:none fp32:none"),
        (["fp32:none"], {"rows": 3, "tokens": 4096}, r"3 different texts of 4096 tokens .* hold \d: .*LICENSE has \d+"),
    ],
)
def test_bad_runs_are_named(configurations, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", configurations, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": 0}, "rows is 0, expected at least 1"),
        ({"tokens": 100}, "tokens is 100, expected a multiple of the step's 16 tokens"),
        ({"window": 24}, "window is 24, expected a multiple of the step's 16 tokens"),
        ({"generate": -1}, "generate is -1, expected at least 0"),
        ({"generate": 4, "prompt": 4096}, "prompt is 4096, expected fewer than the 96 tokens of a text"),
        ({"generate": 4, "prompt": 96}, "prompt is 96, expected fewer than the 96 tokens of a text"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_text_that_is_no_text(tmp_path):
    (tmp_path / "noise").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"noise: expected UTF-8 text, got byte 3"):
        Drift(Settings(TINY, (tmp_path / "noise",)), ["fp32:none"], tmp_path / "run", CPU)


def test_texts_that_are_not_different(tmp_path):
    """The same file under two names, a copy of it, and one that holds the same text further on."""
    (tmp_path / "text").write_bytes(TEXT.read_bytes()[:1200])
    (tmp_path / "link").symlink_to("text")
    shutil.copy(tmp_path / "text", tmp_path / "copy")
    (tmp_path / "later").write_text("He said so, and then: " + (tmp_path / "text").read_text())

    def refused(*names, message):
        files = tuple(tmp_path / name for name in names)
        with pytest.raises(ValueError, match=message):
            Drift(Settings(TINY, files, rows=2, tokens=256), ["fp32:none"], tmp_path / "run", CPU)
        assert not (tmp_path / "run").exists()

    refused("text", "text", message="texts: expected different files, got .*/text and .*/text, which are the same")
    refused("text", "link", message="texts: expected different files, got .*/text and .*/link, which are the same")
    for name in ("copy", "later"):
        message = rf"rows 0 and 1 of .*/text, .*/{name} share 64 tokens in a row, expected different texts"
        refused("text", name, message=message)


def test_generation_is_greedy_decoding(device):
    """The tokens that the runtime's engine generates, from prompts of several steps."""
    of = subject.Subject(TINY, device, "float32")
    prompts = torch.tensor([of.tokenizer.encode("In the beginning God created the heaven and the earth")[:12]] * 2)
    tokens = generation.generate(of, ReplayConfig(16, 4, activation="fp32"), prompts.to(device), 20, 4)
    engine = Engine(TINY, device=str(device), dtype="float32", max_batch=1)
    params = SamplingParams(max_tokens=20, stop_tokens=())
    expected = engine.generate([prompts[0].tolist()], params)[0].tokens
    assert tokens.tolist() == [expected, expected]


def test_decays_and_shares(tmp_path):
    """One layer of two groups, two windows: against the state that the pool hands out between them."""
    random = torch.Generator().manual_seed(3)
    rows, heads, window, heads_a_group = 2, 4, 8, 2
    with pytest.warns(UserWarning, match="nearly every step flushes"):
        config = ReplayConfig(window, window, activation="fp32")
    pool = StatePool(MambaGeometry(heads, 8, heads // heads_a_group, 64), config, rows, 1)
    pool.reset([0, 1])
    A_log, D, dt_bias = (torch.randn(heads, generator=random) for _ in range(3))
    observer = decays._Observer(heads, CPU)
    rho, share = [], []
    for _ in range(2):
        x, B, C, dt = (
            torch.randn(rows * window, *shape, generator=random) for shape in ((heads, 8), (2, 64), (2, 64), (heads,))
        )
        state, _ = pool.materialize(0, [0, 1], A_log)
        plan = pool.plan([0, 1], window)
        y = observer(pool, 0, plan, x, B, C, dt, A_log, D, dt_bias, (0.0, float("inf")))
        pool.commit(plan)
        log_decay = (-A_log.exp() * F.softplus(dt + dt_bias)).view(rows, window, heads).cumsum(1)
        rho.append(log_decay[:, -1].exp())
        C = C.view(rows, window, 2, 64).repeat_interleave(heads_a_group, 2)
        read = log_decay.exp()[..., None] * torch.einsum("rhpn,rthn->rthp", state, C)
        of_group = y.view(rows, window, 2, heads_a_group * 8).square().sum(-1).mean(1).repeat_interleave(2, 1)
        share.append(read.square().sum(-1).mean(1) / of_group)
    rho, share = torch.stack(rho), torch.stack(share)
    assert observer.windows == 2
    assert observer.decay / 2 == pytest.approx(rho.double().mean((0, 1)), rel=1e-5)
    assert observer.squared_decay / 2 == pytest.approx(rho.double().square().mean((0, 1)), rel=1e-5)
    assert observer.share / 2 == pytest.approx(share.double().mean((0, 1)), rel=1e-4)


def test_measured_decays_of_the_checkpoint(tmp_path):
    measurement = Drift(settings(), ["fp32:none"], tmp_path, CPU)
    measured = decays.measure_decays(measurement.subject, measurement.tokens, 16)
    decay, ratio, share = (np.array(measured[name]) for name in ("decay", "ratio", "share"))
    assert decay.shape == ratio.shape == share.shape == (3, 8)
    assert ((0 < decay) & (decay < 1)).all() and (ratio >= np.round(1 / (1 - decay**2), 2) - 0.01).all()
    assert share.sum() == pytest.approx(1, abs=2e-3)
    assert measured["predicted_ratio"] == pytest.approx((ratio * share).sum(), rel=1e-2)
    # Over twice the window a head keeps the square of its decay.
    twice = decays.measure_decays(measurement.subject, measurement.tokens, 32)
    assert np.array(twice["decay"]) == pytest.approx(decay**2, abs=1e-3)
    with pytest.raises(ValueError, match="decays: expected texts of at least 32 tokens, got 16"):
        decays.measure_decays(measurement.subject, measurement.tokens[:, :16], 16)


def test_command(tmp_path, capsys):
    arguments = [*ARGUMENTS, "--configs", "fp32:none", "bf16:none", "--tokens", "64", "--generate", "8"]
    arguments += ["--prompt", "16", "--output", str(tmp_path)]
    assert main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].startswith("fp32:none") and "0 (0 … 0)" in table[1] and table[2].startswith("bf16:none")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "drift.json").read_text())
    first, second = report["records"]
    assert (second["bench"], second["checkpoint"], second["read_copy"]) == ("drift", "bf16", "none")
    assert (second["tokens"], second["rows"], second["model"]) == (64, 2, "tiny-nemotron-h")
    assert first["kl_end"] == 0 < second["kl_end"]
    assert second["kl_end_interval"][0] <= second["kl_end"] <= second["kl_end_interval"][1]
    assert [(bucket["from"], bucket["to"]) for bucket in second["kl_by_bucket"]] == [(1, 16), (17, 32), (33, 64)]
    assert second["kl_by_bucket"][0]["kl"] == 0 < second["kl_by_bucket"][2]["kl"]
    assert first["generation"]["prompt"] == 16 and first["generation"]["tokens"] == 8
    assert first["generation"]["agreement"] == 8 and first["generation"]["length_growth"] == 1
    assert report["decays"]["predicted_ratio"] > 1
    assert str(ROOT) not in (tmp_path / "drift.json").read_text()


def test_one_text_has_no_interval(tmp_path, capsys):
    arguments = [*ARGUMENTS, "--configs", "bf16:none", "--tokens", "64", "--rows", "1", "--output", str(tmp_path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1].count("(-)") == 2
    (record,) = json.loads((tmp_path / "drift.json").read_text())["records"]
    assert record["kl_end"] > 0
    for name in ("kl_end_interval", "slope_last_half_interval", "top1_interval"):
        assert record[name] is None
    assert [bucket["interval"] for bucket in record["kl_by_bucket"]] == [None] * 3
    assert main(["eval", "plot", str(tmp_path)]) == 0


def test_records_tell_when_and_with_what_they_were_measured(tmp_path, monkeypatch):
    def measure(day, commit, *configurations):
        arguments = [*ARGUMENTS, "--tokens", "32", "--commit", commit, "--no-plot", "--output", str(tmp_path)]
        arguments += ["--configs", *configurations]
        today = datetime.date(2031, 5, day)
        monkeypatch.setattr(drift, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: today)))
        assert main(arguments) == 0
        records = json.loads((tmp_path / "drift.json").read_text())["records"]
        return [(r["checkpoint"], r["date"], r["commit"], r["command"].partition("--configs ")[2]) for r in records]

    assert measure(1, "a1", "fp16:none") == [("fp16", "2031-05-01", "a1", "fp16:none")]
    assert measure(2, "b2", "bf16:none", "fp16:none") == [
        ("bf16", "2031-05-02", "b2", "bf16:none fp16:none"),
        ("fp16", "2031-05-01", "a1", "fp16:none"),
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "16"], "tokens is 16, expected at least 32"),
        (["--tokens", "64", "--decay-tokens", "0"], "decay_tokens is 0, expected at least 32"),
        (["--tokens", "64", "--decay-tokens", "-1"], "decay_tokens is -1, expected at least 32"),
    ],
)
def test_too_few_tokens_for_the_decays_are_named_before_the_run(arguments, message, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main([*ARGUMENTS, *arguments, "--configs", "fp32:none", "--no-plot", "--output", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_missing_matplotlib_is_named_before_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*ARGUMENTS, "--configs", "fp32:none", "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "plots need matplotlib" in error and "pip install 'trtllm-replayssm[eval]'" in error
    assert not (tmp_path / "run").exists()


def test_plot_of_a_run_made_elsewhere(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(sys.modules, "matplotlib", None)
        assert (
            main([*ARGUMENTS, "--configs", "bf16:none", "--tokens", "64", "--no-plot", "--output", str(tmp_path)]) == 0
        )
    assert not (tmp_path / "drift.png").exists()
    assert main(["eval", "plot", str(tmp_path)]) == 0
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    report = json.loads((tmp_path / "drift.json").read_text())
    (record,) = report["records"]
    first, *rest = record["kl_by_bucket"]

    def records(**changes):
        return json.dumps({"records": [record, record | changes]})

    (tmp_path / "drift.png").unlink()
    for content, message in (
        ("[", "not the JSON of a run"),
        ("[" * 100_000, "not the JSON of a run"),
        ("{}", "expected the JSON of a run, found no 'records'"),
        ('{"records": 5}', "records is 5, expected a list"),
        ('{"records": [5]}', "records[0]: found 5, expected an object"),
        ('{"records": [{}]}', "records[0]: has no 'model', expected a string"),
        (records(rows="8"), "records[1]: rows is '8', expected a number"),
        (records(kl_by_bucket=None), "records[1]: kl_by_bucket is None, expected a list"),
        (records(kl_by_bucket=[first, {}]), "records[1]: kl_by_bucket[1]: has no 'from', expected a number"),
        (
            records(kl_by_bucket=[first | {"interval": [0.5]}, *rest]),
            "records[1]: kl_by_bucket[0]: interval is [0.5], expected two numbers",
        ),
    ):
        (tmp_path / "drift.json").write_text(content)
        assert main(["eval", "plot", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / 'drift.json'}: {message}" in error and error.count("\n") == 1
        assert not (tmp_path / "drift.png").exists()


def test_files_are_written_whole(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(measurement.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        measurement.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "old"
