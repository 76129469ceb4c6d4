# SPDX-License-Identifier: Apache-2.0
"""`bench kernel` on the CPU: what it counts, refuses, keeps and resumes."""

import json

import pytest

from trtllm_replayssm.bench import kernel, peers
from trtllm_replayssm.bench.kernel import KernelBench
from trtllm_replayssm.cli import main

from .conftest import FIELDS, GEOMETRY, SMALL, layout
from .libraries import Reference

pytestmark = pytest.mark.usefixtures("known_bandwidths")


def test_records(bench):
    """A record a case; bytes are those that the layout gives a step, and fractions what they make of the time."""
    records, errors = bench(*SMALL, "--batches", 3, "--json")
    assert [record["mode"] for record in records] == ["replay", "conventional"]
    assert all(set(record) == FIELDS for record in records)
    assert records[0]["command"].startswith(f"trtllm-replayssm bench kernel --geometry {GEOMETRY} --steps 16")
    assert all(f"peer:{name} is not measured: " in errors for name in peers.PEERS)
    replay, conventional = records
    sizes = layout()
    state = sizes.sections["checkpoint"].bytes
    # A row at T = 1, L = 16 reads the state in every step and, over a window, records 0 to 15 of earlier steps; at a
    # flush, 16 of them. It writes a record a step and a state a window.
    assert replay["flushes_per_step"] == replay["expected_flushes_per_step"] == round(3 / 16, 4)
    assert replay["bytes_read_per_step"] == 3 * state + round(3 * sum(range(1, 17)) / 16 * sizes.record_bytes)
    assert replay["bytes_written_per_step"] == round(3 * state / 16 + 3 * sizes.record_bytes)
    assert conventional["bytes_read_per_step"] == conventional["bytes_written_per_step"] == 3 * state
    moved = replay["bytes_read_per_step"] + replay["bytes_written_per_step"]
    assert replay["fraction_of_read_bandwidth"] == pytest.approx(moved / (replay["us"] * 1e-6) / 1e9, abs=6e-4)
    assert replay["us_min"] <= replay["us"] <= replay["us_max"]


def test_verification_counts_what_it_accepts(bench):
    """A16."""
    arguments = ("--batches", 8, "--tokens", 4, "--modes", "replay", "conventional_verify", "--json")
    replay, snapshots = bench(*SMALL, *arguments)[0]
    assert replay["steps"] > 16  # enough that 2 % of the flushes are no chance
    assert replay["flushes_per_step"] == pytest.approx(replay["expected_flushes_per_step"], rel=0.02)
    assert replay["accepted_per_row_and_step"] == pytest.approx(2.5, rel=0.03)
    state = layout(4).sections["checkpoint"].bytes
    assert (snapshots["bytes_read_per_step"], snapshots["bytes_written_per_step"]) == (8 * state, 4 * 8 * state)


@pytest.mark.parametrize("formats, reads", [("fp32:none", "checkpoint"), ("fp16_sr:nvfp4", "read_copy")])
@pytest.mark.parametrize("tokens", [1, 4])
def test_steps_without_flushes(bench, formats, reads, tokens):
    """Rows stay where they are, at every phase that does not flush, and only read the state."""
    arguments = ("--batches", 26, "--formats", formats, "--tokens", tokens, "--no-flush", "--json")
    (record,) = bench(*SMALL, *arguments)[0]
    assert (record["flushes_per_step"], record["accepted_per_row_and_step"]) == (0, 0)
    sizes = layout(tokens, *formats.split(":"))
    phases = 16 - tokens + 1
    history = sum(row % phases for row in range(26))
    assert record["bytes_read_per_step"] == 26 * sizes.sections[reads].bytes + history * sizes.record_bytes
    assert record["bytes_written_per_step"] == 26 * tokens * sizes.record_bytes


def test_a_wrong_count_of_flushes_is_refused(bench, monkeypatch, tmp_path):
    """A16. Off by 2.5 %: not recorded, said, and the exit code tells. The other cases are measured."""
    right = kernel.flushes_per_row_and_step
    monkeypatch.setattr(kernel, "flushes_per_row_and_step", lambda window, tokens: right(window, tokens) * 1.025)
    output = tmp_path / "kernel.json"
    shown, errors = bench(*SMALL, "--batches", 2, "--output", output, code=1)
    assert "invalid run, not recorded" in errors and "0.1250 flushes a step were counted" in errors
    assert [record["mode"] for record in json.loads(output.read_text())] == ["conventional"]
    assert " replay " not in shown


