# SPDX-License-Identifier: Apache-2.0
"""The commands `build` and `inspect` of `trtllm-replayssm`."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import _core
from . import bundle as bundles
from .assembly import Report, build, rebuild
from .bundle import Bundle
from .engine_config import EngineConfig
from .tensorrt_package import RTX_ONLY

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_commands(commands, window) -> None:
    """Adds `build` and `inspect` to the subparsers of the command line. window: the type of --window."""
    making = commands.add_parser("build", help="make a TensorRT engine with ReplaySSM plugins; needs no GPU")
    making.set_defaults(run=_build)
    source = making.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="DIR", help="nemotron_h checkpoint directory")
    source.add_argument(
        "--from",
        dest="source",
        metavar="DIR",
        help="an engine folder, whose plans are made anew; goes with --target, --timing-cache and --json only",
    )
    making.add_argument("--output", required=True, metavar="DIR", help="the engine folder to make")
    making.add_argument("--max-batch", type=int, metavar="N", help="rows of a step, and slots; default: 8")
    making.add_argument("--max-seq-len", type=int, metavar="N", help="most tokens of a sequence; default: 4096")
    making.add_argument("--draft-tokens", type=int, metavar="N", help="most drafts a step, 0..15; default: 0")
    making.add_argument("--max-prefill-tokens", type=int, metavar="N", help="most tokens of a chunk; default: 512")
    making.add_argument("--window", type=window, metavar="N", help="as for generate")
    making.add_argument(
        "--checkpoint-format",
        metavar="FORMAT",
        help=f"of the states that ReplaySSM keeps: {', '.join(_core.CHECKPOINT_FORMATS)}; default: fp32",
    )
    making.add_argument(
        "--read-copy",
        metavar="FORMAT",
        help=f"that steps read instead: {', '.join(_core.READ_COPY_FORMATS)}; default: none",
    )
    making.add_argument("--seed", type=int, metavar="N", help="of stochastic rounding; default: 0")
    making.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16; float32, for which TensorRT has no attention kernel, with --no-plans only",
    )
    making.add_argument("--state-io", metavar="MODE", help="alias (default), same_pointer or host_pointer")
    making.add_argument(
        "--trt-attention",
        action="store_true",
        default=None,
        help="TensorRT 11's attention node, which reads no more of the KV cache than there is; never run on a GPU",
    )
    making.add_argument(
        "--allow-dense-moe", action="store_true", default=None, help="evaluate every expert of layers with more than 16"
    )
    making.add_argument(
        "--no-plans",
        action="store_true",
        help="the graphs only: to make plans of on another machine, or for generate --executor reference",
    )
    making.add_argument(
        "--target", action="append", default=[], metavar="SM", help="SM86, SM120 …: RTX GPUs to compile for; repeatable"
    )
    making.add_argument(
        "--timing-cache", metavar="FILE", help="the full TensorRT's kernel timings, to begin with and to add to"
    )

    inspecting = commands.add_parser("inspect", help="what an engine folder holds, and how many sequences fit")
    inspecting.set_defaults(run=_inspect)
    inspecting.add_argument("folder", metavar="DIR", help="what build made")
    inspecting.add_argument("--memory", metavar="SIZE", help="of a GPU, as in 80GB: how many sequences fit")
    inspecting.add_argument("--layers", action="store_true", help="every layer with its nodes")
    add_allow(making)
    for command in (making, inspecting):
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_allow(command) -> None:
    """Adds --allow to a command that reads checkpoints."""
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module (or glob) whose tensors count though the checkpoint's quantisation lists contradict; repeatable",
    )


def _build(options) -> int:
    common = dict(
        targets=tuple(options.target),
        timing_cache=options.timing_cache and Path(options.timing_cache),
        progress=progress_bar(),
    )
    names = (
        "max_batch",
        "max_seq_len",
        "draft_tokens",
        "max_prefill_tokens",
        "window",
        "checkpoint_format",
        "read_copy",
        "seed",
        "dtype",
        "state_io",
        "trt_attention",
        "allow_dense_moe",
    )
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.source is not None:
        if options.allow:
            given["allow"] = options.allow
        if options.no_plans:
            raise ValueError("--no-plans: plans are what --from makes")
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')}: the engine folder of --from says that already")
        with ending_on_signals():
            report = rebuild(options.source, options.output, **common)
    else:
        config = EngineConfig(**given)
        with ending_on_signals():
            report = build(
                options.checkpoint,
                options.output,
                config,
                allow=options.allow,
                plans=not options.no_plans,
                **common,
            )
    bundle = report.bundle
    if options.json:
        print(json.dumps({"output": str(options.output), "missing": report.missing, **json.loads(bundle.to_json())}))
    else:
        _print_built(options.output, report)
    return 0 if report.missing is None else 2


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that nothing half-written stays behind; not one that is ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    received = []

    def end(number, frame):
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        received.append(number)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except Exception as error:  # a library in which the signal came may have made another exception of it
        if received:
            raise SystemExit(128 + received[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_built(output: str, report: Report) -> None:
    bundle = report.bundle
    if bundle.dense_moe_factor:
        print(f"MoE layers evaluate every expert: {bundle.dense_moe_factor:.1f} times the arithmetic of those chosen")
    if plan := bundle.plan:
        for name, seconds in plan.seconds.items():
            stored = bundle.files[bundles.PLANS[name]]["bytes"]
            print(f"{bundles.PLANS[name]}: {size(stored)}, {plan.tensorrt} {plan.version}, {seconds:.1f} s")
        print(f"most memory while building: {size(plan.peak_bytes)}")
        if plan.tensorrt == "tensorrt_rtx":
            print(f"{RTX_ONLY}.")
    if not bundle.plugins_have_cuda:
        print("The plugin library in it has no CUDA ops (it was built without nvcc): no GPU can run it.")
    if bundle.engine.draft_tokens and not bundle.model.mtp_layers:
        print("The checkpoint has no MTP head: drafts must come from elsewhere, as from repeated text.")
    if bundle.engine.dtype != "float32":
        script = shlex.quote(str(Path(output) / bundles.SCRIPT))
        print(f"For another GPU (H200, B200, B300 …), there: sh {script} NEW_FOLDER")
    if report.missing:
        print(f"trtllm-replayssm: {output} is complete but for the plans: {report.missing}", file=sys.stderr)


def _inspect(options) -> int:
    bundle = bundles.read(options.folder)
    path = Path(options.folder) / bundles.LAYERS
    layers = json.loads(path.read_text(encoding="utf-8")) if bundles.LAYERS in bundle.files else {}
    budget = None if options.memory is None else bytes_of(options.memory)
    sequences = None if budget is None else bundles.concurrency(bundle, budget)
    if options.json:
        report = {
            **json.loads(bundle.to_json()),
            "layers": layers,
            "state_bytes_per_slot": bundle.state_bytes,
            "kv_bytes_per_sequence": bundle.kv_bytes,
            "memory": budget,
            "concurrency": sequences,
        }
        print(json.dumps(report, indent=2))
        return 0
    _print_bundle(bundle)
    for name, built in layers.items():
        _print_layers(bundles.PLANS[name], built, options.layers)
    _print_memory(bundle, budget, sequences)
    return 0


def _print_bundle(bundle: Bundle) -> None:
    engine, model, replay, plan = bundle.engine, bundle.model, bundle.pool.replay, bundle.plan
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(model.layers).items())
    made = "no plans" if plan is None else f"plans of {plan.tensorrt} {plan.version}"
    rows = [
        ("made by", f"trtllm-replayssm {bundle.package}, {made}, slot layout {bundle.layout_version}"),
        ("model", f"{kinds}; hidden {model.hidden_size}, vocabulary {model.vocab_size}, {engine.dtype}"),
        ("MTP head", ", ".join(model.mtp_layers) or ("not exported" if bundle.mtp_head else "none")),
        ("steps", f"{engine.max_batch} rows of 1..{engine.step_tokens} tokens"),
        ("prompts", f"one row of {engine.step_tokens + 1}..{engine.max_prefill_tokens} tokens"),
        ("sequences", f"up to {engine.max_seq_len} tokens; KV rows of {engine.kv_capacity}"),
        ("state", f"window {replay.window}, checkpoint {replay.checkpoint}, read copy {replay.read_copy}"),
        ("state_io", engine.state_io),
        ("plugins", "with CUDA ops" if bundle.plugins_have_cuda else "without CUDA ops: no GPU can run them"),
    ]
    if plan is not None:
        targets = ", ".join(plan.targets) or ("RTX GPUs, 8.x and 12.x" if plan.tensorrt == "tensorrt_rtx" else "")
        rows += [("GPUs", targets or f"{plan.gpu}, on which it was built")]
    for name, value in rows:
        print(f"{name:10} {value}")
    for name, bindings in bundle.bindings.items():
        print(f"\nbindings of {bundles.PLANS[name]}")
        for binding, (way, kind, shape) in bindings.items():
            print(f"  {way:6} {kind:5} {binding:22} {shape}")


def _print_layers(name: str, layers: list[dict], every: bool) -> None:
    if not layers:
        print(f"\nlayers of {name}: TensorRT did not list them")
        return
    print(f"\nlayers of {name}, both profiles: {len(layers)}")
    for kind, count in Counter(layer["kind"] for layer in layers).most_common():
        print(f"  {count:5} {kind}")
    nodes = Counter(
        node for layer in layers for node in layer["nodes"] if layer["kind"] in ("PluginV3", "custom_layer")
    )
    print(f"plugins: {sum(nodes.values())}, of {len(nodes)} nodes")
    if every:
        for layer in layers:
            types = f"{' '.join(layer['inputs'])} -> {' '.join(layer['outputs'])}"
            print(f"  {layer['kind']:14} {' '.join(layer['nodes'])}: {types} {layer['plugin']}".rstrip())


def _print_memory(bundle: Bundle, budget: int | None, sequences: int | None) -> None:
    print(f"\nMamba state a slot  {size(bundle.state_bytes)}, all layers")
    print(f"KV cache a row      {size(bundle.kv_bytes)}, all layers")
    print(f"outputs of a row    {size(bundle.step_output_bytes)}")
    print(f"else                {size(bundle.fixed_bytes)}: weights, contexts, a prompt's outputs")
    if budget is not None:
        print(f"within {size(budget)}: {sequences} sequences; this engine has slots for {bundle.engine.max_batch}")


def bytes_of(text: str) -> int:
    """Bytes of "24GiB", "80GB", "512" …."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|B)?", text)
    if not found:
        raise ValueError(f"--memory: expected a number of B, KiB, MiB, GiB, KB, MB or GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2] or "B"])


def size(value: int) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if value >= _UNITS[unit]), None)
    return f"{value / _UNITS[unit]:.2f} {unit}" if unit else f"{value} B"


def progress_bar():
    """Shows phases on stderr if that is a terminal."""
    return _Bar() if sys.stderr.isatty() else lambda *_: None


class _Bar:
    """A phase's steps on one line of stderr."""

    def __call__(self, phase: str, done: int, total: int) -> None:
        end = "\r\033[K" if done == total else ""
        print(f"\r\033[K{phase}: {done} of {total}{end}", end="", file=sys.stderr, flush=True)
