"""Training runs as processes. A test starts them, watches their output, and kills them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SECONDS: Final = 120.0
_EARLY: Final = (
    "ckptcore.training.checkpointer",
    "ckptcore.loading.composites",
    "ckptcore.saving.save",
    "ckptcore.handlers",
)


class Run:
    """A training process."""

    def __init__(self, trainer: Trainer, process: int, output: Path) -> None:
        self._trainer = trainer
        self._output = output
        self._status: int | None = None
        self.process = process

    def lines(self) -> list[str]:
        """Return the complete lines that were printed so far."""
        return [line for line in self._output.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def errors(self) -> str:
        """Return the output to stderr so far."""
        return Path(f"{self._output}.err").read_text()

    def has_ended(self) -> bool:
        """Return True if the process has ended. The process may still be a zombie."""
        if self._status is not None:
            return True
        state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX"

    def wait_for(self, text: str, count: int) -> bool:
        """Wait until the process has printed `count` lines with a text. Return False if it ends first."""
        deadline = time.monotonic() + _SECONDS
        while sum(text in line for line in self.lines()) < count:
            if self.has_ended():
                return False
            assert time.monotonic() < deadline, f"no progress; it printed {self.lines()[-5:]}, {self.errors()}"
            time.sleep(0.0005)
        return True

    def kill(self) -> bool:
        """Kill the process with SIGKILL. Return False if it had already ended. Assert that it did not fail."""
        os.kill(self.process, signal.SIGKILL)
        status = self.wait()
        assert status in (0, -signal.SIGKILL), f"it had ended with {status}: {self.errors()}"
        return status != 0

    def wait(self) -> int:
        """Wait for the end. Return the exit status, negative for a signal."""
        if self._status is None:
            self._status = self._trainer.ask({"wait": self.process})
        return self._status

    def finish(self) -> list[str]:
        """Wait for a successful end. Return all printed lines."""
        assert self.wait() == 0, self.errors()
        return self.lines()


class Trainer:
    """A program that has imported everything, and forks runs."""

    def __init__(self, module: str, directory: Path, early: Sequence[str] = ()) -> None:
        """Start the program.

        Args:
            module: the module of the trainer. Its ``main`` takes a list of arguments.
            early: modules to import before the first run.
            directory: a directory for the output of runs.
        """
        self._directory = directory
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.resume.warm", module, *_EARLY, *early],
            # One device and one thread, so that results do not depend on the machine.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def ask(self, order: object) -> int:
        """Send an order, and return the answer, a number."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, *arguments: object) -> Run:
        """Start a run."""
        self._runs += 1
        output = self._directory / f"{self._runs}.out"
        Path(f"{output}.err").touch()
        output.touch()
        process = self.ask({"arguments": [str(argument) for argument in arguments], "output": str(output)})
        return Run(self, process, output)

    def start_and_kill(self, chance: random.Random, text: str, arguments: Sequence[object]) -> tuple[Run, bool]:
        """Start a run and kill it at a random moment. Return the run, and True if the kill ended it.

        The moment is shortly after the run has printed some lines with the text. Sometimes it is soon after the start.
        """
        run = self.start(*arguments)
        if chance.random() < 0.2:
            time.sleep(chance.expovariate(1 / 0.2))
        else:
            run.wait_for(text, chance.randint(1, 12))
            time.sleep(chance.uniform(0, 0.03))
        return run, run.kill()

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_SECONDS)
        self._process.stdout.close()


@contextmanager
def trainer(module: str, directory: Path, early: Sequence[str] = ()) -> Iterator[Trainer]:
    """Run a program that starts runs of a trainer, until the end of the context."""
    running = Trainer(module, directory, early)
    try:
        yield running
    finally:
        running.close()
