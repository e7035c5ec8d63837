"""A save that is killed after it began to write and before it committed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ckptcore

_BYTES = 1 << 29
_ATTEMPTS = 20


def kill_save_halfway(location: Path, save_earlier: Callable[[], None]) -> str:
    """Start a process that overwrites the checkpoint at a location with a larger state, and kill it during the save.

    Once the process has written an eighth of the state, it is stopped. If the checkpoint at the location is still the
    earlier one, the process is killed with SIGKILL. If its save has committed, everything is repeated.

    Args:
        location: the location of both checkpoints.
        save_earlier: saves the checkpoint that must survive.

    Returns:
        A description of the files that the killed save left.
    """
    for _ in range(_ATTEMPTS):
        save_earlier()
        earlier = ckptcore.metadata(location).save_id
        saver = subprocess.Popen([sys.executable, "-m", __name__, str(location)], cwd=Path(__file__).parents[2])
        try:
            while saver.poll() is None:
                if _bytes_written(location) < _BYTES // 8:
                    continue
                saver.send_signal(signal.SIGSTOP)
                _, status = os.waitpid(saver.pid, os.WUNTRACED)  # after this call it is stopped, or has ended
                if os.WIFSTOPPED(status) and ckptcore.metadata(location).save_id == earlier:
                    left = ", ".join(leftovers(location))
                    return f"{left} with {_bytes_written(location) / 1e6:.0f} of {_BYTES / 1e6:.0f} MB"
                break
        finally:
            saver.kill()
            saver.wait()
    raise RuntimeError(f"no save could be caught half-way in {_ATTEMPTS} attempts")


def leftovers(location: Path) -> list[str]:
    """Return the hidden directories of saves to a location that are running or were killed."""
    return [path.name for path in location.parent.glob(f".{location.name}.*.ckptcore")]


def _bytes_written(location: Path) -> int:
    total = 0
    for name in leftovers(location):
        for path in (location.parent / name).glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may disappear meanwhile
                total += _bytes_with_data(file.fileno())
    return total


def _bytes_with_data(file: int) -> int:
    """Return the bytes of a file that were written. Reserved space is a hole in the file."""
    total = end = 0
    with contextlib.suppress(OSError):  # ENXIO: no data behind this offset
        while True:
            start = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, start, os.SEEK_HOLE)
            total += end - start
    return total


if __name__ == "__main__":  # the process that is killed
    blocks = {f"block_{number}": np.full(1 << 18, number, np.float32) for number in range(_BYTES >> 20)}
    ckptcore.save(sys.argv[1], blocks, overwrite=True)
