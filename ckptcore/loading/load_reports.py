"""Load reports: what a load did with each leaf, and what it read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from ckptcore.loading.matching_options import Casting, ShapeChange
from ckptcore.model.arrays import ArraySpec

__all__ = ["LeafChange", "LoadReport"]

_TOLD: Final = 10
"""How many paths of each kind the text of a report has."""


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What a load did with an array that was asked for otherwise than it is stored.

    Attributes:
        stored: what is stored.
        made: what was made of it.
        cast: ``"safe"`` or ``"narrowing"``; ``"error"`` where it was not cast.
        shapes: what was done with its shape.
        pad_value: what it was padded with; None where it was not.
    """

    stored: ArraySpec
    made: ArraySpec
    cast: Casting = "error"
    shapes: frozenset[ShapeChange] = frozenset()
    pad_value: bool | int | float | complex | None = None

    def __str__(self) -> str:
        done: list[str] = [*([f"{self.cast} cast"] if self.cast != "error" else []), *sorted(self.shapes)]
        if self.pad_value is not None:
            done[done.index("pad")] = f"pad with {self.pad_value!r}"
        return f"{self.stored} -> {self.made} ({', '.join(done)})"


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """What a load did. The caller makes one and gives it to the load, which fills it when it is done; one that fails leaves it alone.

    Paths are as errors write them, ``params/layers[0].w``. Each leaf that is asked for is in one of `restored`, `changed`,
    `defaulted` and `skipped`.

    Attributes:
        restored: the paths of leaves that were loaded as they are stored; the paths are those in the result.
        changed: those of arrays that were cast, reshaped, truncated or padded, with what was done.
        defaulted: those of leaves that are not stored, and have the value that ``Matching(missing=...)`` says.
        skipped: those of placeholders in the abstract tree.
        ignored: the paths of stored leaves that were not asked for, as they are in the checkpoint, or as transforms name them. What transforms
            drop is in none of these.
        bytes_read: bytes that this process asked of the storage once it knew what the checkpoint holds: whole blocks, compressed
            chunks and what tells where they are included.
    """

    restored: Sequence[str] = ()
    changed: Mapping[str, LeafChange] = field(default_factory=dict)
    defaulted: Sequence[str] = ()
    skipped: Sequence[str] = ()
    ignored: Sequence[str] = ()
    bytes_read: int = 0

    def take(self, other: LoadReport) -> None:
        """Say what another report says."""
        for own in fields(self):
            setattr(self, own.name, getattr(other, own.name))

    def __str__(self) -> str:
        """A line for each kind of thing that was done, with the first few paths."""
        lines = [f"{len(self.restored)} leaves restored, {self.bytes_read} bytes read"]
        changed = [f"{path}: {change}" for path, change in self.changed.items()]
        if changed:
            lines.append(f"changed: {_some(changed)}")
        for what in ("defaulted", "skipped", "ignored"):
            paths: Sequence[str] = getattr(self, what)
            if paths:
                lines.append(f"{what}: {_some(paths)}")
        return "\n".join(lines)


def _some(told: Sequence[str]) -> str:
    return ", ".join(told[:_TOLD]) + (f" and {len(told) - _TOLD} more" if len(told) > _TOLD else "")
