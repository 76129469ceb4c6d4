# SPDX-License-Identifier: Apache-2.0
"""The command line, run as a user runs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_replayssm.builder import tensorrt_package
from trtllm_replayssm.builder.tensorrt_package import TensorRT
from trtllm_replayssm.cli import main
from trtllm_replayssm.gpus import GPU

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "examples" / "tiny-nemotron-h")


def run(*arguments, code=0, cwd=ROOT, text=None):
    result = subprocess.run(
        [sys.executable, "-m", "trtllm_replayssm", *arguments],
        capture_output=True,
        text=True,
        input=text,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


def test_info():
    lines = run("info").stdout.splitlines()
    assert lines[0].startswith("trtllm-replayssm ")
    first = ["CPU", "CUDA", "torch", "GPU", "runtime", "plugins", "TensorRT", "build", "run"]
    assert [line.split()[0] for line in lines[1:]] == first


def test_info_json(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == []
    assert report["cuda_ops"] == bool(report["cuda_architectures"])
    assert report["plugins"].startswith("libtrtllm_replayssm_plugins.so, with")
    assert set(report["engines"]) == {"build", "run"}


@pytest.mark.parametrize(
    "found, packages, cuda, build, run",
    [
        ([], ["rtx", "lean"], False, "plans by tensorrt_rtx 1.7.1; a plan of TensorRT for RTX runs on RTX", "no GPU"),
        ([(9, 0)], ["rtx"], True, "plans by tensorrt_rtx 1.7.1", "no plans: X (compute capability 9.0) needs tensorrt"),
        (
            [(12, 0)],
            ["rtx"],
            True,
            "plans by tensorrt_rtx 1.7.1",
            "plans of tensorrt_rtx on X (compute capability 12.0)",
        ),
        ([(9, 0)], ["full"], True, "plans by tensorrt 10.15", "plans of tensorrt on X (compute capability 9.0)"),
        ([(9, 0)], ["full"], False, "plans by tensorrt 10.15", "no plans: the plugins were built without CUDA ops"),
        ([], [], True, "no plans: no TensorRT is installed: pip install", "no plans: there is no GPU"),
    ],
)
def test_what_can_be_done_with_engines(monkeypatch, found, packages, cuda, build, run):
    names = {"rtx": "tensorrt_rtx", "full": "tensorrt", "lean": "tensorrt_lean"}
    made = {"rtx": TensorRT("tensorrt_rtx", "1.7.1", None), "full": TensorRT("tensorrt", "10.15", None)}

    def find():
        if "full" in packages or "rtx" in packages:
            return made["full" if "full" in packages else "rtx"]
        raise tensorrt_package.NoTensorRT("no TensorRT is installed: pip install …")

    monkeypatch.setattr(tensorrt_package, "find", find)
    monkeypatch.setattr(tensorrt_package, "installed", lambda: {names[package]: "1" for package in packages})
    monkeypatch.setattr(tensorrt_package.gpus, "found", lambda: [GPU("X", capability) for capability in found])
    monkeypatch.setattr(tensorrt_package._core, "has_cuda", lambda: cuda)
    abilities = tensorrt_package.abilities()
    assert abilities["build"].startswith(build) and run in abilities["run"]


def test_generate_by_an_engine_folder(tmp_path, capsys):
    """The checkpoint's text, streamed and as JSON; options that a folder decides are refused, by name."""
    folder = str(tmp_path / "engine")
    sizes = ["--max-batch", "2", "--max-seq-len", "64", "--draft-tokens", "3", "--dtype", "float32", "--no-plans"]
    assert main(["build", "--checkpoint", TINY, "--output", folder, *sizes]) == 0
    capsys.readouterr()
    more = ["--prompt", "In the beginning", "--max-tokens", "20", "--speculative", "mtp"]
    assert main(["generate", "--checkpoint", TINY, "--device", "cpu", *more]) == 0
    expected = capsys.readouterr().out.split("\n\n")
    assert main(["generate", "--engine", folder, "--executor", "reference", *more]) == 0
    given = capsys.readouterr().out.split("\n\n")
    assert given[0] == expected[0] and given[2:] == expected[2:]  # the text; all but the seconds
    assert main(["generate", "--engine", folder, "--executor", "reference", *more, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "In the beginning" + report["results"][0]["text"] == expected[0]
    assert (report["dtype"], report["checkpoint_format"], report["speculation"]["draft_tokens"]) == (
        "float32",
        "fp32",
        3,
    )
    for option, message in (
        (["--engine", folder, "--executor", "reference", "--window", "8"], "--window: the engine folder says that"),
        (["--engine", folder, "--executor", "gpu"], "executor is 'gpu', expected one of tensorrt, reference"),
        (["--engine", folder], "has no plans: sh "),
        (["--checkpoint", TINY, "--executor", "reference"], "--executor needs --engine"),
        (["--engine", TINY], "has no key 'format', expected the config.json of an engine folder"),
    ):
        assert main(["generate", *option, *more]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """The shipped checkpoint with a NaN in the first layer's A_log."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("spoilt") / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.0.mixer.A_log"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_lost_state_is_one_line(spoilt, tmp_path, capsys):
    folder = str(tmp_path / "engine")
    sizes = ["--max-batch", "2", "--max-seq-len", "64", "--dtype", "float32", "--no-plans"]
    assert main(["build", "--checkpoint", str(spoilt), "--output", folder, *sizes]) == 0
    sources = ((["--engine", folder, "--executor", "reference"], folder), (["--checkpoint", str(spoilt)], str(spoilt)))
    for source, name in sources:
        capsys.readouterr()
        assert main(["generate", *source, "--prompt", "In", "--max-tokens", "4", "--json"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(
            f"trtllm-replayssm: error: {name}: row 0: the state of head 0 in layer 0 was stored with a NaN"
        )
        assert captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError("CUDA out of memory.\nTried to allocate"), "CUDA out of memory. Tried to allocate"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_failures_of_libraries_are_one_line(error, message, capsys, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("trtllm_replayssm.cli._engine", fails)
    assert main(["generate", "--checkpoint", TINY, "--prompt", "x"]) == 2
    assert capsys.readouterr().err == f"trtllm-replayssm: error: {message}\n"


def test_info_with_numpy_only_says_what_is_missing():
    """Imports of the other packages fail as if they were not installed."""
    code = (
        "import sys\n"
        "sys.modules.update({name: None for name in ('torch', 'safetensors', 'tokenizers', 'tqdm')})\n"
        "from trtllm_replayssm.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, "info"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "needs torch, safetensors, tokenizers, tqdm: pip install 'trtllm-replayssm[runtime]'" in result.stdout
    arguments = ["generate", "--checkpoint", TINY, "--prompt", "x"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pip install 'trtllm-replayssm[runtime]'" in result.stderr


def test_generate_streams_and_reports():
    result = run(
        "generate", "--checkpoint", TINY, "--prompt", "In the beginning", "--max-tokens", "40", "--device", "cpu"
    )
    assert result.stdout.startswith("In the beginning")
    assert "tokens/s  (replay, cpu, float32)" in result.stdout
    assert "(conventional: what it moves for the same tokens" in result.stdout
    assert result.stderr == ""


def test_generate_json_from_a_file_of_prompts(tmp_path):
    """One prompt a line; blank lines are skipped."""
    (tmp_path / "prompts.txt").write_text("In the beginning\n\nAnd it came to pass\n")
    arguments = ["--checkpoint", TINY, "--prompt-file", str(tmp_path / "prompts.txt"), "--max-tokens", "34"]
    result = json.loads(run("generate", *arguments, "--mode", "conventional", "--device", "cpu", "--json").stdout)
    assert [entry["prompt"] for entry in result["results"]] == ["In the beginning", "And it came to pass"]
    assert result["mode"] == "conventional"
    assert result["counted"] == {"conventional": "while decoding", "replay": "by a rehearsal of the same steps"}
    traffic = result["traffic"]
    assert traffic["conventional"]["state_bytes_written"] > 4 * traffic["replay"]["state_bytes_written"] > 0
    assert traffic["conventional"]["tokens"] == traffic["replay"]["tokens"] == result["decode_tokens"]


def test_generate_sampling_repeats_with_its_seed(capsys):
    texts = []
    for seed in ("5", "5", "6"):
        arguments = ["--prompt", "And", "--max-tokens", "16", "--temperature", "1", "--top-k", "50", "--top-p", "0.9"]
        assert main(["generate", "--checkpoint", TINY, *arguments, "--seed", seed, "--device", "cpu", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["results"][0]["tokens"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_generate_with_speculation(capsys, drafter):
    arguments = [
        "generate",
        "--checkpoint",
        TINY,
        "--prompt",
        "In the beginning",
        "--max-tokens",
        "40",
        "--device",
        "cpu",
    ]
    reports = []
    for more in ([], ["--speculative", drafter], ["--speculative", drafter, "--draft-tokens", "2", "--adaptive"]):
        assert main([*arguments, "--json", *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["speculation"] is None
    for report, drafts in ((reports[1], 3), (reports[2], 2)):
        assert report["results"] == reports[0]["results"]
        speculation = report["speculation"]
        assert (speculation["drafter"], speculation["draft_tokens"]) == (drafter, drafts)
        assert speculation["tokens_per_step"] == pytest.approx(39 / speculation["steps"])
        assert report["decode_tokens"] == speculation["steps"] + speculation["accepted"] == 39
        memory = speculation["memory_per_request"]
        assert memory["conventional"] > (drafts - 0.5) * memory["replay"]
    assert main([*arguments, "--speculative", drafter]) == 0
    out = capsys.readouterr().out
    assert "Speculation: up to 3 drafts a step from" in out
    assert "no snapshots; conventional" in out and ", 4 snapshots" in out


def test_generate_verifies_conventionally(capsys):
    arguments = ["--prompt", "And", "--max-tokens", "30", "--mode", "conventional", "--speculative", "mtp", "--json"]
    assert main(["generate", "--checkpoint", TINY, "--device", "cpu", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    conventional, replay = report["traffic"]["conventional"], report["traffic"]["replay"]
    assert conventional["state_bytes_written"] > 10 * replay["state_bytes_written"]
    assert conventional["tokens"] == replay["tokens"] == 29


def test_demo(capsys):
    result = run("demo", "--max-tokens", "24", "--device", "cpu")
    assert result.stdout.count("4 of 4 texts agree token for token") == 2
    assert "drafts a step from the checkpoint's MTP head" in result.stdout
    assert "The texts agree." in result.stdout
    assert main(["demo", "--checkpoint", TINY, "--max-tokens", "40", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agree"] and len(report["results"]) == 4
    assert report["traffic"]["replay"]["flushes"] > 0
    assert report["traffic_ratio"] > 1.3
    speculation = report["speculation"]
    assert speculation["drafter"] == "mtp" and speculation["tokens_per_step"] > 1.5
    for plain, drafted in zip(report["results"], speculation["results"], strict=True):
        assert drafted["tokens"] == plain["replay"]["tokens"]


def test_demo_without_an_mtp_head_drafts_from_repeated_text(capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("mtp.")}, path)
    assert main(["demo", "--checkpoint", str(path.parent), "--max-tokens", "24", "--device", "cpu"]) == 0
    assert "drafts a step from repeated text" in capsys.readouterr().out


def test_demo_fails_if_the_texts_disagree(capsys, monkeypatch):
    """A conventional step that forgets the skip connection is found, and its margin named."""
    from trtllm_replayssm.runtime import mamba_mixer

    step = mamba_mixer.STEPS["conventional"]

    def without_skip(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out):
        return step(pool, layer, plan, x, B, C, dt, A_log, None, dt_bias, dt_limit, out)

    monkeypatch.setitem(mamba_mixer.STEPS, "conventional", without_skip)
    assert main(["demo", "--checkpoint", TINY, "--max-tokens", "24", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "BEYOND the rounding of float32" in out and "DISAGREE" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--checkpoint", "nowhere", "--prompt", "x"], "nowhere/config.json: no such file"),
        (["generate", "--engine", "nowhere", "--prompt", "x", "--mode", "replay"], "nowhere/config.json: no such file"),
        (
            ["generate", "--engine", "nowhere", "--prompt", "x", "--mode", "conventional"],
            "--mode: the engine folder says that already",
        ),
        (["generate", "--checkpoint", TINY, "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", "--checkpoint", TINY, "--prompt", "x", "--top-p", "2"], "top_p is 2.0, expected in (0, 1]"),
        (["generate", "--checkpoint", TINY, "--prompt", "x", "--max-tokens", "100000"], "more than the context"),
        (["generate", "--checkpoint", TINY, "--prompt", "x", "--window", "99", "--device", "cpu"], "window"),
        (["generate", "--checkpoint", TINY, "--prompt", "x", "--speculative", "tree"], "'tree' drafts trees"),
        (
            ["generate", "--checkpoint", TINY, "--prompt", "x", "--speculative", "x"],
            "speculation is 'x', expected None",
        ),
        (
            ["generate", "--checkpoint", TINY, "--prompt", "x", "--speculative", "mtp", "--draft-tokens", "16"],
            "draft_tokens is 16, expected 1..15",
        ),
        (
            ["generate", "--checkpoint", TINY, "--prompt", "x", "--checkpoint-format", "nvfp4", "--read-copy", "fp8"],
            "read_copy: expected 'none' with checkpoint='nvfp4', got 'fp8'",
        ),
        (
            ["generate", "--checkpoint", TINY, "--prompt", "x", "--read-copy", "int4"],
            "read_copy: expected one of none, fp8, nvfp4, nvfp4_amax, e2m2, got 'int4'",
        ),
        (["generate", "--checkpoint", TINY, "--prompt", "x", "--draft-tokens", "2"], "need --speculative mtp or ngram"),
        (["demo", "--checkpoint", TINY, "--device", "abacus"], "device is 'abacus', expected cpu or cuda"),
        (["demo", "--checkpoint", TINY, "--max-tokens", "1"], "--max-tokens is 1, expected at least 2"),
        (["generate", "--checkpoint", TINY, "--prompt", "x\udcff"], "--prompt: expected UTF-8 text"),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("trtllm-replayssm: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_formats_of_the_state(capsys):
    """A read copy of NVFP4 is read in less than a fifth of the bytes of the fp32 states of conventional decoding."""
    arguments = [
        "generate",
        "--checkpoint",
        TINY,
        "--prompt",
        "In the beginning",
        "--max-tokens",
        "24",
        "--device",
        "cpu",
    ]
    assert main([*arguments, "--checkpoint-format", "fp16_sr", "--read-copy", "nvfp4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["checkpoint_format"], report["read_copy"], report["window"]) == ("fp16_sr", "nvfp4", 16)
    read = {mode: traffic["state_bytes_read"] for mode, traffic in report["traffic"].items()}
    assert read["replay"] < read["conventional"] / 5


def test_prompt_files(tmp_path, capsys):
    """A byte order mark and Windows line ends are no text; other encodings are refused."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffIn the beginning\r\n\r\nAnd it came\r\n".encode())
    arguments = ["generate", "--checkpoint", TINY, "--prompt-file", str(file), "--max-tokens", "4", "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["results"]
    assert [text["prompt"] for text in texts] == ["In the beginning", "And it came"]
    file.write_bytes(b"caf\xe9")
    assert main(arguments) == 2
    assert f"{file}: expected UTF-8 text, got byte 3" in capsys.readouterr().err


def test_errors_exit_2_without_a_traceback(tmp_path):
    assert "error: " in run("generate", "--checkpoint", str(tmp_path), "--prompt", "x", code=2).stderr
    assert "invalid choice: 'off'" in run("generate", "--mode", "off", code=2).stderr
    run("demo", code=2, cwd=tmp_path)  # the default checkpoint is not there
