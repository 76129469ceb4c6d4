# SPDX-License-Identifier: Apache-2.0
"""The command `trtllm-replayssm`.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 the demo's texts disagree or a benchmark's
run was invalid, 2 bad input, something missing or a run that failed (one line says what), 130 interrupted, 129 and 143
a build ended by SIGHUP or SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

from . import _core, plugins
from .bench import command as benchmarks
from .builder import command as engines
from .builder import plan_command, quantize_command, tensorrt_package
from .evaluation import command as evaluation
from .integrations.triton_server import command as triton_server
from .integrations.trtllm_build import command as trtllm_build
from .integrations.trtllm_serve import command as serving

PROMPTS = (
    "In the beginning God created",
    "And it came to pass, when the king heard",
    "Blessed are they that",
    "The LORD spake unto Moses, saying,",
)
# Two sums in another order may swap tokens whose logits are this close, or, where inputs of dense layers are rounded to
# the dtype (without --deterministic), as close as neighbours in the dtype, whose relative spacing this is.
MARGIN = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
SPACING = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}

# Options of generate that an engine folder decides, and their defaults.
_BUILT_IN = {
    "mode": "replay",
    "window": "auto",
    "checkpoint_format": "fp32",
    "read_copy": "none",
    "device": None,
    "dtype": None,
    "deterministic": False,
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    options.arguments = arguments  # measurements note them
    warnings.formatwarning = lambda message, *_: f"trtllm-replayssm: warning: {message}\n"
    try:
        return options.run(options)
    except (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError) as error:
        # RuntimeError: lost state, and what torch and TensorRT raise, without memory, say.
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"trtllm-replayssm: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trtllm-replayssm: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trtllm-replayssm", description="Nemotron 3 (hybrid Mamba-2) text generation with ReplaySSM decoding."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what this installation can do, and what is missing")
    info.set_defaults(run=_info)

    generate = commands.add_parser("generate", help="continue prompts and show the state traffic of decoding")
    generate.set_defaults(run=_generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="DIR", help="nemotron_h checkpoint directory")
    source.add_argument("--engine", metavar="DIR", help="an engine folder, whose sizes and formats are those of build")
    generate.add_argument(
        "--executor",
        metavar="tensorrt|reference",
        help="of --engine: its plans on a GPU (default), or its graphs on the CPU, slowly",
    )
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a prompt; its text is printed as it comes")
    prompt.add_argument("--prompt-file", metavar="FILE", help="one prompt a line, generated together; - reads stdin")
    generate.add_argument("--mode", choices=("replay", "conventional"), default="replay", help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the most likely token"
    )
    generate.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample among so many tokens; 0 (default): all"
    )
    generate.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample among tokens of this total probability"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling; default: %(default)s")
    generate.add_argument(
        "--speculative", metavar="mtp|ngram", help="verify drafts of the checkpoint's MTP head, or of repeated text"
    )
    generate.add_argument("--draft-tokens", type=int, metavar="N", help="most drafts a step, 1..15; default: 3")
    generate.add_argument(
        "--checkpoint-format",
        default="fp32",
        metavar="FORMAT",
        help="of the states that ReplaySSM keeps: fp32 (default), bf16, fp16, fp16_sr, fp8_sr, nvfp4",
    )
    generate.add_argument(
        "--read-copy",
        default="none",
        metavar="FORMAT",
        help="that steps read instead: none (default), fp8, nvfp4, nvfp4_amax, e2m2",
    )
    generate.add_argument("--adaptive", action="store_true", help="as many drafts as recent acceptance is worth")

    demo = commands.add_parser("demo", help="ReplaySSM, conventional and speculative decoding: same text, less traffic")
    demo.set_defaults(run=_demo)
    demo.add_argument("--checkpoint", default="examples/tiny-nemotron-h", metavar="DIR", help="default: %(default)s")

    for command, tokens in ((generate, 128), (demo, 96)):
        command.add_argument(
            "--max-tokens", type=int, default=tokens, metavar="N", help="most tokens a text; default: %(default)s"
        )
        command.add_argument(
            "--window",
            type=window,
            default="auto",
            metavar="N",
            help="tokens between state writes; default: what costs least",
        )
        command.add_argument("--device", help="cpu, cuda, cuda:1 …; default: a GPU if there is one that can be used")
        command.add_argument("--dtype", choices=tuple(MARGIN), help="default: the checkpoint's; float32 on the CPU")
        command.add_argument(
            "--deterministic",
            action="store_true",
            help="a text's bits do not depend on the other texts, and 16-bit dtypes round less (slower)",
        )
        engines.add_allow(command)
    engines.add_commands(commands, window)
    plan_command.add_command(commands, window)
    quantize_command.add_command(commands, window)
    evaluation.add_commands(commands)
    trtllm_build.add_commands(commands, window)
    serving.add_commands(commands)
    benchmarks.add_commands(commands)
    triton_server.add_commands(commands, window)
    for command in (info, generate, demo):
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def window(value: str) -> int | str:
    """The type of --window; its name is in argparse's message."""
    return value if value == "auto" else int(value)


