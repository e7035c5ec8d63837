"""A warm program: a child process that has imported what tasks need, and forks a child of its own for each task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_SECONDS: Final = 120.0


class WarmProgram:
    """A test module that runs as a program, reads lines and answers with numbers, until the end of the block."""

    def __init__(self, module: str) -> None:
        """Start it.

        Args:
            module: its whole name.
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
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> int:
        """Wait for a number of it."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self) -> int:
        """Wait for the child that does the task; its exit status, negative for a signal."""
        return self.hear()
