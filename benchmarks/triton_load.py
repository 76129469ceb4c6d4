# SPDX-License-Identifier: Apache-2.0
"""Load on a real tritonserver: tokens a second and latencies with 1, 32 and 200 clients, standard and speculative.

Each client streams one text after the other over a gRPC connection of its own. Clients and server share the machine's
cores: on a CPU the ratios mean something, the figures themselves little. On a larger machine they are spread over
several processes, since the clients of one share its Python. Every text is compared with that of an engine of the
same dtype that serves nobody else. Run it with the Python that has nvidia-pytriton (docs/deploy-triton.md):

    .venv/triton-server/bin/python benchmarks/triton_load.py --output benchmarks/results/triton-load.json

The file is written after every run, with what there is by then.
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
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import torch

from trtllm_replayssm import ReplayConfig
from trtllm_replayssm.cli import PROMPTS
from trtllm_replayssm.integrations.triton_server.client import Client
from trtllm_replayssm.integrations.triton_server.repository import write_model
from trtllm_replayssm.integrations.triton_server.server import Address, Program, Server
from trtllm_replayssm.integrations.triton_server.settings import Settings
from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.agreement import margin_of_difference
from trtllm_replayssm.runtime.engine import pick_device, replay_config
from trtllm_replayssm.runtime.model_config import ModelConfig

MODES = {"standard": {}, "mtp": {"speculation": "mtp", "draft_tokens": 3}}
FLUSHES = 'replayssm_flushes_total{model="tensorrt_llm"}'
CONNECTED_WITHIN = 120.0  # seconds
MARGIN = 1e-3  # of the two best logits, where a float32 text may part from a solo run's


def percentiles(values: list[float]) -> dict:
    """In milliseconds, of seconds."""
    values = sorted(values)
    return {f"p{part}": round(1e3 * values[min(len(values) * part // 100, len(values) - 1)], 2) for part in (50, 99)}


def _share(barriers) -> None:
    """In a new process of clients."""
    global _starts
    _starts = barriers


def _run_clients(address: str, clients: int, numbers: range, each: int, tokens: int) -> tuple[list, list, list]:
    """In a process of clients, a thread for each number: prompts with their last answers, seconds between responses
    and to the first.
    """
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
                    answered.append((prompt, answers[-1].text, answers[-1].values))
                    gaps.extend(later - earlier for earlier, later in zip(times, times[1:], strict=False))
                    firsts.append(times[0] - asked)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    connected.wait(CONNECTED_WITHIN)
    _starts[clients].wait(CONNECTED_WITHIN)
    start.set()
    for thread in threads:
        thread.join()
    return answered, gaps, firsts


def _seconds_per_token(statistics: dict) -> float:
    """After the first, by the engine's clock."""
    nanoseconds = statistics["last_token_time_ns"] - statistics["first_token_time_ns"]
    return nanoseconds / 1e9 / max(statistics["num_output_tokens"] - 1, 1)


