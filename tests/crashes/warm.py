"""A warm program: a child process that has imported the modules of its tasks, and forks a child for each task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_SECONDS: Final = 120.0


class WarmProgram:
    """A test module that runs as a program until the end of the block. It reads lines, and answers with numbers."""

    def __init__(self, module: str) -> None:
        """Start the program.

        Args:
            module: the full name of the module.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_SECONDS)
        self._process.stdout.close()

    def say(self, line: str) -> None:
        """Write a line to the program."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> int:
        """Wait for a number from the program."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self) -> int:
        """Wait for the child with the task. Return its exit status, which is negative for a signal."""
        return self.hear()
