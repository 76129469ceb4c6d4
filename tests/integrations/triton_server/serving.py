# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver under `trtllm-replayssm triton-launch`, for tests."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_replayssm.integrations.triton_server.interface import INTERFACES
from trtllm_replayssm.integrations.triton_server.repository import write_model
from trtllm_replayssm.integrations.triton_server.settings import Settings

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny-nemotron-h"
SOAK = int(os.environ.get("REPLAYSSM_SOAK_REQUESTS", "640"))  # of test_memory_is_flat; 5008 for the long run
DEADLINE = 120 + SOAK // 10  # seconds: no server of a test lives longer, whatever happens
SUITE_DEADLINE = 900 + SOAK // 10  # no test begins later


def server_python() -> Path:
    """The Python with nvidia-pytriton and numpy < 2. Skips the test where `make` could not install it."""
    folder = Path(sys.prefix) / "triton-server"
    if not (folder / "complete").exists():
        pytest.skip("needs tritonserver from nvidia-pytriton's wheel: make triton-server")
    return folder / "bin" / "python"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_repository(folder: Path, model: Path = TINY, device: str = "cpu", **settings) -> Path:
    """A repository of one model. settings: of Settings."""
    settings = Settings(str(model), device=device, **settings)
    write_model(folder, INTERFACES[settings.interface].model, settings)
    return folder


class Launched:
    """`triton-launch` as a process. Leaving it ends it, and asserts that nothing is left of it."""

    def __init__(
        self,
        repository: Path,
        log: Path,
        *options: str,
        ports: list[int] | None = None,
        python=None,
        cwd: Path | None = None,
        **environment: str,
    ):
        self.ports = ports or free_ports(3)
        self.log = log
        self._mark = f"REPLAYSSM_TEST={uuid.uuid4()}"
        command = [
            *("timeout", "--foreground", "--kill-after=30", str(DEADLINE), str(python or server_python())),
            *("-m", "trtllm_replayssm", "triton-launch", "--repo", str(repository), "--exit-timeout", "10"),
            *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), self.ports, strict=True)),
            *options,
            *("--", "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"),
        ]
        name, value = self._mark.split("=")
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env={**os.environ, name: value, "OMP_NUM_THREADS": "1", **environment},
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),
            )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (pids := children.read_text().split()):  # `timeout` is about to start it
            time.sleep(0.01)
        self.launcher = int(pids[0])

    def __enter__(self) -> Launched:
        deadline = time.monotonic() + 60
        while "ready: " not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                pytest.fail(f"triton-launch did not get ready:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        assert self.left() == []

    def left(self, seconds: float = 5.0) -> list[str]:
        """Processes and shared memory of this server that there still are, after up to so long."""
        deadline = time.monotonic() + seconds
        while True:
            left = [" ".join(command) for command in self.processes().values()]
            left += map(str, Path("/dev/shm").glob(f"replayssm_{self.launcher}_*"))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def processes(self) -> dict[int, list[str]]:
        """Command lines by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().decode().split("\0")
                    if command[0]:  # a zombie has none
                        found[int(folder.name)] = command
            except OSError:
                continue
        return found

    def running(self, program: str) -> list[int]:
        """Processes of tritonserver or triton_python_backend_stub."""
        return [pid for pid, command in self.processes().items() if Path(command[0]).name == program]

    def pid_of(self, program: str) -> int:
        return self.running(program)[0]

    # ---- clients ----

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    def post(self, path: str, body: dict | bytes, seconds: float = 60):
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[0]}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def generate(self, model: str = "tensorrt_llm", **inputs):
        return self.post(f"/v2/models/{model}/generate", inputs)

    def stream(self, model: str = "tensorrt_llm", **inputs):
        """The JSON of each event, as it comes; leaving the loop hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=60)
        try:
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(inputs))
            response = connection.getresponse()
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[len(b"data: ") :])
        finally:
            response.close()
            connection.close()

    def metrics(self, model: str = "tensorrt_llm") -> dict[str, float]:
        """Ours of a model, by name and outcome."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=10) as response:
            page = response.read().decode()
        found = re.findall(r'^replayssm_(\w+)\{model="(\w+)"(?:,outcome="(\w+)")?\} (\S+)$', page, re.MULTILINE)
        return {f"{name} {outcome}".strip(): float(value) for name, of, outcome, value in found if of == model}

    def metrics_when(self, condition: Callable[[dict], bool], seconds: float = 30.0) -> dict[str, float]:
        """Once they fulfil `condition`: they follow the answers by a moment."""
        deadline = time.monotonic() + seconds
        while not condition(values := self.metrics()):
            assert time.monotonic() < deadline, values
            time.sleep(0.01)
        return values


def ended(metrics: dict[str, float]) -> float:
    """Requests that were answered, in whatever way."""
    return sum(value for name, value in metrics.items() if name.startswith("requests_total"))
