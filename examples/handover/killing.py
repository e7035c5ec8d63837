"""Kill a trainer in the middle of a save: after it began to write a step, and before it committed it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Killed:
    """The state of a trainer when it was killed.

    Attributes:
        losses: the loss of each step, from the first.
        leftover: the hidden directory that it was writing.
        step: the step that it was saving.
        nbytes: bytes that it had written.
    """

    losses: list[float]
    leftover: str
    step: int
    nbytes: int


def hidden_directories(directory: Path) -> list[str]:
    """Return the hidden directories of saves that are running or were killed."""
    return sorted(path.name for path in directory.glob(".[0-9]*.ckptcore"))


def train_and_kill(directory: Path, after: int) -> Killed:
    """Train with PyTorch in a new process, and kill it with SIGKILL in the middle of the first save after a step.

    Once a save has begun, the process is stopped. It is killed only if the save is still running. Otherwise it
    continues until the next save.

    Raises:
        RuntimeError: every save ended too early.
    """
    command = [sys.executable, "-m", "examples.handover.in_torch", str(directory)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            while trainer.poll() is None:
                if not any(_step(name) > after for name in hidden_directories(directory)):
                    time.sleep(0.0005)  # leaves the processor to the trainer
                    continue
                trainer.send_signal(signal.SIGSTOP)
                _, status = os.waitpid(trainer.pid, os.WUNTRACED)  # after this call it is stopped, or has ended
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
    """Return the step of a hidden directory."""
    return int(name.split(".")[1])
