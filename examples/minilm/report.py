"""Output of the demo: steps, and claims that are true or false."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

try:
    from rich.console import Console
except ModuleNotFoundError:
    Console = None  # type: ignore[assignment,misc]  # plain text then


@dataclass(slots=True)
class Report:
    """Prints to stdout, and records false claims.

    Attributes:
        failed: the false claims.
        brief: explanations and tables are not printed.
    """

    failed: list[str] = field(default_factory=list)
    brief: bool = False
    _steps: int = 0
    _claims: int = 0
    _began: float = field(default_factory=time.monotonic)

    def chapter(self, title: str) -> None:
        """Begin a part of the demo."""
        _print(f"\n{title}\n{'=' * len(title)}", "bold")

    def step(self, title: str) -> None:
        """Begin a step of the demo."""
        self._steps += 1
        _print(f"\n{self._steps}. {title}", "bold cyan")

    def say(self, text: str) -> None:
        """Print an explanation."""
        if self.brief:
            return
        for line in text.splitlines():
            _print(f"   {line}")

    def claim(self, text: str, holds: bool) -> None:
        """Print a claim, and record it if it is false."""
        self._claims += 1
        if holds:
            _print(f"   ✓ {text}", "green")
        else:
            _print(f"   ✗ {text}", "bold red")
            self.failed.append(text)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print two columns."""
        if self.brief:
            return
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            _print(f"   {name.ljust(width)}  {value}")

    def finish(self) -> int:
        """Print the result. Return the exit code."""
        seconds = time.monotonic() - self._began
        if self.failed:
            _print(f"\n{len(self.failed)} of {self._claims} claims do not hold ({seconds:.0f} s).", "bold red")
            return 1
        _print(f"\nAll {self._claims} claims hold ({seconds:.0f} s).", "bold green")
        return 0


def _print(text: str, style: str = "") -> None:
    if Console is None:
        print(text, flush=True)
    else:
        Console(highlight=False, markup=False).print(text, style=style, soft_wrap=True)