# ---- info ------------------------------------------------------------------------------------------------------------


def _info(options) -> int:
    package = importlib.import_module(__package__)
    architectures = _core.cuda_architectures()
    missing = [
        name for name in ("torch", "safetensors", "tokenizers", "tqdm") if importlib.util.find_spec(name) is None
    ]
    report = {
        "version": package.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cuda_ops": _core.has_cuda(),
        "cuda_architectures": architectures.split(),
        "missing": missing,
        "torch": None,
        "gpus": [],
        "plugins": _plugins(),
        "tensorrt": tensorrt_package.installed(),
        "engines": tensorrt_package.abilities(),
    }
    if "torch" not in missing:
        torch = importlib.import_module("torch")
        report["torch"] = torch.__version__
        report["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    cuda = (
        f"built for {', '.join(report['cuda_architectures'])}"
        if report["cuda_ops"]
        else "not built (no nvcc was found, or CUDA was switched off, at build time): everything runs on the CPU"
    )
    gpu = ", ".join(report["gpus"]) or ("unknown without torch" if "torch" in missing else "none that torch can use")
    runtime = "ready" if not missing else f"needs {', '.join(missing)}: pip install 'trtllm-replayssm[runtime]'"
    graphs = "ready"
    if importlib.util.find_spec("onnx") is None:
        graphs = "needs onnx: pip install 'trtllm-replayssm[builder]'"
    print(f"trtllm-replayssm {report['version']}  (Python {report['python']}, {report['machine']})")
    for name, value in (
        ("CPU ops", "built"),
        ("CUDA ops", cuda),
        ("torch", report["torch"] or "not installed"),
        ("GPU", gpu),
        ("runtime", runtime),
        ("plugins", report["plugins"] or "not built: TensorRT's headers were not found at build time"),
        ("TensorRT", ", ".join(map(" ".join, report["tensorrt"].items())) or "not installed"),
        ("build", report["engines"]["build"]),
        ("run", f"{report['engines']['run']}; the graphs, on the CPU: {graphs}"),
    ):
        print(f"  {name:9} {value}")
    return 0


def _plugins() -> str | None:
    """The TensorRT plugin library of this installation."""
    try:
        path = plugins.library_path()
    except RuntimeError:
        return None
    return f"{path.name}, {'with' if _core.has_cuda() else 'without'} CUDA ops"


# ---- generate --------------------------------------------------------------------------------------------------------


