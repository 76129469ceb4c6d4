# SPDX-License-Identifier: Apache-2.0
"""When a server counts as healthy: by what it answers, here from a double of its HTTP pages."""

import http.server
import json
import re
import threading

import pytest

from trtllm_replayssm.integrations.triton_server.server import Address, Program, Server

from .serving import free_ports


class Pages(http.server.BaseHTTPRequestHandler):
    """`server.answer`: what `generate` does. `server.steps`: what the metrics page says, `pace` more for each
    look. `server.late`: looks that come before there is such a page.
    """

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/v2/repository/index":
            return self.send([{"name": "model", "state": "READY"}])
        if self.server.answer == "hang":
            return self.server.over.wait(10)
        status, body = self.server.answer
        return self.send(body, status)

    def do_GET(self):
        if self.path == "/metrics":
            if self.server.late:
                self.server.late -= 1
                return self.send("not yet", 503)
            self.server.steps += self.server.pace
            return self.send(f'replayssm_decode_steps_total{{model="model"}} {self.server.steps}\n')
        return self.send({"input": [{"name": "text_input"}, {"name": "max_tokens"}]})

    def send(self, body, status=200):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def pages():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.steps, server.pace, server.late, server.over = 7, 0, 0, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def server_of(pages, folder) -> Server:
    """With a program that does nothing, and those pages."""
    program = folder / "tritonserver"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    (folder / "models" / "model").mkdir(parents=True)
    server = Server(Program(program), folder / "models", Address("127.0.0.1", *free_ports(3)))
    port = pages.server_address[1]
    server.address = Address(http=port, metrics=port)
    return server


@pytest.mark.parametrize(
    ("answer", "pace", "problem"),
    [
        ((200, {"text_output": " and"}), 0, None),
        ((200, {"error": "no response"}), 0, "model 'model' answered {'error': 'no response'}"),
        ((500, {"error": "Stub process is not healthy"}), 0, "/generate: HTTP 500: .*Stub process is not healthy"),
        ("hang", 1, None),
        ("hang", 0, "model 'model' has not answered in 0.3 s, nor done anything else"),
    ],
    ids=["answers", "answers nothing", "dead", "busy", "stuck"],
)
def test_probe(pages, tmp_path, answer, pace, problem):
    pages.answer, pages.pace = answer, pace
    with server_of(pages, tmp_path) as server:
        found = server.probe(0.3)
    assert found is None if problem is None else re.search(problem, found)


def test_metrics_may_come_after_http(pages, tmp_path):
    """As tritonserver opens them: a probe, which looks at metrics, must not fail in between."""
    pages.answer, pages.late = (200, {"text_output": " and"}), 3
    with server_of(pages, tmp_path) as server:
        server.wait_until_healthy(10)
    assert pages.late == 0
