"""Stacks of all threads of a process, also if it holds the lock of its interpreter: faulthandler, and py-spy."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

DUMP_SIGNAL: Final[int] = signal.SIGRTMIN + 7
"""The signal at which a process writes its stacks. Launchers and trainers use SIGUSR1 and SIGUSR2."""

_MAX_BYTES: Final = 4 << 20
_POLL_SECONDS: Final = 0.05
_DUMP_SECONDS: Final = 5.0
_PY_SPY_SECONDS: Final = 20.0
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)\b", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


def write_stacks_on_signal() -> int:
    """Make this process write its stacks at `DUMP_SIGNAL`, into a file in memory. Return its descriptor.

    Raises:
        RuntimeError: the signal has a handler already.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if caught is not None and int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1:
        raise RuntimeError(
            f"the signal {DUMP_SIGNAL} (SIGRTMIN + 7), at which a watched process writes its stacks, has a handler "
            "already: this process has another Watchdog; close it first"
        )
    descriptor = os.memfd_create("ckptcore-stacks")
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def no_stacks_on_signal(descriptor: int) -> None:
    """Undo `write_stacks_on_signal`. From now on, the signal would end the process."""
    faulthandler.unregister(DUMP_SIGNAL)
    os.close(descriptor)


def dump_by_signal(send: Callable[[int], None], descriptor: int) -> str:
    """Make the process write its stacks, and return them; empty if it writes nothing, because it is stopped.

    Args:
        send: sends a signal to the process.
        descriptor: the file of `write_stacks_on_signal`.
    """
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    send(DUMP_SIGNAL)
    size, before = 0, -1
    deadline = time.monotonic() + _DUMP_SECONDS
    while (size == 0 or size != before) and time.monotonic() < deadline:
        before = size
        time.sleep(_POLL_SECONDS)
        size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace")


def dump_by_py_spy(pid: int) -> str | None:
    """Return the stacks that py-spy finds, or the reason why it finds none. None if it is not installed.

    The process is not paused: its stacks do not change while it is stalled.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PY_SPY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed: {error}"
    return answer.stdout[:_MAX_BYTES] if answer.returncode == 0 else f"py-spy failed: {answer.stderr.strip()[:2000]}"


def frames_of(stacks: str, thread: int) -> Sequence[str]:
    """Return the frames of a thread in a dump of faulthandler, innermost first, as ``path:line in function``.

    Args:
        stacks: the dump.
        thread: the thread, as of `threading.get_ident`.
    """
    headers = list(_THREAD.finditer(stacks))
    for number, header in enumerate(headers):
        if int(header[1], 16) == thread:
            end = headers[number + 1].start() if number + 1 < len(headers) else len(stacks)
            return [
                f"{path}:{line} in {function}" for path, line, function in _FRAME.findall(stacks, header.end(), end)
            ]
    return []
