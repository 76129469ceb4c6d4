# SPDX-License-Identifier: Apache-2.0
"""`trtllm-replayssm eval drift` and `eval plot`."""

from __future__ import annotations

import json
import reprlib
import sys
from pathlib import Path

from ..measurement import command_line, matplotlib, write_atomically

# What a picture shows of a record, and of a range of positions in it.
_STRING, _LIST, _NUMBER = (str, "a string"), (list, "a list"), (int | float, "a number")
_DRAWN = {
    **dict.fromkeys(("model", "activation", "checkpoint", "read_copy"), _STRING),
    **dict.fromkeys(("rows", "window"), _NUMBER),
    "kl_by_bucket": _LIST,
}
_DRAWN_BUCKET = {**dict.fromkeys(("from", "to", "kl"), _NUMBER), "interval": (list | None, "two numbers or null")}


def add_commands(commands) -> None:
    """Adds `eval` to the subparsers of the command line."""
    evaluate = commands.add_parser("eval", help="measure what state formats do to a model")
    measurements = evaluate.add_subparsers(required=True, metavar="MEASUREMENT")
    drift = measurements.add_parser(
        "drift",
        help="KL divergence from FP32 states along given texts, and length of free-running answers",
        description="Compares configurations with FP32 states token by token along given texts. Called again after an "
        "interruption, it keeps the configurations that were finished and begins the interrupted one anew. Writes "
        "drift.json and drift.png.",
    )
    drift.set_defaults(run=_drift)
    drift.add_argument("--checkpoint", required=True, metavar="DIR", help="nemotron_h checkpoint directory")
    drift.add_argument("--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text that rows are cut from")
    drift.add_argument(
        "--configs",
        required=True,
        nargs="+",
        metavar="CHECKPOINT:READ_COPY",
        help="state formats, such as fp32:nvfp4 fp16_sr:nvfp4 nvfp4:none",
    )
    drift.add_argument("--output", required=True, metavar="DIR", help="folder of the run")
    for name, default, meaning in (
        ("rows", 8, "different texts"),
        ("tokens", 4096, "tokens of each"),
        ("window", 16, "tokens between state writes"),
        ("step-tokens", 16, "tokens brought together; divides the window: 1 gives the same flushes, slowly"),
        ("generate", 0, "also continue each text's beginning greedily by so many tokens"),
        ("prompt", 64, "tokens of that beginning"),
        ("decay-tokens", 4096, "tokens of each text that the heads' decays are measured on"),
        ("seed", 0, "of stochastic rounding"),
    ):
        drift.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning}; default: %(default)s")
    drift.add_argument("--device", help="cpu, cuda, cuda:1 …; default: a GPU if there is one that can be used")
    drift.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="default: %(default)s"
    )
    drift.add_argument("--commit", default="unknown", metavar="ID", help="commit to record")
    drift.add_argument("--no-plot", action="store_true", help="no drift.png, for a machine without matplotlib")
    drift.add_argument("--json", action="store_true", help="print drift.json's content instead of a table")

    plot = measurements.add_parser("plot", help="draw drift.png from the drift.json of a run")
    plot.set_defaults(run=_plot)
    plot.add_argument("folder", metavar="DIR", help="folder of the run")


def _drift(options) -> int:
    import torch

    from ..runtime.engine import pick_device
    from .decays import least_tokens, measure_decays
    from .drift import Drift, Settings
    from .generation import compare_texts

    if not options.no_plot:
        matplotlib()  # missing: rather now than after the run
    device = pick_device(options.device)
    files = tuple(map(Path, options.text))
    settings = Settings(
        Path(options.checkpoint),
        files,
        **{
            name: getattr(options, name)
            for name in ("rows", "tokens", "window", "step_tokens", "dtype", "seed", "generate", "prompt")
        },
    )
    least = least_tokens(settings.window)
    for name in ("tokens", "decay_tokens"):
        if getattr(options, name) < least:
            raise ValueError(
                f"{name} is {getattr(options, name)}, expected at least {least}, to measure the heads' decays on"
            )
    folder = Path(options.output)
    command = command_line(options.arguments)
    run = Drift(settings, options.configs, folder, device, sys.stderr.isatty(), options.commit, command)
    results = run.run()
    decays = measure_decays(run.subject, run.tokens[:, : options.decay_tokens], settings.window)
    about = {
        "bench": "drift",
        "model": settings.checkpoint.resolve().name,
        "texts": [file.name for file in files],
        "tokens": settings.tokens,
        "window": settings.window,
        "step_tokens": settings.step_tokens,
        "activation": settings.dtype,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": device.type,
    }
    records = []
    for name, result in results.items():
        checkpoint, read_copy = name.split(":")
        origin = {"date": result.date, "commit": result.commit, "command": result.command}
        record = about | origin | {"checkpoint": checkpoint, "read_copy": read_copy, **result.summary()}
        if result.generated is not None:
            stop = run.subject.config.stop_tokens
            figures = compare_texts(result.generated, result.reference_generated, stop)
            record["generation"] = {"prompt": settings.prompt, **figures}
        records.append(record)
    report = {"records": records, "decays": decays}
    write_atomically(folder / "drift.json", (json.dumps(report, indent=1) + "\n").encode())
    if not options.no_plot:
        _draw(folder, report)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(records, decays)
    return 0