def _generate(options) -> int:
    if options.engine is None and options.executor is not None:
        raise ValueError("--executor needs --engine")
    if options.speculative is None and (options.draft_tokens is not None or options.adaptive):
        raise ValueError("--draft-tokens and --adaptive need --speculative mtp or ngram")
    speculation = {}
    if options.speculative is not None:
        speculation = dict(speculation=options.speculative, adaptive=options.adaptive)
        if options.draft_tokens is not None or options.engine is None:
            speculation["draft_tokens"] = 3 if options.draft_tokens is None else options.draft_tokens
    formats = dict(checkpoint_format=options.checkpoint_format, read_copy=options.read_copy)
    if options.prompt is not None and _undecodable(options.prompt):
        raise ValueError("--prompt: expected UTF-8 text")
    prompts = [options.prompt] if options.prompt is not None else _read_prompts(options.prompt_file)
    runtime = _runtime()
    params = runtime.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.engine is None:
        engine = _engine(runtime, options, options.mode, len(prompts), **speculation, **formats)
    else:
        engine = _engine_runner(runtime, options, **speculation)
        built = engine.bundle.engine
        formats = dict(checkpoint_format=built.checkpoint_format, read_copy=built.read_copy)
    sequences = [engine.add_request(prompt, params) for prompt in prompts]
    stream = len(prompts) == 1 and not options.json
    if stream:
        print(prompts[0], end="", flush=True)
    try:
        seconds = _finish(engine, sequences, "generating", stream)
        statistics = engine.statistics()  # checks the state
    except (ValueError, RuntimeError) as error:
        raise RuntimeError(f"{options.engine or options.checkpoint}: {error}") from error
    tokens = statistics["generated_tokens"]
    mode, other = engine.mode, "conventional" if engine.mode == "replay" else "replay"
    traffic = {mode: statistics["decode_traffic"], other: engine.rehearse(other, sequences)}
    if options.json:
        print(
            json.dumps(
                {
                    "mode": mode,
                    "window": engine.window,
                    **formats,
                    "device": str(engine.device),
                    "dtype": _dtype_name(engine),
                    "speculation": _speculation_json(engine, options.speculative) if speculation else None,
                    "results": [_result(prompt, sequence) for prompt, sequence in zip(prompts, sequences, strict=True)],
                    "generated_tokens": tokens,
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    "prefill_seconds": statistics["prefill_seconds"],
                    "decode_seconds": statistics["decode_seconds"],
                    "decode_tokens": statistics["decode_tokens"],
                    "flushes": statistics["decode_traffic"].flushes,
                    "traffic": {way: _traffic_json(counted) for way, counted in traffic.items()},
                    "counted": {mode: "while decoding", other: "by a rehearsal of the same steps"},
                },
                indent=2,
            )
        )
        return 0
    if stream:
        print()
    else:
        for prompt, sequence in zip(prompts, sequences, strict=True):
            print(f"{prompt}{sequence.text}\n")
    print(
        f"\n{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s  "
        f"({mode}, {engine.device}, {_dtype_name(engine)})"
    )
    _print_traffic(traffic, engine.window)
    print(f"  ({other}: what it moves for the same tokens, counted without running the model)")
    if speculation:
        print()
        _print_speculation(engine, options.speculative)
    return 0


