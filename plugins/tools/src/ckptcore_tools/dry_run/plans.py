"""Save plans: what a save would write, ask of the storage and hold in memory, as a dry run tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore_tools.amounts import size

__all__ = ["Certainty", "ExportPlan", "MemoryPlan", "ObjectPlan", "ProcessPlan", "RequestCounts", "SavePlan"]

Certainty: TypeAlias = Literal["exact", "at most", "about"]
"""What is known of a size: the size itself, the largest possible one, or one that may be a little off."""


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """An object (file) that a save would write.

    Attributes:
        key: its name within the checkpoint. Names that hold the id of a save, or a hash of it, are others in the save
            itself.
        nbytes: its size in bytes.
        certainty: how exact that is. ``at most``: the content is compressed, and the object may not be written at all.
            ``about``: it describes the checkpoint, as an index or the root does: its size may depend on the time
            and the duration of the save, and on names of objects. The root may be some kilobytes off.
    """

    key: str
    nbytes: int
    certainty: Certainty


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Calls that a storage would get from one process.

    Attributes:
        puts: small objects written whole, the claim and the root among them.
        writes: objects written in pieces: how many requests one takes is the storage's; see `SavePlan.parts`.
        looks: objects read or asked for: whether the claim still stands, whether something is there.
        lists: directories listed.
        deletes: deletions.
        directories: directories locked, synced, renamed or exchanged; none where the storage has no real directories.
    """

    puts: int = 0
    writes: int = 0
    looks: int = 0
    lists: int = 0
    deletes: int = 0
    directories: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.puts + self.writes + self.looks + self.lists + self.deletes + self.directories


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """What one process would write of a checkpoint.

    Attributes:
        rank: the process.
        array_bytes: elements that it writes, in bytes of host memory.
        boxes: how many boxes of arrays these are.
        objects: what it writes, by key; those of the leader include the root.
        requests: what it asks of the storage.
    """

    rank: int
    array_bytes: int
    boxes: int
    objects: Sequence[ObjectPlan]
    requests: RequestCounts

    @property
    def stored_bytes(self) -> int:
        """Bytes of its objects."""
        return sum([planned.nbytes for planned in self.objects])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The host memory that a save would take in one process, beside the state itself, its exports included. In bytes.

    Attributes:
        rank: the process.
        viewed: what a save that blocks brings to the host, in all: arrays on devices.
        copied: what an asynchronous save copies in host memory or to it, in all.
        blocking_peak: the most that a save that blocks holds at a time.
        async_peak: the most that an asynchronous save holds at a time, within the bound of the Context's
            `MemoryOptions`.
    """

    rank: int
    viewed: int
    copied: int
    blocking_peak: int
    async_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """A further checkpoint of a save, as it would be written.

    Attributes:
        location: where to, as it was given.
        layout: the name of its layout.
        processes: what each process writes, by rank.
    """

    location: str
    layout: str
    processes: Sequence[ProcessPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What a save would do. ``print`` shows it as a table.

    Attributes:
        layout: the name of the layout.
        storage: what requests were counted for: a storage with real ``directories``, or one of ``objects``.
        arrays: how many arrays there are; tied ones count once.
        values: how many small values there are, which live in the root.
        array_bytes: all arrays, in bytes of host memory; tied ones, and those that several processes hold, count once.
        processes: what each process writes, by rank.
        memory: the host memory that the save takes, by rank.
        exports: the further checkpoints.
        untold: checkpointables that write files of their own, of which nothing is known before they do. They are not
            counted.
    """

    layout: str
    storage: Literal["directories", "objects"]
    arrays: int
    values: int
    array_bytes: int
    processes: Sequence[ProcessPlan]
    memory: Sequence[MemoryPlan]
    exports: Sequence[ExportPlan] = ()
    untold: Sequence[str] = ()

    @property
    def objects(self) -> int:
        """How many objects the checkpoint has, without those of exports."""
        return sum([len(process.objects) for process in self.processes])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects of the checkpoint, without those of exports."""
        return sum([process.stored_bytes for process in self.processes])

    @property
    def requests(self) -> int:
        """Calls that the storage gets from all processes, without those of exports."""
        return sum([process.requests.total for process in self.processes])

    @property
    def largest(self) -> ProcessPlan:
        """The process that writes the most bytes of arrays; the save takes as long as it does."""
        return max(self.processes, key=lambda process: process.array_bytes)

    @property
    def imbalance(self) -> float:
        """How many times the average the largest process writes: 1.0 is balanced; also where nothing is written."""
        written = sum([process.array_bytes for process in self.processes])
        return self.largest.array_bytes * len(self.processes) / written if written else 1.0

    def parts(self, part_bytes: int) -> int:
        """Uploads of parts that all processes make, where the storage takes objects written in pieces as parts of this size.

        Objects of up to one part count as one. Those that are put whole are `RequestCounts.puts`, and count here too.
        """
        if part_bytes < 1:
            raise ValueError(f"parts({part_bytes}): give at least 1 byte")
        sizes = [planned.nbytes for process in self.processes for planned in process.objects]
        return sum([max(1, -(-nbytes // part_bytes)) for nbytes in sizes])

    def __str__(self) -> str:
        """A table: a line for each process, up to 16 of them, the largest among these."""
        summary = (
            f"{self.layout}: {self.arrays} arrays of {size(self.array_bytes)}, {self.values} values; "
            f"{len(self.processes)} processes write {self.objects} objects of {size(self.stored_bytes)} in "
            f"{self.requests} requests to a storage of {self.storage}; the largest writes {self.imbalance:.2f} times "
            "the average"
        )
        lines = [summary, *_table([_row(process, memory) for process, memory in self._shown()])]
        hidden = len(self.processes) - _SHOWN
        if hidden > 0:
            lines.append(f"and {hidden} more processes")
        for export in self.exports:
            stored = sum([process.stored_bytes for process in export.processes])
            count = sum([len(process.objects) for process in export.processes])
            lines.append(f"export to {export.location}: {export.layout}, {count} objects of {size(stored)}")
        if self.untold:
            lines.append(f"not counted, because they write files of their own: {', '.join(self.untold)}")
        return "\n".join(lines)

    def _shown(self) -> list[tuple[ProcessPlan, MemoryPlan]]:
        rows = list(zip(self.processes, self.memory, strict=True))
        if len(rows) <= _SHOWN:
            return rows
        first = rows[:_SHOWN]
        largest = self.largest.rank
        return first if largest < _SHOWN else [*first[:-1], rows[largest]]


_SHOWN: Final = 16
_HEADINGS: Final = ("rank", "arrays", "objects", "stored", "requests", "copied", "peak of save", "peak of save_async")


def _row(process: ProcessPlan, memory: MemoryPlan) -> tuple[str, ...]:
    certainties = {planned.certainty for planned in process.objects}
    bound = "<=" if "at most" in certainties else ""
    return (
        str(process.rank),
        size(process.array_bytes),
        str(len(process.objects)),
        bound + size(process.stored_bytes),
        str(process.requests.total),
        size(memory.copied),
        size(memory.blocking_peak),
        size(memory.async_peak),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    return [
        "  ".join([text.rjust(width) for text, width in zip(row, widths, strict=True)]) for row in (_HEADINGS, *rows)
    ]
