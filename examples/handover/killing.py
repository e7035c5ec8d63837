"""Killing a trainer in the middle of a save: when it has begun to write a step, and has not committed it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Killed", "hidden_directories", "train_and_kill"]


@dataclass(frozen=True, slots=True)
class Killed:
    """What is known of a trainer that was killed.

    Attributes:
        losses: of each step that it did, from the first.
        leftover: the hidden directory that it was writing.
        step: the step that was to become.
        nbytes: what it had written of it, in bytes.
    """

    losses: list[float]
    leftover: str
    step: int
    nbytes: int


def hidden_directories(directory: Path) -> list[str]:
    """The directories of saves that are under way, or were when they died."""
    return sorted(path.name for path in directory.glob(".[0-9]*.ckptcore"))


def train_and_kill(directory: Path, after: int) -> Killed:
    """Train with PyTorch in a process of its own, and send it SIGKILL in the middle of the first save after a step.

    Chance decides nothing: when a save has begun the process is frozen, looked at, and killed only if the save is under
    way then. Otherwise it goes on to the next save.

    Raises:
        RuntimeError: if no save could be caught.
    """
    command = [sys.executable, "-m", "examples.handover.in_torch", str(directory)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            while trainer.poll() is None:
                if not any(_step(name) > after for name in hidden_directories(directory)):
                    continue
                trainer.send_signal(signal.SIGSTOP)
                _, status = os.waitpid(trainer.pid, os.WUNTRACED)  # when this returns it stands still, or has ended
                caught = hidden_directories(directory)
                if os.WIFSTOPPED(status) and caught:
                    trainer.kill()
                    assert trainer.stdout is not None
                    losses = [float(line.split()[1]) for line in trainer.stdout.read().splitlines()]
                    written = sum(path.stat().st_size for path in (directory / caught[0]).rglob("*") if path.is_file())
                    return Killed(losses, caught[0], _step(caught[0]), written)
                trainer.send_signal(signal.SIGCONT)
        finally:
            trainer.kill()
    raise RuntimeError("the trainer came to its end, or failed, before a save could be caught; see what it printed")


def _step(name: str) -> int:
    """Of which step a hidden directory is."""
    return int(name.split(".")[1])
