# SPDX-License-Identifier: Apache-2.0
"""`trtllm-replayssm bench kernel`, `bench step` and `bench serve`."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Iterable
from functools import reduce
from pathlib import Path

from ..measurement import command_line, matplotlib, write_atomically


def add_commands(commands) -> None:
    """Adds `bench` to the subparsers of the command line."""
    bench = commands.add_parser("bench", help="measure speed: of a layer's kernels, of decode steps, of serving")
    measurements = bench.add_subparsers(required=True, metavar="MEASUREMENT")

    kernel = measurements.add_parser(
        "kernel",
        help="a Mamba-2 layer's step, ours beside conventional and other libraries' kernels",
        description="Microseconds a layer and decode step, with flushes counted, the L2 cache cold and rows at "
        "staggered phases; or, with --prefill, of a whole prompt.",
    )
    kernel.set_defaults(run=_kernel)
    kernel.add_argument(
        "--geometry",
        nargs="+",
        default=["super"],
        metavar="NAME",
        help="super, nano4b, ultra or numbers, HEADSxHEAD_DIMxGROUPSxSTATE_DIM; default: super",
    )
    kernel.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], metavar="N", help="default: 1 32 256")
    kernel.add_argument(
        "--tokens", type=int, nargs="+", default=[1], metavar="T", help="tokens a row and step: 1 + drafts; default: 1"
    )
    kernel.add_argument(
        "--windows", type=int, nargs="+", default=[16], metavar="L", help="tokens between state writes; default: 16"
    )
    kernel.add_argument(
        "--formats",
        nargs="+",
        default=["fp32:none"],
        metavar="CHECKPOINT:READ_COPY",
        help="such as fp32:none fp16_sr:nvfp4; default: fp32:none",
    )
    kernel.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="replay, conventional, conventional_verify, peer:mamba_ssm, peer:vllm, peer:flashinfer, peer:vllm_replay, "
        "peer:reference_replay, peer:flashinfer_replay; default: replay, and of the others those that take the tokens, "
        "formats and windows; a peer only where it is installed",
    )
    kernel.add_argument("--no-flush", action="store_true", help="steps of mode replay that never commit nor flush")
    kernel.add_argument(
        "--tokens-in",
        nargs="+",
        choices=("rings", "tensors"),
        help="where steps of mode replay find x and B of the new tokens: in the rings, where the convolution has put "
        "them, or in tensors, from which they append them; default: rings, and both with --with-conv and beside "
        "another library's ReplaySSM, which appends",
    )
    kernel.add_argument(
        "--with-conv", action="store_true", help="time each step of ours together with the convolution before it"
    )
    kernel.add_argument(
        "--prefill", type=int, nargs="+", metavar="TOKENS", help="time prompts of so many tokens instead of steps"
    )

    step = measurements.add_parser(
        "step",
        help="a whole decode step of a model, replay beside conventional",
        description="Milliseconds a decode step of the embedded runtime, and what its parts take.",
    )
    step.set_defaults(run=_step)
    step.add_argument(
        "--contexts", type=int, nargs="+", default=[1024], metavar="N", help="tokens before the step; default: 1024"
    )
    serve = measurements.add_parser(
        "serve",
        help="tokens per second with speculation: replay, snapshots, and without",
        description="Tokens per second of a stream of requests in the embedded runtime.",
    )
    serve.set_defaults(run=_serve)
    for command, batches in ((step, [1, 32, 128, 256]), (serve, [32, 64, 128, 256, 512])):
        shown = " ".join(map(str, batches))
        command.add_argument(
            "--model",
            default="nano4b",
            metavar="NAME",
            help="nano4b or tiny, of random weights, or a checkpoint directory; default: %(default)s",
        )
        command.add_argument(
            "--batches", type=int, nargs="+", default=batches, metavar="N", help=f"sequences; default: {shown}"
        )
        command.add_argument("--window", type=int, metavar="L", help="default: what costs least")
        command.add_argument(
            "--format", default="fp32:none", metavar="CHECKPOINT:READ_COPY", help="of mode replay; default: %(default)s"
        )
        command.add_argument(
            "--conventional-state",
            choices=("fp32", "bf16", "fp16"),
            default="fp32",
            help="format of the other modes' states; default: %(default)s",
        )
        command.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="default: %(default)s"
        )
    serve.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="replay, snapshots (conventional speculation), standard (conventional, no speculation), standard_replay; "
        "default: the first three",
    )
    serve.add_argument("--draft-tokens", type=int, default=3, metavar="N", help="drafts a step; default: %(default)s")
    serve.add_argument(
        "--acceptance",
        type=float,
        metavar="RATE",
        help="simulate: a draft is accepted with this chance if those before it were; drafts cost nothing. Default: "
        "0.8 with random weights; with a checkpoint its MTP head drafts and the model decides",
    )
    serve.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens of a prompt; default: %(default)s")
    serve.add_argument(
        "--answer", type=int, default=512, metavar="N", help="mean tokens of an answer; default: %(default)s"
    )
    serve.add_argument(
        "--memory",
        metavar="SIZE",
        help="for weights and sequences, as in 120GB; default: 85 %% of the GPU's; on the CPU no limit",
    )

    plot = measurements.add_parser("plot", help="draw the PNG of a JSON file of records")
    plot.set_defaults(run=_plot)
    plot.add_argument("file", metavar="FILE", help="what kernel, step or serve wrote")

    for command, steps, repeats in ((kernel, 160, 7), (step, 48, 5), (serve, 64, 3)):
        command.add_argument("--steps", type=int, default=steps, metavar="N", help="a timing; default: %(default)s")
        command.add_argument("--repeats", type=int, default=repeats, metavar="N", help="timings; default: %(default)s")
        command.add_argument("--device", help="cpu, cuda, cuda:1 …; default: a GPU if there is one that can be used")
        command.add_argument("--commit", default="unknown", metavar="ID", help="commit to record")
        command.add_argument(
            "--output",
            metavar="FILE",
            help="JSON to write after each case, and beside it a PNG; cases that it has of this GPU and commit are "
            "not measured again",
        )
        command.add_argument("--no-plot", action="store_true", help="no PNG, for a machine without matplotlib")
        command.add_argument("--json", action="store_true", help="print the records instead of a table")


class _Table:
    """Lines on stdout, or nothing where records shall be printed at the end.

    columns: title, field of a record with dots into objects, least width, format.
    """

    def __init__(self, columns: tuple[tuple[str, str, int, str], ...], as_json: bool):
        self._columns, self._quiet = columns, as_json
        self._line(title for title, _, _, _ in columns)

    def row(self, record: dict) -> None:
        self._line(self._cell(record, field, form) for _, field, _, form in self._columns)

    def _cell(self, record: dict, field: str, form: str) -> str:
        value = reduce(dict.get, field.split("."), record)
        return "-" if value is None else format(value, form)

    def _line(self, cells: Iterable[str]) -> None:
        widths = (max(len(title), width) for title, _, width, _ in self._columns)
        if not self._quiet:
            print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def _run(options, records, cases, identify, measure, table: _Table) -> int:
    """Measures the cases that `records` lacks. 1 if one was invalid or did not fit; the others are measured all the
    same.
    """
    import torch

    from .records import InvalidRun

    code = 0
    for case in cases:
        identity = identify(case)
        record = records.kept(identity)
        if record is None:
            gc.collect()  # runners and their graphs refer to each other
            torch.cuda.empty_cache()
            try:
                record = records.add(identity, measure(case))
            except (InvalidRun, torch.OutOfMemoryError) as error:
                reason = str(error).split(". ")[0]
                print(f"trtllm-replayssm: invalid run, not recorded: {identity}: {reason}", file=sys.stderr)
                code = 1
                continue
        table.row(record)
    if options.json:
        print(json.dumps(records.mine, indent=1))
    if records.file is not None and records.mine and not options.no_plot:
        _draw(records.file, records.mine)
    return code


def _plot(options) -> int:
    from .records import read_records

    file = Path(options.file)
    _draw(file, read_records(file))
    return 0


def _draw(file: Path, records: list[dict]) -> None:
    """The picture of records of one kind, beside their file."""
    from .plot import PICTURES

    kinds = {record["bench"] for record in records}
    if len(kinds) != 1 or not kinds <= set(PICTURES):
        raise ValueError(f"{file}: expected records of one of {', '.join(PICTURES)}, got {', '.join(sorted(kinds))}")
    write_atomically(file.with_suffix(".png"), PICTURES[kinds.pop()](records))


def _prepare(options) -> tuple:
    """The device and the records; bad options and a missing matplotlib are told before anything is measured."""
    from ..runtime.engine import pick_device
    from .records import Records

    for name in ("steps", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}, expected at least 1")
    file = Path(options.output) if options.output else None
    if file is not None:
        if file.suffix != ".json":
            raise ValueError(f"--output is {options.output!r}, expected a name that ends in .json")
        if not options.no_plot:
            matplotlib()
    device = pick_device(options.device)
    return device, Records(file, device, options.commit, command_line(options.arguments))


def _formats(text: str) -> tuple[str, str]:
    checkpoint, colon, copy = text.partition(":")
    if not colon:
        raise ValueError(f"format is {text!r}, expected CHECKPOINT:READ_COPY as in fp16_sr:nvfp4")
    return checkpoint, copy


# ---- kernel ----------------------------------------------------------------------------------------------------------


def _kernel(options) -> int:
    from .kernel import KernelBench

    if options.prefill:
        return _prefill(options)
    device, records = _prepare(options)
    cases = _kernel_cases(options)
    bench = KernelBench(device, options.steps, options.repeats)
    if not options.json:
        read, copy = (bench.bandwidths[f"{name}_bandwidth"] / 1e12 for name in ("read", "copy"))
        print(f"{records.where}: reads {read:.2f} TB/s, copies {copy:.2f} TB/s")
    table = _Table(
        (
            ("geometry", "geometry", 11, "s"),
            ("batch", "batch", 5, "d"),
            ("T", "tokens", 2, "d"),
            ("mode", "mode", 19, "s"),
            ("checkpoint", "checkpoint", 10, "s"),
            ("copy", "read_copy", 10, "s"),
            ("L", "window", 2, "d"),
            ("x, B in", "tokens_in", 7, "s"),
            ("us with conv" if options.with_conv else "us", "us", 9, ".1f"),
            ("min", "us_min", 8, ".1f"),
            ("max", "us_max", 8, ".1f"),
            ("flushes", "flushes_per_step", 8, ".3f"),
            ("of read bw", "fraction_of_read_bandwidth", 10, ".0%"),
            ("of copy bw", "fraction_of_copy_bandwidth", 10, ".0%"),
        ),
        options.json,
    )
    return _run(options, records, cases, bench.identity, bench.measure, table)


def _kernel_cases(options) -> list:
    """The cases in the order of the options. Of modes that were not named, those that do not take a combination are
    left out, and peers that are missing are told of.
    """
    from .kernel import MODES, TOKENS_IN, Case, checkpoints_of, longest_step, peer_of, tokens_in_of
    from .peers import PEERS

    known = [*MODES, *(f"peer:{name}" for name in PEERS)]
    if unknown := [mode for mode in options.modes or () if mode not in known]:
        raise ValueError(f"--modes: unknown {unknown[0]!r}, expected some of {' '.join(known)}")
    asked, missing = options.modes or (MODES if options.with_conv else known), {}
    for mode in asked:
        if (peer := peer_of(mode)) and (reason := peer.missing()):
            missing[mode] = reason
            print(f"trtllm-replayssm: {mode} is not measured: {reason}", file=sys.stderr)
    cases = []
    for geometry, batch, tokens, window, formats in itertools.product(
        options.geometry, options.batches, options.tokens, options.windows, options.formats
    ):
        checkpoint, copy = _formats(formats)
        chosen = []
        for mode in asked:
            plain = checkpoint in checkpoints_of(mode) and copy == "none" and not options.no_flush
            peer, most = peer_of(mode), longest_step(mode)
            fits = mode == "replay" or (
                plain
                and (tokens > 1 if most is None else tokens <= most)
                and (peer is None or not peer.longest_window or window <= peer.longest_window)
            )
            if mode not in missing and (options.modes or fits):
                chosen.append(mode)
        both = options.with_conv or any(peer.longest_window for peer in map(peer_of, chosen) if peer)
        ways = options.tokens_in or (TOKENS_IN if both else TOKENS_IN[:1])
        for mode in chosen:
            for way in ways if mode == "replay" else tokens_in_of(mode):
                sizes = (geometry, batch, tokens, mode, checkpoint, copy, window)
                case = Case(*sizes, not options.no_flush, way, options.with_conv)
                case.sizes, case.config, case.expected_flushes  # noqa: B018 - bad values are told before the first case
                cases.append(case)
    return cases


def _prefill(options) -> int:
    from .kernel import parse_geometry
    from .prefill import ChunkScan, Prefill

    device, records = _prepare(options)
    peer = ChunkScan()
    modes = options.modes or ["replay", "peer:mamba_ssm"]
    if unknown := [mode for mode in modes if mode not in ("replay", "peer:mamba_ssm")]:
        raise ValueError(f"--modes with --prefill: unknown {unknown[0]!r}, expected replay and peer:mamba_ssm")
    if "peer:mamba_ssm" in modes and (reason := peer.missing()):
        print(f"trtllm-replayssm: peer:mamba_ssm is not measured: {reason}", file=sys.stderr)
        modes = [mode for mode in modes if mode != "peer:mamba_ssm"]
    cases = []
    for geometry, tokens, formats, mode in itertools.product(options.geometry, options.prefill, options.formats, modes):
        if tokens < 1:
            raise ValueError(f"--prefill is {tokens}, expected at least 1")
        parse_geometry(geometry)
        checkpoint, copy = _formats(formats) if mode == "replay" else ("fp32", "none")
        cases.append(
            {"geometry": geometry, "tokens": tokens, "mode": mode, "checkpoint": checkpoint, "read_copy": copy}
        )

    def identify(case: dict) -> dict:
        return {"bench": "prefill", **case, "steps": options.steps, "repeats": options.repeats}

    def measure(case: dict) -> dict:
        prompt = Prefill(
            parse_geometry(case["geometry"]), case["tokens"], case["checkpoint"], case["read_copy"], device
        )
        if case["mode"] == "replay":
            return prompt.ours(options.steps, options.repeats)
        return prompt.peer(peer, options.steps, options.repeats)

    table = _Table(
        (
            ("geometry", "geometry", 11, "s"),
            ("tokens", "tokens", 6, "d"),
            ("mode", "mode", 15, "s"),
            ("checkpoint", "checkpoint", 10, "s"),
            ("copy", "read_copy", 10, "s"),
            ("us", "us", 9, ".1f"),
            ("min", "us_min", 8, ".1f"),
            ("max", "us_max", 8, ".1f"),
        ),
        options.json,
    )
    return _run(options, records, cases, identify, measure, table)


# ---- step and serve --------------------------------------------------------------------------------------------------


def _step(options) -> int:
    from .step import PARTS, StepBench

    device, records = _prepare(options)
    bench = StepBench(
        options.model,
        device,
        options.dtype,
        _formats(options.format),
        options.window,
        options.steps,
        options.repeats,
        conventional_state=options.conventional_state,
    )
    cases = bench.cases(options.batches, options.contexts)
    table = _Table(
        (
            ("model", "model", 8, "s"),
            ("batch", "batch", 5, "d"),
            ("context", "context", 7, "d"),
            ("mode", "mode", 12, "s"),
            ("us", "us", 10, ".1f"),
            ("min", "us_min", 9, ".1f"),
            ("max", "us_max", 9, ".1f"),
            ("flushes", "flushes_per_step", 8, ".3f"),
            *((part, f"parts_us.{part}", 9, ".1f") for part in PARTS),
        ),
        options.json,
    )
    return _run(options, records, cases, bench.identity, bench.measure, table)


def _serve(options) -> int:
    import torch

    from .serve import Load, ServeBench

    device, records = _prepare(options)
    memory = None if options.memory is None else _bytes(options.memory)
    if memory is None and device.type == "cuda":
        memory = int(0.85 * torch.cuda.get_device_properties(device).total_memory)
    bench = ServeBench(
        options.model,
        device,
        options.dtype,
        _formats(options.format),
        options.window,
        draft_tokens=options.draft_tokens,
        acceptance=options.acceptance,
        load=Load(options.prompt, options.answer),
        memory=memory,
        steps=options.steps,
        repeats=options.repeats,
        conventional_state=options.conventional_state,
    )
    cases = bench.cases(options.batches, options.modes or ["replay", "snapshots", "standard"])
    table = _Table(
        (
            ("model", "model", 8, "s"),
            ("clients", "batch", 7, "d"),
            ("at once", "concurrency", 7, "d"),
            ("mode", "mode", 15, "s"),
            ("T", "tokens", 2, "d"),
            ("tokens/s", "tokens_per_second", 9, ".0f"),
            ("min", "tokens_per_second_min", 9, ".0f"),
            ("max", "tokens_per_second_max", 9, ".0f"),
            ("ms/step", "ms_per_step", 8, ".2f"),
            ("prompts", "share_of_prompts", 7, ".0%"),
            ("tokens/row", "tokens_per_row_and_step", 10, ".2f"),
            ("Mamba bytes", "bytes_per_request.mamba", 12, ",d"),
            ("KV bytes", "bytes_per_request.kv", 11, ",d"),
        ),
        options.json,
    )
    return _run(options, records, cases, bench.identity, bench.measure, table)


def _bytes(size: str) -> int:
    """ "120GB" in bytes."""
    number, unit = size[:-2], size[-2:]
    try:
        return int(float(number) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[unit])
    except (KeyError, ValueError):
        raise ValueError(f"--memory is {size!r}, expected a number of KB, MB or GB as in 120GB") from None
