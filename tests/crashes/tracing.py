"""Tasks of `tests.crashes.saver` that run under strace, which can also kill them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.crashes.saver import NEW
from tests.crashes.warm import WarmProgram

_CALLS: Final = (
    "open", "openat", "creat", "close", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "link", "linkat", "symlink",
    "rename", "renameat", "renameat2", "write", "writev", "pwrite64", "pwritev", "pwritev2", "fallocate", "truncate",
    "ftruncate", "copy_file_range", "sendfile", "fsync", "fdatasync", "sync_file_range", "msync", "flock", "fcntl",
)  # fmt: skip
"""All system calls of a save that change the contents of a file system, or what other processes see of it."""

_LINE: Final = re.compile(r"(\d+) +(?:(\w+)\(|<\.\.\. )")
_SECONDS: Final = 60.0


@dataclass(frozen=True)
class KillPoint:
    """A point to kill a process: before the first thread executes call number `number` of `name`."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}-{self.number}"


@functools.cache
def _why_no_strace() -> str | None:
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    tried = subprocess.run(
        [strace, "-f", "-e", "inject=close:signal=SIGKILL:when=60000", "-o", "/dev/null", "true"],
        capture_output=True, text=True, check=False, timeout=_SECONDS,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip()[-300:]}"


def needs_strace() -> None:
    """Skip the test if strace cannot trace a process."""
    if (reason := _why_no_strace()) is not None:
        pytest.skip(reason)


class Saver(WarmProgram):
    """The program `tests.crashes.saver`."""

    def __init__(self) -> None:
        super().__init__("tests.crashes.saver")

    def start(self, task: str, location: str, number: int = NEW) -> int:
        """Fork a child for a task. Return its process id. `begin` and `end` must follow."""
        self.say(json.dumps({"task": task, "location": location, "number": number}))
        return self.hear()

    def begin(self) -> None:
        """Start the task of the child."""
        self.say("begin")

    def traced(self, task: str, location: str, log: Path, *options: str) -> int:
        """Run a task in a child under strace, which writes to `log`. Return the exit status of the child."""
        child = self.start(task, location)
        tracer = subprocess.Popen(["strace", "-f", "-q", "-o", str(log), *options, "-p", str(child)])
        try:
            _wait_until_traced(child, tracer)
        finally:
            self.begin()
            status = self.end()
            tracer.wait(_SECONDS)
        return status

    def kill_points(self, task: str, location: str, log: Path) -> Sequence[KillPoint]:
        """Run a task. Return the points at which it could have been killed, in the order of its calls."""
        status = self.traced(task, location, log, "-e", f"trace={','.join(_CALLS)}")
        assert status == 0, f"{task} failed"
        counts: Counter[tuple[str, str]] = Counter()
        points: dict[KillPoint, None] = {}
        for line in log.read_text(errors="replace").splitlines():
            matched = _LINE.match(line)
            if matched is not None and matched[2] is not None:
                counts[matched[1], matched[2]] += 1
                points[KillPoint(matched[2], counts[matched[1], matched[2]])] = None
        return list(points)

    def killed(self, task: str, location: str, point: KillPoint) -> int:
        """Run a task, and kill it at a point. Return the exit status."""
        return self.traced(
            task, location, Path("/dev/null"),
            "-e", f"trace={point.name}", "-e", f"inject={point.name}:signal=SIGKILL:when={point.number}",
        )  # fmt: skip


def _wait_until_traced(process: int, tracer: subprocess.Popen[bytes]) -> None:
    status = Path(f"/proc/{process}/status")
    deadline = time.monotonic() + _SECONDS
    while "TracerPid:\t0\n" in status.read_text():
        assert tracer.poll() is None and time.monotonic() < deadline, "strace did not attach"
        time.sleep(0.001)
