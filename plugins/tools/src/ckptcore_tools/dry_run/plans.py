"""Save plans: the objects, requests and memory of a save, as predicted by a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore_tools.formatting import format_size

Certainty: TypeAlias = Literal["exact", "at most", "about"]
"""Precision of a predicted size: exact, an upper bound, or an estimate."""


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """An object (file) that a save would write.

    Attributes:
        key: the key within the checkpoint. Keys that contain the save id, or a hash of it, differ in the actual save.
        nbytes: the size in bytes.
        certainty: how exact the size is. ``at most``: the content is compressed, and the object may even be omitted.
            ``about``: metadata, such as an index or the root. Its size can depend on the time and duration of the save,
            and on the names of objects. The root can differ by some kilobytes.
    """

    key: str
    nbytes: int
    certainty: Certainty


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests of one process to the storage.

    Attributes:
        puts: small objects that are written with one request, including the claim and the root.
        writes: objects that are written in parts. The number of requests for each depends on the storage; see
            `SavePlan.parts`.
        reads: reads of objects and of their sizes, such as checks of the claim and of existing objects.
        lists: listings of directories.
        deletes: deletions.
        directories: locks, syncs, renames and exchanges of directories. Zero for object stores.
    """

    puts: int = 0
    writes: int = 0
    reads: int = 0
    lists: int = 0
    deletes: int = 0
    directories: int = 0

    @property
    def total(self) -> int:
        """Number of all requests."""
        return self.puts + self.writes + self.reads + self.lists + self.deletes + self.directories


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """The part of a checkpoint that one process would write.

    Attributes:
        rank: the rank of the process.
        array_bytes: bytes of the elements in host memory.
        boxes: number of boxes.
        objects: the objects, sorted by key. Those of the leader include the root.
        requests: the requests to the storage.
    """

    rank: int
    array_bytes: int
    boxes: int
    objects: Sequence[ObjectPlan]
    requests: RequestCounts

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum([planned.nbytes for planned in self.objects])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The host memory that a save and its exports need in one process, in addition to the state. In bytes.

    Attributes:
        rank: the rank of the process.
        viewed: total bytes that a blocking save transfers from devices to the host.
        copied: total bytes that an asynchronous save copies to host memory.
        blocking_peak: peak memory of a blocking save.
        async_peak: peak memory of an asynchronous save, with the limits of the Context's `MemoryOptions`.
    """

    rank: int
    viewed: int
    copied: int
    blocking_peak: int
    async_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """The plan of an export.

    Attributes:
        location: the location as given.
        layout: the name of the layout.
        processes: the plan of each process, by rank.
    """

    location: str
    layout: str
    processes: Sequence[ProcessPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The plan of a save. ``print`` shows it as a table.

    Attributes:
        layout: the name of the layout.
        storage: the kind of storage that requests were counted for: ``directories`` (a file system) or ``objects`` (an
            object store).
        arrays: number of arrays. Tied arrays count once.
        values: number of small values, which are stored in the root.
        array_bytes: bytes of all arrays in host memory. Tied arrays and replicas count once.
        processes: the plan of each process, by rank.
        memory: the host memory of each process, by rank.
        exports: the plans of the exports.
        unplanned: checkpointables that write their own files, whose sizes are unknown. They are not counted.
    """

    layout: str
    storage: Literal["directories", "objects"]
    arrays: int
    values: int
    array_bytes: int
    processes: Sequence[ProcessPlan]
    memory: Sequence[MemoryPlan]
    exports: Sequence[ExportPlan] = ()
    unplanned: Sequence[str] = ()

    @property
    def objects(self) -> int:
        """Number of objects of the checkpoint, without exports."""
        return sum([len(process.objects) for process in self.processes])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects of the checkpoint, without exports."""
        return sum([process.stored_bytes for process in self.processes])

    @property
    def requests(self) -> int:
        """Number of requests of all processes, without exports."""
        return sum([process.requests.total for process in self.processes])

    @property
    def largest(self) -> ProcessPlan:
        """The process that writes the most bytes of arrays. It determines how long the save takes."""
        return max(self.processes, key=lambda process: process.array_bytes)

    @property
    def imbalance(self) -> float:
        """Bytes that the largest process writes, divided by the average. 1.0 if balanced, or if nothing is written."""
        written = sum([process.array_bytes for process in self.processes])
        return self.largest.array_bytes * len(self.processes) / written if written else 1.0

    def parts(self, part_bytes: int) -> int:
        """Return the number of parts that all processes upload, without exports, if a part has `part_bytes` bytes.

        An object of at most one part counts as one part, including the objects of `RequestCounts.puts`.
        """
        if part_bytes < 1:
            raise ValueError(f"parts({part_bytes}): expected at least 1 byte")
        sizes = [planned.nbytes for process in self.processes for planned in process.objects]
        return sum([max(1, -(-nbytes // part_bytes)) for nbytes in sizes])

    def __str__(self) -> str:
        """Return a table with a line for each of up to 16 processes, including the largest."""
        summary = (
            f"{self.layout}: {self.arrays} arrays of {format_size(self.array_bytes)}, {self.values} values; "
            f"{len(self.processes)} processes write {self.objects} objects of {format_size(self.stored_bytes)} in "
            f"{self.requests} requests to a storage of {self.storage}; the largest process writes "
            f"{self.imbalance:.2f} times the average"
        )
        lines = [summary, *_table([_row(process, memory) for process, memory in self._shown()])]
        hidden = len(self.processes) - _MAX_ROWS
        if hidden > 0:
            lines.append(f"and {hidden} more processes")
        for export in self.exports:
            stored = sum([process.stored_bytes for process in export.processes])
            count = sum([len(process.objects) for process in export.processes])
            lines.append(f"export to {export.location}: {export.layout}, {count} objects of {format_size(stored)}")
        if self.unplanned:
            lines.append(f"not counted, because they write their own files: {', '.join(self.unplanned)}")
        return "\n".join(lines)

    def _shown(self) -> list[tuple[ProcessPlan, MemoryPlan]]:
        rows = list(zip(self.processes, self.memory, strict=True))
        if len(rows) <= _MAX_ROWS:
            return rows
        first = rows[:_MAX_ROWS]
        largest = self.largest.rank
        return first if largest < _MAX_ROWS else [*first[:-1], rows[largest]]


_MAX_ROWS: Final = 16
_HEADINGS: Final = ("rank", "arrays", "objects", "stored", "requests", "copied", "peak of save", "peak of save_async")


def _row(process: ProcessPlan, memory: MemoryPlan) -> tuple[str, ...]:
    certainties = {planned.certainty for planned in process.objects}
    bound = "<=" if "at most" in certainties else ""
    return (
        str(process.rank),
        format_size(process.array_bytes),
        str(len(process.objects)),
        bound + format_size(process.stored_bytes),
        str(process.requests.total),
        format_size(memory.copied),
        format_size(memory.blocking_peak),
        format_size(memory.async_peak),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    return [
        "  ".join([text.rjust(width) for text, width in zip(row, widths, strict=True)]) for row in (_HEADINGS, *rows)
    ]
