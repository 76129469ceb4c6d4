# SPDX-License-Identifier: Apache-2.0
"""Starts a tritonserver, watches it, and ends it so that nothing is left."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from . import guardian

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
_GRACE_SECONDS = 5.0
_OURS = "replayssm_"
_LIMITS = ("max_tokens", "sampling_param_max_tokens")
_PR_SET_PDEATHSIG = 1


class ServerError(OSError):
    """The server could not be started, or has stopped answering."""


@dataclass(frozen=True)
class Program:
    """A tritonserver. wheel: the folder in nvidia-pytriton's wheel that it comes from, whose Python backend must be put
    together first. Models run in this Python.
    """

    path: Path
    wheel: Path | None = None

    @classmethod
    def find(cls, given: str | None = None) -> Program:
        """`given`, else the one in PATH, in NVIDIA's container, or in nvidia-pytriton's wheel in this Python.

        Raises:
            ServerError: there is none; says where it was looked for.
        """
        if given is not None:
            if not os.access(given, os.X_OK):
                raise ServerError(f"{given}: not a program")
            return cls(Path(given))
        if (path := shutil.which("tritonserver")) is not None:
            return cls(Path(path))
        if CONTAINER.exists():
            return cls(CONTAINER)
        package = importlib.util.find_spec("pytriton")
        for place in package.submodule_search_locations if package else ():
            wheel = Path(place) / "tritonserver"
            if (wheel / "bin" / "tritonserver").exists():
                return cls(wheel / "bin" / "tritonserver", wheel)
        raise ServerError(
            f"no tritonserver: not in PATH, no {CONTAINER}, no nvidia-pytriton in {sys.prefix}; "
            "pip install 'trtllm-replayssm[triton]', or run in NVIDIA's container"
        )

    def python_backend(self, folder: Path) -> list[str]:
        """Options that name the Python backend; the wheel's is put together in `folder`.

        A stub that lacks a library does not fail, it hangs the load: so this is looked at here. ServerError names it.
        """
        if self.wheel is None:
            return []
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            known = sorted(path.name for path in stub.parent.parent.iterdir())
            raise ServerError(f"{self.wheel}: no stub for Python {version}, expected one of {', '.join(known)}")
        backend = folder / "python"
        backend.mkdir()
        source = self.wheel / "backends" / "python"
        for path in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", stub):
            (backend / path.name).symlink_to(path)
        libraries = subprocess.run(
            ["ldd", str(stub)], env=self.environment(), capture_output=True, text=True, check=False
        )
        if missing := [line.split()[0] for line in libraries.stdout.splitlines() if "not found" in line]:
            raise ServerError(
                f"{stub}: needs {', '.join(missing)}, which is neither in {_library_folder()} nor installed"
            )
        return [f"--backend-directory={folder}"]

    def environment(self) -> dict[str, str]:
        """The stub is to embed this Python: the first python3 in PATH, with the libpython that belongs to it."""
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        if self.wheel is not None:
            libraries = [_library_folder(), environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return environment


def _library_folder() -> str:
    return sysconfig.get_config_var("LIBDIR") or ""


@dataclass(frozen=True)
class Address:
    """Where a server listens: loopback unless told. ValueError for a number that is no port."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def __post_init__(self):
        for name in ("http", "grpc", "metrics"):
            if not 1 <= (port := getattr(self, name)) <= 65535:
                raise ValueError(f"{name} port is {port}, expected 1..65535")

    def options(self) -> list[str]:
        names = ("http", "grpc", "metrics")
        return [f"--{name}-address={self.host}" for name in names] + [
            f"--{name}-port={getattr(self, name)}" for name in names
        ]

    def __str__(self) -> str:
        return f"http {self.host}:{self.http}, grpc {self.host}:{self.grpc}, metrics {self.host}:{self.metrics}"

    def check_free(self) -> None:
        """ServerError names a port that is taken: its owner would answer in the server's place."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        for name in ("http", "grpc", "metrics"):
            port = getattr(self, name)
            with socket.socket(family, socket.SOCK_STREAM) as attempt:
                attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    attempt.bind((self.host, port))
                except OSError as error:
                    raise ServerError(f"{name} port {port} on {self.host}: {error.strerror}") from None

    @property
    def reachable(self) -> str:
        """The host for connections from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host


