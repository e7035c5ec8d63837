"""A save that is killed half-way: at a moment when it has begun to write and has not committed."""

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

__all__ = ["kill_save_halfway", "leftovers"]

_BYTES = 1 << 29
_ATTEMPTS = 20


def kill_save_halfway(location: Path, save_earlier: Callable[[], None]) -> str:
    """Start a process that saves a larger state over the checkpoint at a location, and kill it in the middle.

    Chance decides nothing: once the process has written an eighth of it, it is frozen and looked at. If the checkpoint
    at the location is still the earlier one, it is killed with SIGKILL; if its save was done already, all begins anew.

    Args:
        location: where both save.
        save_earlier: saves the checkpoint that must survive.

    Returns:
        What is left beside the earlier checkpoint, for a person.
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
                _, status = os.waitpid(saver.pid, os.WUNTRACED)  # when this returns it stands still, or has ended
                if os.WIFSTOPPED(status) and ckptcore.metadata(location).save_id == earlier:
                    left = ", ".join(leftovers(location))
                    return f"{left} with {_bytes_written(location) / 1e6:.0f} of {_BYTES / 1e6:.0f} MB"
                break
        finally:
            saver.kill()
            saver.wait()
    raise RuntimeError(f"no save could be caught half-way in {_ATTEMPTS} attempts")


def leftovers(location: Path) -> list[str]:
    """The hidden directories beside a checkpoint in which saves to it are under way, or were when they died."""
    return [path.name for path in location.parent.glob(f".{location.name}.*.ckptcore")]


def _bytes_written(location: Path) -> int:
    total = 0
    for name in leftovers(location):
        for path in (location.parent / name).glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may vanish while we look
                total += _bytes_with_data(file.fileno())
    return total


def _bytes_with_data(file: int) -> int:
    """Bytes of a file that were written; space that is only reserved is a hole in it."""
    total = end = 0
    with contextlib.suppress(OSError):  # ENXIO: no data behind this offset
        while True:
            start = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, start, os.SEEK_HOLE)
            total += end - start
    return total


if __name__ == "__main__":  # the process that gets killed
    blocks = {f"block_{number}": np.full(1 << 18, number, np.float32) for number in range(_BYTES >> 20)}
    ckptcore.save(sys.argv[1], blocks, overwrite=True)
