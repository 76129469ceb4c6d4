# SPDX-License-Identifier: Apache-2.0
"""The commands `convert`, `trtllm-model-file`, `trtllm-build` and `doctor` of `trtllm-replayssm`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from ... import _core
from ...builder import command as engines


def add_commands(commands, window) -> None:
    """Adds them to the subparsers of the command line. window: the type of --window."""
    converting = commands.add_parser("convert", help="make a TensorRT-LLM 1.2 checkpoint, for trtllm-build")
    converting.set_defaults(run=_convert)
    converting.add_argument("--checkpoint", required=True, metavar="DIR", help="nemotron_h checkpoint directory")
    converting.add_argument("--output", required=True, metavar="DIR", help="the checkpoint to make")
    converting.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each layer; default: 1")
    converting.add_argument("--pp", type=int, default=1, metavar="N", help="stages of layers; default: 1")
    state = converting.add_argument_group(
        "how states are kept; default: as the checkpoint's config.json says, if it does"
    )
    state.add_argument("--window", type=window, metavar="N", help="as for generate")
    for name, default, formats in (
        ("checkpoint-format", "fp32", _core.CHECKPOINT_FORMATS),
        ("read-copy", "none", _core.READ_COPY_FORMATS),
    ):
        state.add_argument(f"--{name}", metavar="FORMAT", help=f"{', '.join(formats)}; default: {default}")
    state.add_argument("--seed", type=int, default=0, metavar="N", help="of stochastic rounding; default: 0")
    engines.add_allow(converting)
    converting.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    model = commands.add_parser("trtllm-model-file", help="print the path for trtllm-build's --model_cls_file")
    model.set_defaults(run=_model_file)

    building = commands.add_parser(
        "trtllm-build",
        help="run TensorRT-LLM's trtllm-build on a checkpoint that convert made",
        usage="trtllm-replayssm trtllm-build --checkpoint DIR --output DIR [--print] [-- OPTIONS OF trtllm-build]",
    )
    building.set_defaults(run=_build)
    building.add_argument("--checkpoint", required=True, metavar="DIR", help="what convert made")
    building.add_argument("--output", required=True, metavar="DIR", help="the engines to make")
    building.add_argument("more", nargs="*", metavar="OPTION", help="of trtllm-build itself, after --")
    building.add_argument("--print", action="store_true", dest="only_print", help="print the command, run nothing")

    examining = commands.add_parser("doctor", help="check TensorRT-LLM and the ops of this machine; write a report")
    examining.set_defaults(run=_doctor)
    examining.add_argument("--report", metavar="FILE", help="the report as JSON; default: print it")


def _convert(options) -> int:
    try:
        from .convert import convert
    except ImportError as error:
        raise ImportError(f"converting needs {error.name}: pip install 'trtllm-replayssm[runtime]'") from None
    with engines.ending_on_signals():
        converted = convert(
            options.checkpoint,
            options.output,
            tp=options.tp,
            pp=options.pp,
            window=options.window,
            checkpoint_format=options.checkpoint_format,
            read_copy=options.read_copy,
            seed=options.seed,
            allow=options.allow,
            progress=engines.progress_bar(),
        )
    config = converted.config
    if options.json:
        about = {name: getattr(converted, name) for name in ("bytes", "dropped", "dequantized")}
        print(json.dumps({"output": options.output, **about, **config}))
        return 0
    block, layers = config["replayssm"], config["layer_types"].count("recurrent")
    ranks = f"{options.tp} tensor-parallel ranks, {options.pp} stages"
    print(f"{options.output}: {config['architecture']} {config['dtype']}, {ranks}")
    for rank, size in enumerate(converted.bytes):
        print(f"  rank{rank}.safetensors  {engines.size(size)}")
    print(
        f"  window {block['window']}, checkpoint {block['checkpoint_format']}, read copy {block['read_copy']}: "
        f"{block['rank_slot_bytes']} bytes a sequence and Mamba layer on a rank (state_size {config['state_size']}), "
        f"{layers} Mamba layers"
    )
    for what in converted.dropped:
        print(f"  not taken along: {what}")
    if names := converted.dequantized:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        why = "TensorRT-LLM has no quantised embeddings, nor linears of which only the weight is"
        print(f"  not quantised any more, {config['dtype']} now: {', '.join(names[:3])}{more} ({why})")
    print(f"next: trtllm-replayssm trtllm-build --checkpoint {shlex.quote(options.output)} --output ENGINES")
    return 0


def _model_file(options) -> int:
    print(model_file())
    return 0


def model_file() -> Path:
    """What trtllm-build loads: two lines, so that its worker processes import the class from the installed package."""
    return Path(__file__).with_name("trtllm_model.py")


def _build(options) -> int:
    from .build_command import check_version, compose

    command = compose(Path(options.checkpoint), Path(options.output), options.more)
    if not options.only_print:
        check_version()
    print(shlex.join(command), flush=True)
    if options.only_print:
        return 0
    return subprocess.run(command, env={**os.environ, "TRTLLM_REPLAYSSM_PLUGIN": "1"}).returncode


def _doctor(options) -> int:
    from .doctor import examine

    report = examine()
    text = json.dumps(report, indent=2)
    if options.report:
        unfinished = Path(options.report + ".part")
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.rename(options.report)
        for line in report["summary"]:
            print(line)
    else:
        print(text)
    return 0 if report["good"] else 1
