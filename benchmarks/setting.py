"""The setting of a run: the directory, the number of rounds, and the scale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a run that every benchmark receives.

    Attributes:
        directory: an empty directory of this benchmark, on the file system that is measured.
        rounds: timed rounds of each case.
        scale: share of the full size. Tests use a small one.
    """

    directory: Path
    rounds: int = 7
    scale: float = 1.0

    def count(self, full: int, least: int = 1) -> int:
        """Scale a number of things or bytes."""
        return max(least, round(full * self.scale))

    def side(self, full: int, multiple: int = 64) -> int:
        """Scale the side of a square matrix so that its bytes are scaled; return a multiple of `multiple`."""
        return max(1, int(full * self.scale**0.5) // multiple) * multiple