class Clients:
    """Processes of clients, made once: each has to import torch. counts: of clients that `load` is called with."""

    def __init__(self, counts: list[int], processes: int):
        context = multiprocessing.get_context("forkserver")
        self._processes = {count: min(count, processes) for count in counts}
        self._starts = {count: context.Barrier(several + 1) for count, several in self._processes.items()}
        self._pool = context.Pool(max(self._processes.values()), _share, (self._starts,))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_) -> None:
        self._pool.terminate()

    def load(self, address: str, clients: int, requests: int, tokens: int) -> tuple[dict, list[tuple[str, str]]]:
        """Runs all clients to their ends. A record; prompts with the texts that they brought."""
        processes, each = self._processes[clients], max(requests // clients, 1)
        shares = [(address, clients, range(first, clients, processes), each, tokens) for first in range(processes)]
        running = self._pool.starmap_async(_run_clients, shares, chunksize=1)
        self._starts[clients].wait(CONNECTED_WITHIN)
        began = time.perf_counter()
        answered, gaps, firsts = (list(chain(*lists)) for lists in zip(*running.get(), strict=True))
        seconds = time.perf_counter() - began
        assert len(answered) == clients * each, f"{len(answered)} answers to {clients * each} requests"
        statistics = [values for _, _, values in answered]
        generated = sum(values["num_output_tokens"] for values in statistics)
        steps = sum(values["num_decode_steps"] for values in statistics)
        record = {
            "clients": clients,
            "client_processes": processes,
            "requests": len(answered),
            "generated_tokens": generated,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(generated / seconds, 1),
            "tokens_per_step": round((generated - len(answered)) / max(steps, 1), 2),
            "inter_token_ms": percentiles(list(map(_seconds_per_token, statistics))),
            "between_responses_ms": percentiles(gaps),
            "first_response_ms": percentiles(firsts),
        }
        return record, [(prompt, text) for prompt, text, _ in answered]


class SoloRuns:
    """The texts of an engine that serves nobody else."""

    def __init__(self, options):
        self._engine = Engine(options.checkpoint, device=options.device, dtype=options.dtype, max_batch=1, context=512)
        params = SamplingParams(max_tokens=options.tokens)
        self._texts = {prompt: self._engine.generate([prompt], params)[0] for prompt in PROMPTS}

    def compare(self, texts: list[tuple[str, str]]) -> dict:
        """How many of them are those of solo runs, and the largest distance of the two best logits where others part.
        SystemExit for float32 texts that part where nothing ties.
        """
        counts = Counter(texts)
        found = {
            (prompt, text): margin_of_difference(self._engine, self._texts[prompt], text) for prompt, text in counts
        }
        parted = {which: margin for which, margin in found.items() if margin is not None}
        largest = max(parted.values(), default=0.0)
        if self._engine.dtype == torch.float32 and largest >= MARGIN:
            raise SystemExit(f"a text parts from its solo run where the two best logits differ by {largest:g}")
        return {
            "texts_of_solo_runs": sum(counts.values()) - sum(counts[which] for which in parted),
            "largest_margin_of_others": round(largest, 5) if parted else None,
        }


@contextmanager
def started(options, speculation: dict):
    """A server of one mode that begins to load its model."""
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
            yield server


def measured(server: Server, config: ReplayConfig, clients: Clients, count: int, solo: SoloRuns, options) -> dict:
    """A run of a mode, whose states are kept as `config` says."""
    flushes = server.metrics()[FLUSHES]
    requests = options.requests if count > 1 else options.requests // 8
    record, texts = clients.load(f"127.0.0.1:{server.address.grpc}", count, requests, options.tokens)
    time.sleep(0.5)  # metrics follow
    flushes = server.metrics()[FLUSHES] - flushes
    # A window is flushed when it has no room for a step.
    decoded, drafts = options.tokens - 1, config.max_step_tokens - 1
    least, most = decoded / config.window - 1, (decoded + drafts) / (config.window - drafts) + 1
    if not least <= flushes / record["requests"] <= most or most <= 2:
        raise SystemExit(
            f"{record['requests']} texts of {options.tokens} tokens flushed {flushes:g} times in windows of "
            f"{config.window}, expected {least:.2f} to {most:.2f} each, and more than once"
        )
    return {**record, "flushes": flushes, **solo.compare(texts)}


def fastest(runs: dict[str, list[dict]]) -> list[dict]:
    """A record for each mode: whatever else the machine does only slows a run down."""
    records = {mode: max(several, key=lambda run: run["tokens_per_second"]) for mode, several in runs.items()}
    for mode, record in records.items():
        speed_up = record["tokens_per_second"] / records["standard"]["tokens_per_second"]
        speeds = [run["tokens_per_second"] for run in runs[mode]]
        records[mode] = {**record, "runs_tokens_per_second": speeds, "speed_up_over_standard": round(speed_up, 2)}
    return [{"bench": "triton_load", "mode": mode, **record} for mode, record in records.items()]


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
    parser.add_argument(
        "--requests",
        type=int,
        default=192,
        metavar="N",
        help="of all clients together, at least one each; a single client makes an eighth of them",
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
    model = ModelConfig.read(options.checkpoint)
    dtype = options.dtype or (model.dtype if place.type == "cuda" else "float32")
    configs = {mode: replay_config(model, dtype, given.get("draft_tokens", 0), "auto") for mode, given in MODES.items()}
    records = {}
    with ExitStack() as stack:
        clients = stack.enter_context(Clients(options.clients, options.client_processes))
        servers = {mode: stack.enter_context(started(options, settings)) for mode, settings in MODES.items()}
        solo = SoloRuns(options)
        for server in servers.values():
            server.wait_until_healthy(600)
        for count in options.clients:
            runs = {mode: [] for mode in MODES}
            for _ in range(options.runs):
                for mode, server in servers.items():
                    runs[mode].append(measured(server, configs[mode], clients, count, solo, options))
                records[count] = [{**record, **about} for record in fastest(runs)]
                print(*map(json.dumps, records[count]), sep="\n", flush=True)
                if options.output:
                    Path(options.output).write_text(json.dumps(list(chain(*records.values())), indent=1) + "\n")


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
