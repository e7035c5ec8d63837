"""Servers for tests: child processes on a free local port, which end with their parent."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HOST: Final = "127.0.0.1"

_SUPERVISOR: Final = """
import signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def end_with_parent():
    sys.stdin.buffer.read()
    child.terminate()
    try:
        child.wait(2)
    except subprocess.TimeoutExpired:
        child.kill()
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(child.wait())
"""
"""A program between the tests and a server. It ends the server when its own standard input ends, which also happens if
the tests are killed by SIGKILL."""

_TRIES: Final = 3
_POLL_SECONDS: Final = 0.01
_MAX_LOG_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command that starts a server.

    Attributes:
        arguments: the program and its arguments.
        environment: environment variables to add.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        port: the port on 127.0.0.1.
        log: file with the output of the server.
    """

    port: int
    log: Path

    @property
    def url(self) -> str:
        """The URL, without ``/`` at the end."""
        return f"http://{_HOST}:{self.port}"


def free_port() -> int:
    """Return a port of 127.0.0.1 that is currently unused."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(
    command: Callable[[int], ServerCommand], directory: Path, *, path: str = "/", timeout_seconds: float = 120.0
) -> Iterator[Server]:
    """Run a server while the context is entered.

    Args:
        command: returns the command of the server, for a free port.
        directory: an existing directory for the log.
        path: the server is ready when a GET of this path has a status below 500.
        timeout_seconds: maximum time until the server is ready.

    Raises:
        RuntimeError: if the server exits at its start in each of three attempts, or if it is not ready in time. After
            three attempts, the message contains the end of the log.
    """
    for tries_left in reversed(range(_TRIES)):
        port = free_port()
        log = directory / f"server-{port}.log"
        with _running(command(port), log) as process:
            if _answers(process, port, path, timeout_seconds):
                yield Server(port, log)
                return
        # Another process may have taken the port: try another one.
        if not tries_left:
            output = log.read_text(errors="replace")[-_MAX_LOG_CHARACTERS:]
            raise RuntimeError(f"the server on port {port} exited with {process.returncode} at its start:\n{output}")


@contextmanager
def _running(command: ServerCommand, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *command.arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,  # Ctrl-C interrupts only the tests, which then stop the server
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _answers(process: subprocess.Popen[bytes], port: int, path: str, timeout_seconds: float) -> bool:
    """Wait until a server answers. Return False if it exited.

    Raises:
        RuntimeError: if it does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    result: object = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        connection = http.client.HTTPConnection(_HOST, port, timeout=5)
        try:
            connection.request("GET", path)
            result = connection.getresponse().status
            if isinstance(result, int) and result < 500:
                return True
        except (OSError, http.client.HTTPException) as error:
            result = error
        finally:
            connection.close()
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"the server on port {port} is not ready after {timeout_seconds} seconds: {result}")