def test_an_interrupted_run_goes_on(bench, monkeypatch, tmp_path):
    output = tmp_path / "kernel.json"
    arguments = (*SMALL, "--batches", 1, 2, 3, "--modes", "replay", "--output", output)
    measure, measured = KernelBench.measure, []

    def until_the_third(self, case):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case.batch)
        return measure(self, case)

    monkeypatch.setattr(KernelBench, "measure", until_the_third)
    bench(*arguments, code=130)
    kept = json.loads(output.read_text())
    assert [record["batch"] for record in kept] == measured == [1, 2]
    monkeypatch.setattr(KernelBench, "measure", lambda self, case: measured.append(case.batch) or measure(self, case))
    records, _ = bench(*arguments, "--json")
    assert measured == [1, 2, 3]
    assert json.loads(output.read_text()) == records and records[:2] == kept
    # Another commit's figures are another case's.
    bench(*arguments, "--commit", "abc")
    assert measured == [1, 2, 3, 1, 2, 3]
    assert json.loads(output.read_text())[:3] == records


def test_picture(bench, tmp_path):
    arguments = (*SMALL[:-1], "--batches", 1, 2, "--modes", "replay")
    bench(*arguments, "--output", tmp_path / "kernel.json")
    drawn = (tmp_path / "kernel.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "kernel.png").unlink()
    assert main(["bench", "plot", str(tmp_path / "kernel.json")]) == 0
    assert (tmp_path / "kernel.png").read_bytes() == drawn


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--geometry", "mega"), "geometry is 'mega', expected super, nano4b, ultra, or HEADS"),
        (("--geometry", "4x16x3x64"), "num_heads"),
        (("--batches", "0"), "batch is 0, expected at least 1"),
        (("--modes", "fast"), "unknown 'fast', expected some of replay conventional"),
        (("--modes", "conventional", "--tokens", "2"), "use conventional_verify"),
        (("--modes", "peer:vllm", "--tokens", "5"), "mode peer:vllm takes 4 tokens, got 5"),
        (("--modes", "conventional", "--formats", "fp16_sr:none"), "mode conventional takes fp32, bf16, fp16"),
        (("--modes", "conventional", "--no-flush"), "--no-flush goes with mode replay"),
        (("--formats", "fp32"), "expected CHECKPOINT:READ_COPY"),
        (("--formats", "fp32:none", "fp12:none"), "got 'fp12'"),
        (("--windows", "3", "--tokens", "4"), "max_step_tokens"),
        (("--output", "results"), "expected a name that ends in .json"),
        (("--steps", "0"), "--steps is 0, expected at least 1"),
        (("--prefill", "64", "--modes", "conventional"), "expected replay and peer:mamba_ssm"),
    ],
)
def test_bad_options(bench, monkeypatch, arguments, message):
    """Refused before anything is measured."""
    monkeypatch.setitem(peers.PEERS, "vllm", Reference("no-such-package", "torch"))
    monkeypatch.setattr(KernelBench, "measure", lambda *_: pytest.fail("measured"))
    assert message in bench(*SMALL, *arguments, code=2)[1]


def test_pictures_of_other_records(capsys, tmp_path):
    (tmp_path / "drift.json").write_text('[{"bench": "drift"}]')
    assert main(["bench", "plot", str(tmp_path / "drift.json")]) == 2
    assert "expected records of one of kernel, prefill, step, serve, got drift" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[", "{}", "[1]", '[{"model": 1}]'])
def test_other_files_are_not_touched(bench, tmp_path, content):
    file = tmp_path / "kernel.json"
    file.write_text(content)
    assert str(file) in bench(*SMALL, "--output", file, code=2)[1]
    assert file.read_text() == content


def test_prefill(bench, tmp_path):
    output = tmp_path / "prefill.json"
    records, errors = bench(
        *SMALL[:-1], "--prefill", 40, 64, "--formats", "fp32:none", "fp16_sr:nvfp4", "--output", output, "--json"
    )
    assert "peer:mamba_ssm is not measured" in errors
    assert [(r["tokens"], r["checkpoint"]) for r in records] == [
        (40, "fp32"), (40, "fp16_sr"), (64, "fp32"), (64, "fp16_sr"),
    ]  # fmt: skip
    assert all(record["bench"] == "prefill" and record["us"] > 0 for record in records)
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
