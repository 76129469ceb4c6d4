# SPDX-License-Identifier: Apache-2.0
"""The command `plan` of `trtllm-replayssm`."""

from __future__ import annotations

import json

from .. import ReplayConfig, _core
from . import command
from .engine_config import ACTIVATIONS, MAX_DRAFTS


def add_command(commands, window) -> None:
    """Adds `plan` to the subparsers of the command line. window: the type of --window."""
    planning = commands.add_parser(
        "plan",
        help="how each Mamba layer is kept, and how many requests fit on a GPU",
        description="Reads a checkpoint's headers only. Counts weights as they are stored, divided among the GPUs, and "
        "of what they leave on one the part that TensorRT-LLM gives to caches by default: 90 %.",
    )
    planning.set_defaults(run=_plan)
    planning.add_argument("--checkpoint", required=True, metavar="DIR", help="nemotron_h checkpoint directory")
    where = planning.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", metavar="NAME", help="h100, h200, b200, gb200, b300 or gb300")
    where.add_argument("--memory", metavar="SIZE", help="of one GPU, as in 80GB")
    for name, default, meaning in (
        ("tp", 1, "GPUs that share every layer"),
        ("tokens", 8192, "of a request, prompt and answer together"),
    ):
        planning.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning}; default: %(default)s"
        )
    planning.add_argument("--requests", type=int, metavar="N", help="say what so many requests take")
    planning.add_argument("--kv-dtype", choices=("bf16", "fp8"), default="bf16", help="default: %(default)s")
    state = planning.add_argument_group(
        "how states are kept; default: as the checkpoint's config.json says, if it does"
    )
    state.add_argument("--window", type=window, metavar="N", help="as for generate")
    state.add_argument("--draft-tokens", type=int, metavar="N", help=f"most drafts a step, 0..{MAX_DRAFTS}; default: 0")
    for name, default, formats in (
        ("checkpoint-format", "fp32", _core.CHECKPOINT_FORMATS),
        ("read-copy", "none", _core.READ_COPY_FORMATS),
    ):
        state.add_argument(f"--{name}", metavar="FORMAT", help=f"{', '.join(formats)}; default: {default}")
    command.add_allow(planning)
    planning.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _plan(options) -> int:
    from ..runtime.model_config import ModelConfig
    from ..runtime.weights import Weights
    from .byte_plan import GPUS, plan_bytes
    from .layer_plan import recommended

    for name, least, most in (
        ("tp", 1, 1024),
        ("tokens", 1, 2**31),
        ("draft_tokens", 0, MAX_DRAFTS),
        ("requests", 1, 2**31),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')}: expected {least}..{most}, got {value}")
    if options.gpu is not None and options.gpu not in GPUS:
        raise ValueError(f"--gpu: expected one of {', '.join(GPUS)}, got {options.gpu!r}; --memory takes any size")
    memory = command.bytes_of(options.memory) if options.gpu is None else GPUS[options.gpu]
    model = ModelConfig.read(options.checkpoint)
    known = recommended(options.checkpoint)
    steps = None if options.draft_tokens is None else 1 + options.draft_tokens
    given = {"window": options.window, "max_step_tokens": steps, "read_copy": options.read_copy}
    given |= {"checkpoint": options.checkpoint_format}
    chosen = {name: known.get(name) if value is None else value for name, value in given.items()}
    replay = ReplayConfig(
        activation=ACTIVATIONS[model.dtype], **{name: value for name, value in chosen.items() if value is not None}
    )
    plan = plan_bytes(
        model,
        Weights(options.checkpoint, model, options.allow),
        replay,
        memory=memory,
        tokens=options.tokens,
        tp=options.tp,
        kv_dtype=options.kv_dtype,
    )
    if options.json:
        print(json.dumps({"gpu": options.gpu, **plan.to_json()}, indent=2))
        return 0
    _print(plan, options)
    return 0


def _print(plan, options) -> None:
    size, first = command.size, plan.layers[0]
    geometry, replay = first.geometry, first.replay
    sizes = f"{geometry.num_heads} heads x {geometry.head_dim} x {geometry.state_dim}, groups: {geometry.num_groups}"
    print(f"{len(plan.layers)} Mamba-2 layers of {sizes}, on each of {options.tp} GPUs")
    print(
        f"checkpoint {replay.checkpoint}, read copy {replay.read_copy}, window {replay.window}, "
        f"steps of up to {replay.max_step_tokens} tokens: {size(first.slot_bytes)} a layer and request"
    )
    for name, section in first.layout.sections.items():
        print(f"  {name:12} {size(section.bytes):>11}  {section.dtype} {list(section.shape)}")
    print(f"\nof {size(plan.memory)} of one GPU")
    for format, stored in sorted(plan.weights.items()):
        print(f"  weights {format:6} {size(stored):>11}")
    print(f"  for requests   {size(plan.available):>11}")
    steps = replay.max_step_tokens
    other = f"{steps} snapshots" if steps > 1 else "conventional"
    print(f"\n{'a request of ' + str(plan.tokens) + ' tokens':34}{'state':>12}{'KV cache':>12}{'requests':>10}", end="")
    print(f"{'of ' + str(options.requests):>16}" if options.requests else "")
    for name, state, fit in (
        ("ReplaySSM, no snapshots", plan.request_replay, plan.fit_replay),
        (f"FP32 states, {other}", plan.request_conventional, plan.fit_conventional),
    ):
        print(f"  {name:32}{size(state):>12}{size(plan.request_kv):>12}{fit:>10}", end="")
        if options.requests:
            needed = options.requests * (state + plan.request_kv)
            print(f"{size(needed):>16}{' fit' if options.requests <= fit else ' do not fit'}", end="")
        print()
