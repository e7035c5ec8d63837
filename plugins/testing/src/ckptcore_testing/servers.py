"""Servers for tests: child processes on a free port of this machine, that answer before they are used and die with their parent."""

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

__all__ = ["Server", "ServerCommand", "free_port", "serve"]

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
"""Runs a server until its standard input ends, which it does however the parent dies, also by SIGKILL."""

_TRIES: Final = 3
_SECONDS_BETWEEN_LOOKS: Final = 0.01
_LOG_TOLD: Final = 2000


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        arguments: the program and what it is given.
        environment: added to that of this process.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        port: on 127.0.0.1.
        log: the file with what it printed.
    """

    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where it answers, without ``/`` at the end."""
        return f"http://{_HOST}:{self.port}"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on just now."""
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
        command: given a free port, how to start a server that listens there.
        directory: an existing one, for its log.
        path: answers a GET as soon as the server is ready, with any status below 500.
        timeout_seconds: how long it may take to answer.

    Raises:
        RuntimeError: if it ends before it answers, or does not answer in time; with the end of its log.
    """
    for tries_left in reversed(range(_TRIES)):
        port = free_port()
        log = directory / f"server-{port}.log"
        with _running(command(port), log) as process:
            if _answers(process, port, path, timeout_seconds):
                yield Server(port, log)
                return
        # Somebody else may have taken the port meanwhile.
        if not tries_left:
            told = log.read_text(errors="replace")[-_LOG_TOLD:]
            raise RuntimeError(f"the server ended with {process.returncode} before it answered at port {port}:\n{told}")


@contextmanager
def _running(command: ServerCommand, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *command.arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,  # an interrupt from the keyboard is for the tests, which then end it
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _answers(process: subprocess.Popen[bytes], port: int, path: str, timeout_seconds: float) -> bool:
    """Wait until a server answers; False if it ended.

    Raises:
        RuntimeError: if it does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    found: object = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        connection = http.client.HTTPConnection(_HOST, port, timeout=5)
        try:
            connection.request("GET", path)
            found = connection.getresponse().status
            if isinstance(found, int) and found < 500:
                return True
        except (OSError, http.client.HTTPException) as error:
            found = error
        finally:
            connection.close()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise RuntimeError(f"the server at port {port} is not ready after {timeout_seconds} seconds: {found}")
