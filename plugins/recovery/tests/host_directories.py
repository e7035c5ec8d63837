"""Hosts of jobs on this machine: each is a directory with the memory of its server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path


def server_pid(host: Path, job: str) -> int:
    """Return the process of the server of a host, which may have ended."""
    return _pid(host / job / "server.json")


def is_running(pid: int) -> bool:
    """Return True if a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def lose_host(host: Path, job: str) -> None:
    """Lose a host: its server and its memory."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(server_pid(host, job), signal.SIGKILL)
    shutil.rmtree(host)


def kill_servers(directory: Path) -> None:
    """Kill the servers of all hosts below a directory."""
    for described in directory.glob("*/*/server.json"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(_pid(described), signal.SIGKILL)


def _pid(described: Path) -> int:
    return int(json.loads(described.read_bytes())["pid"])
