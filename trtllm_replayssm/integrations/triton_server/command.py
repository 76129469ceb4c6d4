# SPDX-License-Identifier: Apache-2.0
"""`trtllm-replayssm triton-repo` and `triton-launch`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

from ...builder.command import add_allow

_DIRECTORIES = ("template", "tokenizer")


def add_commands(commands, window) -> None:
    """Adds both to the subparsers of the command line. window: the type of --window."""
    repo = commands.add_parser("triton-repo", help="write a model repository for Triton Inference Server")
    repo.set_defaults(run=_repo)
    repo.add_argument("--model", required=True, metavar="DIR", help="checkpoint directory, or what build made")
    repo.add_argument("--output", required=True, metavar="REPO", help="the repository; the model is added to it")
    repo.add_argument(
        "--backend",
        default="embedded",
        metavar="NAME",
        help="embedded (default): a checkpoint; engine: an engine folder; trtllm: TensorRT-LLM, by its own templates",
    )
    repo.add_argument("--executor", metavar="tensorrt|reference", help="of an engine folder, as for generate")
    repo.add_argument(
        "--interface",
        metavar="NAME",
        help="whose tensors: llmapi (default), TensorRT-LLM's current template; ensemble, that of its engines",
    )
    repo.add_argument("--name", help="of the model; default: what clients of the interface ask for")
    repo.add_argument("--mode", metavar="MODE", help="replay (default) or conventional")
    repo.add_argument("--device", help="cpu, cuda, cuda:1 …; default: a GPU if the server finds one that can be used")
    repo.add_argument("--dtype", help="float32, bfloat16, float16; default: the checkpoint's; float32 on the CPU")
    repo.add_argument("--max-batch", type=int, metavar="N", help="sequences at once; more wait in line; default: 32")
    repo.add_argument("--max-waiting", type=int, metavar="N", help="requests in line; more are refused; default: 1024")
    repo.add_argument("--context", type=int, metavar="N", help="most tokens of a sequence; default: at most 4096")
    repo.add_argument("--prefill-chunk", type=int, metavar="N", help="most prompt tokens of a pass; default: 512")
    repo.add_argument("--window", type=window, metavar="N", help="as for generate")
    repo.add_argument("--checkpoint-format", metavar="FORMAT", help="as for generate")
    repo.add_argument("--read-copy", metavar="FORMAT", help="as for generate")
    repo.add_argument("--speculative", dest="speculation", metavar="mtp|ngram", help="as for generate")
    repo.add_argument("--draft-tokens", type=int, metavar="N", help="most drafts a step; requests may ask for fewer")
    repo.add_argument("--adaptive", action="store_true", default=None, help="as for generate")
    repo.add_argument("--deterministic", action="store_true", default=None, help="as for generate")
    add_allow(repo)
    repo.add_argument("--template", metavar="DIR", help="trtllm: its all_models; default: /app/all_models")
    repo.add_argument("--tokenizer", metavar="DIR", help="trtllm: of an engine of trtllm-build")
    repo.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="trtllm: GPUs that share a checkpoint; default: 1"
    )
    repo.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    launch = commands.add_parser(
        "triton-launch",
        help="start a tritonserver, watch it, and end it so that nothing is left",
        description="Runs until SIGTERM or SIGINT, then lets running requests finish; a second signal kills. Exit "
        "codes: 0 ended as asked, 1 the server had to be killed, ended by itself or stopped answering, 2 not started.",
    )
    launch.set_defaults(run=_launch)
    launch.add_argument("--repo", required=True, metavar="REPO", help="what triton-repo wrote")
    launch.add_argument(
        "--server",
        metavar="FILE",
        help="tritonserver; default: in PATH, NVIDIA's container, or nvidia-pytriton's wheel",
    )
    launch.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s, this machine only"
    )
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        launch.add_argument(f"--{name}-port", type=int, default=port, metavar="N", help="default: %(default)s")
    for name, seconds, meaning in (
        ("start-timeout", 600, "for loading all models"),
        ("exit-timeout", 30, "for requests to finish at the end"),
        ("probe-interval", 30, "between two requests that show whether the models answer"),
        ("probe-timeout", 60, "for an answer to one"),
    ):
        launch.add_argument(
            f"--{name}", type=int, default=seconds, metavar="S", help=f"seconds {meaning}; default: %(default)s"
        )
    launch.add_argument("option", nargs="*", help="after --: further options of tritonserver")


def _repo(options) -> int:
    if options.backend == "trtllm":
        return _templates(options)
    from .interface import INTERFACES
    from .repository import write_model
    from .settings import BACKENDS, Settings

    if options.backend not in BACKENDS:
        raise ValueError(f"backend is {options.backend!r}, expected one of {', '.join((*BACKENDS, 'trtllm'))}")
    for name in ("template", "tokenizer", "tensor_parallel"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --backend trtllm")
    given = {
        name: getattr(options, name)
        for name in Settings.__dataclass_fields__
        if name != "model" and getattr(options, name) is not None
    }
    settings = Settings(str(Path(options.model).resolve()), **given | {"allow": tuple(options.allow)})
    name = INTERFACES[settings.interface].model if options.name is None else options.name
    write_model(Path(options.output), name, settings)
    _print_written(options, [name], f"trtllm-replayssm triton-launch --repo {shlex.quote(options.output)}")
    return 0


def _templates(options) -> int:
    from .settings import Settings
    from .templates import write

    taken = {"max_batch", "context", "checkpoint_format", "draft_tokens", "speculation", "tensor_parallel"}
    ours = {"name", *Settings.__dataclass_fields__} - {"model", "backend"}
    for name in sorted(ours - taken):
        if getattr(options, name) not in (None, []):
            raise ValueError(
                f"--{name.replace('_', '-')}: not with --backend trtllm, where ReplaySSM is set by the environment, "
                "TRTLLM_REPLAYSSM_*"
            )
    if options.speculation not in (None, "mtp"):
        raise ValueError(f"--speculative is {options.speculation!r}, expected mtp with --backend trtllm")
    if options.draft_tokens is not None and options.speculation is None:
        raise ValueError("--draft-tokens needs --speculative mtp")
    drafts = options.draft_tokens
    if options.speculation is not None and drafts is None:
        drafts = 3
    paths = {name: value and Path(value).resolve() for name, value in vars(options).items() if name in _DIRECTORIES}
    written = write(
        Path(options.output),
        Path(options.model).resolve(),
        **paths,
        **{name: getattr(options, name) for name in taken - {"draft_tokens", "speculation"}},
        draft_tokens=drafts,
    )
    _print_written(options, list(written.models), written.launch)
    return 0


def _print_written(options, models: list[str], launch: str) -> None:
    if options.json:
        print(json.dumps({"repository": options.output, "models": models, "launch": launch}))
    else:
        print(f"{options.output}: {', '.join(models)}\n{launch}")


def _launch(options) -> int:
    from .server import Address, Program, Server, ServerError

    for name, least in (("start_timeout", 1), ("exit_timeout", 0), ("probe_interval", 1), ("probe_timeout", 1)):
        if (seconds := getattr(options, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {seconds}, expected at least {least} (seconds)")
    asked = threading.Event()
    address = Address(options.host, options.http_port, options.grpc_port, options.metrics_port)
    reason = None
    with Server(
        Program.find(options.server),
        Path(options.repo),
        address,
        exit_timeout=options.exit_timeout,
        options=tuple(options.option),
    ) as server:

        def end(*_):
            if asked.is_set():
                server.kill()
            asked.set()
            server.ask_to_end()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            server.wait_until_healthy(options.start_timeout)
            print(f"ready: {address}", flush=True)
            reason = _watch(server, asked, options.probe_interval, options.probe_timeout)
        except ServerError:
            if not asked.is_set():
                raise
        finally:
            if reason is not None:
                print(f"trtllm-replayssm: error: {reason}", file=sys.stderr)
            ended = server.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
    if not ended:
        print("trtllm-replayssm: warning: connections stayed open: tritonserver was killed", file=sys.stderr)
    return 0 if ended and reason is None else 1


def _watch(server, asked: threading.Event, interval: float, timeout: float) -> str | None:
    """Until `asked` (None), or until the server ends or answers no probe twice: what is wrong."""
    failures, probed = 0, time.monotonic()
    while not asked.wait(0.5):
        if server.exit_code is not None:
            return f"tritonserver ended by itself with {server.exit_code}"
        if time.monotonic() - probed < interval:
            continue
        problem = server.probe(timeout)
        failures = failures + 1 if problem else 0
        if failures == 2:
            return problem
        probed = time.monotonic()
    return None
