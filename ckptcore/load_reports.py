"""Load reports: what a load did with each leaf, and what it read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["LoadReport"]

_TOLD = 10


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """What a load did. The caller makes one and gives it to the load, which fills it when it is done; one that fails leaves it alone.

    Paths are as errors write them, ``params/layers[0].w``. Each leaf that is asked for is in one of `restored`, `defaulted` and
    `skipped`.

    Attributes:
        restored: the paths of leaves that were loaded, as they are in the result.
        defaulted: those of leaves that are not stored, and have the value that ``Matching(missing=...)`` says.
        skipped: those of placeholders in the abstract tree.
        ignored: the paths of stored leaves that were not asked for, as they are in the checkpoint.
        bytes_read: bytes of arrays that this process asked of the storage, whole blocks and compressed chunks included.
    """

    restored: Sequence[str] = ()
    defaulted: Sequence[str] = ()
    skipped: Sequence[str] = ()
    ignored: Sequence[str] = ()
    bytes_read: int = 0

    def take(self, other: LoadReport) -> None:
        """Say what another report says."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))

    def __str__(self) -> str:
        """A line for each kind of thing that was done, with the first few paths."""
        lines = [f"{len(self.restored)} leaves restored, {self.bytes_read} bytes read"]
        for what in ("defaulted", "skipped", "ignored"):
            paths: Sequence[str] = getattr(self, what)
            if paths:
                more = f" and {len(paths) - _TOLD} more" if len(paths) > _TOLD else ""
                lines.append(f"{what}: {', '.join(paths[:_TOLD])}{more}")
        return "\n".join(lines)