class Server:
    """A tritonserver process in a process group of its own, with shared memory under a name of its own.

        with Server(program, repository, Address()) as server:
            server.wait_until_healthy(60)

    On leaving it is asked to end; what is running may finish. After `exit_timeout` and 5 s more the whole group is
    killed. So it is if this process ends, however that comes.
    """

    def __init__(
        self,
        program: Program,
        repository: Path,
        address: Address,
        *,
        exit_timeout: int = 30,
        options: tuple[str, ...] = (),
    ):
        if not Path(repository).is_dir():
            raise ServerError(f"{repository}: no such directory, expected a model repository")
        if not any(path.is_dir() for path in Path(repository).iterdir()):
            raise ServerError(f"{repository}: no folder of a model in it, expected a model repository")
        address.check_free()
        self.address, self._repository, self._exit_timeout = address, Path(repository), exit_timeout
        self._asked = False
        self._shm = f"replayssm_{os.getpid()}_{time.monotonic_ns():x}_"
        self._folder = tempfile.mkdtemp(prefix="replayssm-triton-")
        try:
            command = [
                str(program.path),
                f"--model-repository={repository}",
                *address.options(),
                "--disable-auto-complete-config",
                "--exit-on-error=false",  # to be asked which model it is
                f"--exit-timeout-secs={exit_timeout}",
                f"--backend-config=python,shm-region-prefix-name={self._shm}",
                *program.python_backend(Path(self._folder)),
                *options,
            ]
            self._process = subprocess.Popen(
                command, env=program.environment(), start_new_session=True, preexec_fn=_end_with_parent
            )
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        seconds = exit_timeout + _GRACE_SECONDS
        command = [guardian.__file__, str(self.pid), str(seconds), self._shm, self._folder]
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", *command], stdin=subprocess.PIPE, start_new_session=True
            )
        except BaseException:
            guardian.kill(self.pid)
            self._process.wait()
            guardian.clear(self._shm, self._folder)
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_until_healthy(self, seconds: float) -> None:
        """Until every model has answered a request.

        Raises:
            ServerError: a model cannot be loaded (by name, with the reason), the server ends, or time is up.
        """
        deadline = time.monotonic() + seconds
        while not self._listens():
            if self.exit_code is not None:
                raise ServerError(f"tritonserver ended with {self.exit_code} before it was ready; its log says why")
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver did not listen within {seconds:g} s; its log says how far it came")
            time.sleep(0.1)
        if broken := self._broken_models():
            raise ServerError("; ".join(broken))
        if (reason := self.probe(max(deadline - time.monotonic(), 1.0))) is not None:
            raise ServerError(reason)

    def _broken_models(self) -> list[str]:
        """The models of the repository that are not ready, with reasons. The server listens once it has tried all."""
        index = {model["name"]: model for model in self._json("/v2/repository/index", {})}
        broken = []
        for folder in sorted(path.name for path in self._repository.iterdir() if path.is_dir()):
            model = index.get(folder, {})
            if model.get("state") != "READY" and not folder.startswith("."):
                reason = model.get("reason") or "its config.pbtxt was not accepted, tritonserver's log says why"
                broken.append(f"model {folder!r} could not be loaded: {reason}")
        return broken

    def probe(self, seconds: float) -> str | None:
        """Asks every model for a token. None if all answer, else what is wrong. A model whose process has died still
        counts as ready for the server: only a request tells. One that is busy, and gets on with its work, is healthy.
        """
        try:
            for model in (model["name"] for model in self._json("/v2/repository/index", {})):
                if (wish := self._probe_request(model)) is None:
                    continue
                before = self._progress()
                try:
                    answer = self._json(f"/v2/models/{model}/generate", wish, seconds)
                except TimeoutError:
                    if self._progress() == before:
                        return f"model {model!r} has not answered in {seconds:g} s, nor done anything else"
                    continue
                if "text_output" not in answer:
                    return f"model {model!r} answered {answer}"
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def stop(self) -> bool:
        """Ends the server and cleans up. Whether it ended by itself in time."""
        self.ask_to_end()
        try:
            self._process.wait(self._exit_timeout + _GRACE_SECONDS)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        self.kill()
        return ended

    def ask_to_end(self) -> None:
        if self.exit_code is None and not self._asked:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends whatever is left of the process group at once, and cleans up."""
        self._guardian.kill()
        guardian.kill(self.pid)
        self._process.wait()
        guardian.clear(self._shm, self._folder)
        self._guardian.communicate()

    # ---- HTTP ----

    def _listens(self) -> bool:
        """On HTTP and, which comes last, for metrics."""
        try:
            for page in (f"{self._url}/v2/health/live", self._metrics_page):
                with urllib.request.urlopen(page, timeout=5):
                    pass
        except OSError:
            return False
        return True

    @property
    def _url(self) -> str:
        return f"http://{self.address.reachable}:{self.address.http}"

    @property
    def _metrics_page(self) -> str:
        return f"http://{self.address.reachable}:{self.address.metrics}/metrics"

    def _json(self, path: str, body: dict | None = None, seconds: float = 10.0):
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url + path, data), timeout=seconds) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise error.reason from None
            raise ServerError(f"tritonserver does not answer: {error.reason}") from None

    def _probe_request(self, model: str) -> dict | None:
        """The smallest request; None for a model that is not asked for text."""
        inputs = {each["name"] for each in self._json(f"/v2/models/{model}/config")["input"]}
        if "text_input" not in inputs:
            return None
        return {"text_input": "a", **{name: 1 for name in _LIMITS if name in inputs}}

    def metrics(self) -> dict[str, float]:
        """What the models of this package say on the metrics page, by name and labels."""
        with urllib.request.urlopen(self._metrics_page, timeout=10.0) as response:
            lines = response.read().decode().splitlines()
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if line.startswith(_OURS))}

    def _progress(self) -> dict[str, float]:
        return {key: value for key, value in self.metrics().items() if "_steps_total{" in key}


def _end_with_parent() -> None:
    """In the new process: SIGTERM when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