def _plot(options) -> int:
    folder = Path(options.folder)
    _draw(folder, _read(folder / "drift.json"))
    return 0


def _read(file: Path) -> dict:
    """A run's report. ValueError: it lacks what a picture shows, or has it of another type."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not the JSON of a run: {error}") from None
    if not isinstance(report, dict) or not report.get("records"):
        raise ValueError(f"{file}: expected the JSON of a run, found no 'records'")
    _require(report, {"records": _LIST}, file)
    for index, record in enumerate(report["records"]):
        where = f"{file}: records[{index}]"
        _require(record, _DRAWN, where)
        for position, bucket in enumerate(record["kl_by_bucket"]):
            _require(bucket, _DRAWN_BUCKET, f"{where}: kl_by_bucket[{position}]")
            if (ends := bucket["interval"]) is not None and [type(end) for end in ends] != [float, float]:
                raise ValueError(
                    f"{where}: kl_by_bucket[{position}]: interval is {reprlib.repr(ends)}, expected two numbers"
                )
    return report


def _require(entry: object, fields: dict[str, tuple], where: str | Path) -> None:
    """ValueError unless `entry` is an object with these fields."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: found {reprlib.repr(entry)}, expected an object")
    for name, (kind, expected) in fields.items():
        if name not in entry:
            raise ValueError(f"{where}: has no {name!r}, expected {expected}")
        if not isinstance(entry[name], kind):
            raise ValueError(f"{where}: {name} is {reprlib.repr(entry[name])}, expected {expected}")


def _draw(folder: Path, report: dict) -> None:
    from .plot import draw

    first = report["records"][0]
    title = f"{first['model']}: {first['rows']} texts, window {first['window']}, {first['activation']}"
    write_atomically(folder / "drift.png", draw({_name(record): record for record in report["records"]}, title))


def _print(records: list[dict], decays: dict) -> None:
    from .statistics import written

    tokens = records[0]["tokens"]
    print(f"{'':18}{f'KL at the end of {tokens} tokens':>40}{'change over last half':>34}{'same top-1':>12}{'loss':>9}")
    for record in records:
        end = f"{record['kl_end']:.3g} ({written(record['kl_end_interval'], '.3g')})"
        change = f"{record['slope_last_half']:+.2g} ({written(record['slope_last_half_interval'], '+.2g')})"
        print(f"{_name(record):18}{end:>40}{change:>34}{record['top1']:12.2%}{record['loss']:9.4f}")
    print(f"FP32 states: loss {records[0]['reference_loss']:.4f}")
    if "generation" in records[0]:
        g = records[0]["generation"]
        print(f"\nGreedy continuations of {g['prompt']} tokens, {g['tokens']} tokens at most; FP32 states in brackets")
        if not g["has_stop_token"]:
            print("(the model has no stop token: every text has full length; agreement and repetition remain)")
        for record in records:
            g = record["generation"]
            print(
                f"{_name(record):18}length {g['length']:.0f} ({g['reference_length']:.0f}), "
                f"unfinished {g['unfinished']:.0%} ({g['reference_unfinished']:.0%}), equal for {g['agreement']:.0f}, "
                f"repeated {g['repeated']:.0%} ({g['reference_repeated']:.0%})"
            )
    print(
        "\nBy the heads' decays per window, a checkpoint that is quantised at every flush should cost "
        f"{decays['predicted_ratio']:.2f} times\nthe KL of a read copy of its format:"
    )
    for layer, heads in enumerate(decays["decay"]):
        print(f"  Mamba layer {layer}: {' '.join(f'{decay:.3f}' for decay in heads)}")


def _name(record: dict) -> str:
    return f"{record['checkpoint']}:{record['read_copy']}"