def _undecodable(argument: str) -> bool:
    """Whether a command line argument holds bytes that are no UTF-8: Python turns them into lone surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in argument)


def _read_prompts(name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text, got byte {error.start} ({error.reason})") from None
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{name}: no prompts, expected one a line")
    return prompts


# ---- demo ------------------------------------------------------------------------------------------------------------


def _demo(options) -> int:
    if options.max_tokens < 2:
        raise ValueError(f"--max-tokens is {options.max_tokens}, expected at least 2: the first comes with the prompt")
    runtime = _runtime()
    params = runtime.SamplingParams(max_tokens=options.max_tokens)
    engines = {mode: _engine(runtime, options, mode, len(PROMPTS)) for mode in ("replay", "conventional")}
    drafter, engines["speculative"] = _speculative_engine(runtime, options)
    sequences, traffic, seconds = {}, {}, {}
    for way, engine in engines.items():
        sequences[way] = [engine.add_request(prompt, params) for prompt in PROMPTS]
        seconds[way] = _finish(engine, sequences[way], f"{way} decoding", stream=False)
        traffic[way] = engine.statistics()["decode_traffic"]
    speculative, drafted = traffic.pop("speculative"), sequences.pop("speculative")
    dtype = _dtype_name(engines["replay"])
    pairs = list(zip(*sequences.values(), strict=True))
    spacing = 0 if options.deterministic else SPACING[dtype]
    margins = [_first_difference(engines["conventional"], *pair, spacing) for pair in pairs]
    drafted_margins = [
        _first_difference(engines["replay"], *pair, spacing) for pair in zip(sequences["replay"], drafted, strict=True)
    ]
    agree = all(difference is None or difference["rounding"] for difference in margins + drafted_margins)
    saved = traffic["conventional"].per_token / traffic["replay"].per_token

    if options.json:
        print(
            json.dumps(
                {
                    "agree": agree,
                    "window": engines["replay"].window,
                    "device": str(engines["replay"].device),
                    "dtype": dtype,
                    "results": [
                        {
                            "prompt": prompt,
                            **{mode: _result(prompt, sequences[mode][index]) for mode in sequences},
                            "first_difference": margins[index],
                        }
                        for index, prompt in enumerate(PROMPTS)
                    ],
                    "seconds": seconds,
                    "traffic": {mode: _traffic_json(counted) for mode, counted in traffic.items()},
                    "traffic_ratio": saved,
                    "speculation": {
                        **_speculation_json(engines["speculative"], drafter),
                        "traffic": _traffic_json(speculative),
                        "results": [
                            {**_result(prompt, text), "first_difference": difference}
                            for prompt, text, difference in zip(PROMPTS, drafted, drafted_margins, strict=True)
                        ],
                    },
                },
                indent=2,
            )
        )
        return 0 if agree else 1

    for prompt, (replay, conventional), difference in zip(PROMPTS, pairs, margins, strict=True):
        print(f"{prompt}{replay.text}\n")
        if difference is None:
            print(f"  = conventional decoding, all {len(replay.tokens)} tokens\n")
        else:
            within = "within" if difference["rounding"] else "BEYOND"
            print(
                f"  conventional decoding: {conventional.text!r}\n"
                f"  ≠ from token {difference['token']} on, where the two best logits are {difference['margin']:.1e} "
                f"apart: {within} the rounding of {dtype}\n"
            )
    print(f"{_equal(margins)} ({engines['replay'].device}, {dtype}).")
    _print_traffic(traffic, engines["replay"].window)
    print(f"\nReplaySSM moved {saved:.2f} times fewer bytes of state.\n")
    _print_speculation(engines["speculative"], drafter)
    print(f"  {_equal(drafted_margins)} with those of plain decoding.")
    print(f"\nThe texts {'agree' if agree else 'DISAGREE'}.")
    return 0 if agree else 1


def _speculative_engine(runtime, options) -> tuple:
    """The drafter's name and the engine: MTP where the checkpoint has a head for it."""
    arguments = (runtime, options, "replay", len(PROMPTS))
    try:
        return "mtp", _engine(*arguments, speculation="mtp")
    except runtime.CheckpointError:
        return "ngram", _engine(*arguments, speculation="ngram")


def _equal(margins: list) -> str:
    return f"{sum(difference is None for difference in margins)} of {len(margins)} texts agree token for token"


def _first_difference(engine, one, other, spacing: float) -> dict | None:
    """Where two texts of a prompt part, how far apart the two best logits are there, and whether rounding explains it:
    that of sums or, in relation to the best logit, `spacing`. None if they are equal.
    """
    for index, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            best = engine.logits(one.prompt + one.tokens[:index])[-1].topk(2).values.tolist()
            margin = best[0] - best[1]
            limit = max(MARGIN[_dtype_name(engine)], spacing * abs(best[0]))
            return {"token": index, "margin": margin, "rounding": margin <= limit}
    return None


# ---- shared ----------------------------------------------------------------------------------------------------------


def _runtime():
    try:
        return importlib.import_module(".runtime", __package__)
    except ImportError as error:
        raise ImportError(
            f"text generation needs more packages ({error}): pip install 'trtllm-replayssm[runtime]'"
        ) from None


