# SPDX-License-Identifier: Apache-2.0
"""`bench kernel` on the CPU: what it counts, refuses, keeps and resumes."""

import json

import pytest
import torch

from trtllm_replayssm.bench import kernel, peers
from trtllm_replayssm.bench.kernel import Case, DecodeLoop, KernelBench
from trtllm_replayssm.bench.plot import kernel_lines
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
    # flush, 16 of them. It writes the delta of a record a step and a state a window.
    assert replay["flushes_per_step"] == replay["expected_flushes_per_step"] == round(3 / 16, 4)
    assert replay["bytes_read_per_step"] == 3 * state + round(3 * sum(range(1, 17)) / 16 * sizes.record_bytes)
    assert replay["bytes_written_per_step"] == round(3 * state / 16 + 3 * delta_bytes(sizes))
    assert (replay["tokens_in"], conventional["tokens_in"]) == ("rings", "tensors")
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


def delta_bytes(sizes):
    """Of a record, in all heads."""
    return 4 * sizes.geometry.num_heads


def test_tokens_in_rings_and_in_tensors(bench):
    """A step that appends writes whole records, one that finds them nothing but delta."""
    arguments = ("--batches", 2, "--modes", "replay", "--tokens-in", "rings", "tensors", "--no-flush", "--json")
    rings, tensors = bench(*SMALL, *arguments)[0]
    assert (rings["tokens_in"], tensors["tokens_in"]) == ("rings", "tensors")
    assert rings["bytes_read_per_step"] == tensors["bytes_read_per_step"]
    assert rings["bytes_written_per_step"] == 2 * delta_bytes(layout())
    assert tensors["bytes_written_per_step"] == 2 * layout().record_bytes


def test_only_replay_finds_tokens_in_rings():
    with pytest.raises(ValueError, match="mode conventional finds its tokens in tensors, got 'rings'"):
        Case(GEOMETRY, 1, 1, "conventional", tokens_in="rings")
    with pytest.raises(ValueError, match="mode replay finds its tokens in rings or tensors, got 'mail'"):
        Case(GEOMETRY, 1, 1, "replay", tokens_in="mail")


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_rings_are_full_of_records(tokens):
    """Before anything is timed, of random numbers that steps read and leave as they are."""
    loop = DecodeLoop(Case(GEOMETRY, 3, tokens, "replay", tokens_in="rings"), 8, torch.device("cpu"))
    rings = {}
    for name in ("x_ring", "b_ring"):
        section = loop.pool.layout.sections[name]
        rings[name] = loop.pool.data[..., section.offset : section.offset + section.bytes].view(torch.bfloat16)
        assert 0.9 < rings[name].float().std() < 1.1 and rings[name].flatten(0, 1).unique(dim=0).shape[0] == 6
    before = {name: values.clone() for name, values in rings.items()}
    loop.step()
    first = loop.out.clone()
    assert all(torch.equal(before[name], values) for name, values in rings.items())
    assert first.isfinite().all() and first.float().std() > 0.1
    loop.step()
    assert not torch.equal(loop.out, first)  # the next records, though C and dt are the same


@pytest.mark.parametrize("tokens, mode", [(1, "conventional"), (3, "conventional_verify")])
def test_with_the_convolution(bench, monkeypatch, tokens, mode):
    """Records are stored once, whoever does it, and the raw inputs that a slot keeps are counted for all."""
    monkeypatch.setattr(kernel, "steps_to_count", lambda *_: 32)
    monkeypatch.setattr(kernel, "TOLERANCE", 0.2)  # of so few steps
    arguments = ("--batches", 2, "--tokens", tokens, "--steps", 32, "--with-conv", "--json")
    (rings, tensors, conventional), errors = bench(*SMALL, *arguments)
    assert not errors  # other libraries' kernels are no part of it
    assert [record["tokens_in"] for record in (rings, tensors)] == ["rings", "tensors"]
    assert conventional["mode"] == mode and all(record["with_conv"] for record in (rings, tensors, conventional))
    for field in ("bytes_read_per_step", "bytes_written_per_step", "flushes_per_step"):
        assert rings[field] == tensors[field]
    sizes = layout(tokens)
    state, raw = sizes.sections["checkpoint"].bytes, 2 * sizes.geometry.conv_channels
    assert conventional["bytes_read_per_step"] == 2 * (state + 3 * raw)
    assert conventional["bytes_written_per_step"] == 2 * tokens * (state + raw)
    flushed = rings["flushes_per_step"] * state
    assert rings["bytes_written_per_step"] == pytest.approx(
        flushed + 2 * tokens * (sizes.record_bytes + raw), abs=state * 1e-4
    )


def test_the_same_step_whichever_way_its_tokens_take():
    """Behind a convolution that is timed, too: the figures differ in what is moved, not in what is computed."""
    outputs = []
    for mode, way in (("replay", "rings"), ("replay", "tensors"), ("conventional", "tensors")):
        loop = DecodeLoop(Case(GEOMETRY, 3, 1, mode, tokens_in=way, with_conv=True), 8, torch.device("cpu"))
        outputs.append(loop.out.float())
    assert outputs[0].std() > 0.01 and torch.equal(*outputs[:2])
    assert (outputs[2] - outputs[0]).norm() < 0.01 * outputs[0].norm()


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
    assert record["bytes_written_per_step"] == 26 * tokens * delta_bytes(sizes)


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


def test_lines_of_a_picture_say_where_tokens_were_if_there_are_both_ways():
    record = {
        "geometry": "super", "mode": "replay", "tokens": 1, "checkpoint": "fp32", "read_copy": "none", "window": 16,
        "flushes": True,
    }  # fmt: skip
    rings, conventional = record | {"tokens_in": "rings"}, record | {"mode": "conventional", "with_conv": True}
    assert kernel_lines([rings, conventional]) == {
        "super": {
            "replay, T = 1, fp32:none, L = 16": [rings],
            "conventional, T = 1, fp32:none, with convolution": [conventional],
        }
    }
    assert list(kernel_lines([rings, record])["super"]) == [
        f"replay, T = 1, fp32:none, L = 16, x and B in {way}" for way in ("rings", "tensors")
    ]


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
        (("--modes", "peer:vllm", "--with-conv"), "mode peer:vllm is timed without a convolution"),
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
