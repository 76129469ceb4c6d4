# SPDX-License-Identifier: Apache-2.0
"""Load on a real tritonserver: tokens a second and latencies with 1, 32 and 200 clients, standard and speculative.

Each client streams one text after the other over a gRPC connection of its own. Clients and server share the machine's
cores: on a CPU the ratios mean something, the figures themselves little. On a larger machine they are spread over
several processes, since the clients of one share its Python. Run it with the Python that has
nvidia-pytriton (docs/deploy-triton.md):

    .venv/triton-server/bin/python benchmarks/triton_load.py --output benchmarks/results/triton-load.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import torch

from trtllm_replayssm.cli import PROMPTS
from trtllm_replayssm.integrations.triton_server.client import Client
from trtllm_replayssm.integrations.triton_server.repository import write_model
from trtllm_replayssm.integrations.triton_server.server import Address, Program, Server
from trtllm_replayssm.integrations.triton_server.settings import Settings
from trtllm_replayssm.runtime.engine import pick_device

MODES = {"standard": {}, "mtp": {"speculation": "mtp", "draft_tokens": 3}}
FLUSHES = 'replayssm_flushes_total{model="tensorrt_llm"}'
CONNECTED_WITHIN = 120.0  # seconds
REQUESTS = 192  # of all clients together, at least one each


def percentiles(values: list[float]) -> dict:
    """In milliseconds, of seconds."""
    values = sorted(values)
    return {f"p{part}": round(1e3 * values[min(len(values) * part // 100, len(values) - 1)], 2) for part in (50, 99)}


def _share(barrier) -> None:
    """In a new process of clients."""
    global _start
    _start = barrier


def _run_clients(address: str, numbers: range, each: int, tokens: int) -> tuple[list, list, list]:
    """In a process of clients, a thread for each number: last answers, seconds between responses and to the first."""
    answered, gaps, firsts, lock = [], [], [], threading.Lock()
    connected = threading.Barrier(len(numbers) + 1)
    start = threading.Event()

    def run(number: int) -> None:
        with Client(address) as client:
            connected.wait()
            start.wait()
            for request in range(each):
                prompt = PROMPTS[(number + request) % len(PROMPTS)]
                asked = time.perf_counter()
                answers = list(client.stream(prompt, seconds=600, sampling_param_max_tokens=tokens, streaming=True))
                times = [answer.at for answer in answers]
                with lock:
                    answered.append(answers[-1].values)
                    gaps.extend(later - earlier for earlier, later in zip(times, times[1:], strict=False))
                    firsts.append(times[0] - asked)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    connected.wait(CONNECTED_WITHIN)
    _start.wait(CONNECTED_WITHIN)
    start.set()
    for thread in threads:
        thread.join()
    return answered, gaps, firsts


def load(address: str, clients: int, tokens: int, processes: int) -> dict:
    """Runs all clients to their ends."""
    each = max(REQUESTS // clients, 1) if clients > 1 else REQUESTS // 8
    context = multiprocessing.get_context("forkserver")  # which imports all this once
    start = context.Barrier(processes + 1)
    with context.Pool(processes, _share, (start,)) as pool:
        shares = [(address, range(first, clients, processes), each, tokens) for first in range(processes)]
        running = pool.starmap_async(_run_clients, shares, chunksize=1)
        start.wait(CONNECTED_WITHIN)
        began = time.perf_counter()
        answered, gaps, firsts = (list(chain(*lists)) for lists in zip(*running.get(), strict=True))
        seconds = time.perf_counter() - began
    assert len(answered) == clients * each, f"{len(answered)} answers to {clients * each} requests"
    generated = sum(values["num_output_tokens"] for values in answered)
    steps = sum(values["num_decode_steps"] for values in answered)
    per_token = [
        (values["last_token_time_ns"] - values["first_token_time_ns"]) / 1e9 / max(values["num_output_tokens"] - 1, 1)
        for values in answered
    ]
    return {
        "clients": clients,
        "client_processes": processes,
        "requests": len(answered),
        "generated_tokens": generated,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(generated / seconds, 1),
        "tokens_per_step": round((generated - len(answered)) / max(steps, 1), 2),
        "inter_token_ms": percentiles(per_token),
        "between_responses_ms": percentiles(gaps),
        "first_response_ms": percentiles(firsts),
    }


@contextmanager
def served(options, speculation: dict):
    """A server of one mode."""
    settings = Settings(
        str(Path(options.checkpoint).resolve()),
        device=options.device,
        dtype=options.dtype,
        max_batch=options.max_batch,
        context=512,
        **speculation,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "tensorrt_llm", settings)
        address = Address("127.0.0.1", *free_ports())
        with Server(Program.find(), Path(folder), address, options=("--log-info=false",)) as server:
            server.wait_until_healthy(600)
            yield server


def measured(server: Server, clients: int, options) -> dict:
    flushes = server.metrics()[FLUSHES]
    processes = min(clients, options.client_processes)
    record = load(f"127.0.0.1:{server.address.grpc}", clients, options.tokens, processes)
    time.sleep(1.0)  # metrics follow
    flushes = server.metrics()[FLUSHES] - flushes
    if flushes < record["requests"]:
        raise SystemExit(f"{record['requests']} texts of {options.tokens} tokens flushed {flushes:g} times: too short")
    return {**record, "flushes": flushes}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="examples/tiny-nemotron-h", metavar="DIR")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--dtype")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 200], metavar="N")
    parser.add_argument(
        "--client-processes",
        type=int,
        default=max(os.cpu_count() // 4, 1),
        metavar="N",
        help="that the clients are spread over; default: a quarter of the cores",
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each text")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each, in turns; the fastest is kept")
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="slots")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--commit", default="unknown", metavar="ID")
    parser.add_argument("--output", metavar="FILE", help="JSON; default: only print")
    options = parser.parse_args()

    place = pick_device(options.device)
    about = {
        "model": Path(options.checkpoint).resolve().name,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "slots": options.max_batch,
        "machine": f"{cpu()}, {os.cpu_count()} cores, clients on the same",
        "note": options.note,
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "command": shlex.join(["python", *sys.argv]),
    }
    records = []
    with ExitStack() as stack:
        servers = {mode: stack.enter_context(served(options, settings)) for mode, settings in MODES.items()}
        for clients in options.clients:
            runs = {mode: [] for mode in MODES}
            for _ in range(options.runs):
                for mode, server in servers.items():
                    runs[mode].append(measured(server, clients, options))
            # Whatever else the machine does only slows a run down.
            fastest = {mode: max(several, key=lambda run: run["tokens_per_second"]) for mode, several in runs.items()}
            for mode, record in fastest.items():
                record["runs_tokens_per_second"] = [run["tokens_per_second"] for run in runs[mode]]
                speed_up = record["tokens_per_second"] / fastest["standard"]["tokens_per_second"]
                record["speed_up_over_standard"] = round(speed_up, 2)
                records.append({"bench": "triton_load", "mode": mode, **record, **about})
                print(json.dumps(records[-1]), flush=True)
            if options.output:
                Path(options.output).write_text(json.dumps(records, indent=1) + "\n")


def free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
