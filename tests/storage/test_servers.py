"""Servers for tests. A server answers before a test uses it, and ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ckptcore_testing.servers import ServerCommand, free_port, serve

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

PARENT = """
import sys, pathlib, signal
from ckptcore_testing.servers import serve
from tests.storage.test_servers import command
with serve(command, pathlib.Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    signal.pause()
"""


def command(port: int) -> ServerCommand:
    """Return the command of a server that answers with its process id."""
    return ServerCommand([sys.executable, "-c", SERVER, str(port)], {})


def pid_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.read())


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs")


def test_a_server_answers_and_ends(tmp_path: Path) -> None:
    with serve(command, tmp_path) as first, serve(command, tmp_path) as second:
        assert first.port != second.port
        pids = [pid_of(first.url), pid_of(second.url)]
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.system
def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = pid_of(parent.stdout.readline().strip())
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    wait_for_end(pid)


def test_the_error_for_a_server_that_does_not_start_has_its_output(tmp_path: Path) -> None:
    def broken(port: int) -> ServerCommand:
        return ServerCommand([sys.executable, "-c", "import sys; sys.exit('no such option')"], {})

    with pytest.raises(RuntimeError, match="no such option"), serve(broken, tmp_path):
        pass


def test_a_server_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    def deaf(port: int) -> ServerCommand:
        return ServerCommand([sys.executable, "-c", "import signal; signal.pause()"], {})

    with pytest.raises(RuntimeError, match="not ready after"), serve(deaf, tmp_path, timeout_seconds=0.3):
        pass


def test_free_ports_are_ports() -> None:
    assert 1024 <= free_port() < 65536