def _engine(runtime, options, mode: str, prompts: int, **more):
    return runtime.Engine(
        options.checkpoint,
        mode=mode,
        device=options.device,
        dtype=options.dtype,
        window=options.window,
        deterministic=options.deterministic,
        max_batch=min(prompts, 32),
        progress=sys.stderr.isatty(),
        allow=options.allow,
        **more,
    )


def _engine_runner(runtime, options, **speculation):
    """An engine folder; ValueError for options that are decided when it is built."""
    for name, default in _BUILT_IN.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name.replace('_', '-')}: the engine folder says that already")
    return runtime.EngineRunner(options.engine, executor=options.executor or "tensorrt", **speculation)


def _finish(engine, sequences: list, what: str, stream: bool) -> float:
    """Runs the requests to their ends, printing the first one's text as it comes, or a bar. Returns seconds."""
    from tqdm import tqdm

    began, given = time.perf_counter(), 0
    total = sum(sequence.params.max_tokens for sequence in sequences)
    hidden = stream or not sys.stderr.isatty()
    with tqdm(total=total, desc=what, unit="token", file=sys.stderr, disable=hidden, leave=False) as bar:
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
            bar.update(sum(len(sequence.tokens) for sequence in sequences) - bar.n)
            if stream:
                print("".join(sequences[0].pieces[given:]), end="", flush=True)
                given = len(sequences[0].pieces)
    return time.perf_counter() - began


def _dtype_name(engine) -> str:
    return str(engine.dtype).removeprefix("torch.")


def _result(prompt: str, sequence) -> dict:
    return {
        "prompt": prompt,
        "text": sequence.text,
        "tokens": sequence.tokens,
        "finish_reason": sequence.finish_reason,
    }


def _traffic_json(traffic) -> dict:
    per_token = {"read": traffic.read_per_token, "written": traffic.written_per_token, "total": traffic.per_token}
    return {**asdict(traffic), "bytes_per_token": per_token}


def _speculation_json(engine, drafter: str) -> dict:
    acceptance = engine.statistics()["acceptance"]
    return {
        "drafter": drafter,
        "draft_tokens": engine.draft_tokens,
        **asdict(acceptance),
        "tokens_per_step": acceptance.tokens_per_step,
        "acceptance_length": acceptance.length,
        "acceptance_rate": acceptance.rate,
        "memory_per_request": {mode: engine.memory_per_request(mode) for mode in ("replay", "conventional")},
    }


def _print_speculation(engine, drafter: str) -> None:
    acceptance, drafts = engine.statistics()["acceptance"], engine.draft_tokens
    source = {"mtp": "the checkpoint's MTP head", "ngram": "repeated text"}[drafter]
    replay, conventional = (engine.memory_per_request(mode) for mode in ("replay", "conventional"))
    size, unit = _scale(conventional)
    print(
        f"Speculation: up to {drafts} drafts a step from {source}\n"
        f"  {acceptance.tokens_per_step:.2f} tokens a step, {acceptance.length:.2f} where there were drafts; "
        f"{acceptance.accepted} of {acceptance.drafts} drafts accepted ({acceptance.rate:.0%})\n"
        f"  Mamba state {unit} a request: replay {replay / size:.2f}, no snapshots; "
        f"conventional {conventional / size:.2f}, {drafts + 1} snapshots"
    )


def _scale(largest: float) -> tuple[int, str]:
    """Bytes of a unit that suits `largest`, and its name."""
    power = min(3, max(0, int(largest).bit_length() - 1) // 10)
    return 1024**power, ("B", "KiB", "MiB", "GiB")[power]


def _print_traffic(traffic: dict, window: int) -> None:
    size, unit = _scale(max(counted.per_token for counted in traffic.values()))
    print(f"\n{f'Mamba state {unit} per decoded token':36}{'read':>10}{'written':>10}{'total':>10}{'flushes':>10}")
    for mode, counted in traffic.items():
        name = f"replay, window {window}" if mode == "replay" else mode
        values = (counted.read_per_token, counted.written_per_token, counted.per_token)
        cells = "".join(f"{value / size:10.2f}" for value in values)
        print(f"  {name:34}{cells}{counted.flushes if mode == 'replay' else '-':>10}")
