"""Stages: what the workers of a single controller run to write a part of a save, and to read boxes of a checkpoint.

Stages and their reports are pickled. They contain no arrays, threads or open storages. A stage raises nothing: its
report has the error. Imports no JAX.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckptcore.commit.location import Location, LocationAddress, open_address
from ckptcore.commit.root import Claimed
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import read_mark
from ckptcore.context import Context, IOOptions
from ckptcore.errors import CheckpointError, CorruptCheckpointError, RankFailedError
from ckptcore.io.memory import allocate
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.job.visibility import expect_claim
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.derived import Derived, derive
from ckptcore.loading.opening import open_tree
from ckptcore.loading.reading import unread
from ckptcore.model import JSON, ArrayRecord, ArraySpec, Box, HostArray, Receipt, TreeMetadata, WritePlan
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray, Layout
from ckptcore.runtime import runtime_of

__all__ = [
    "ReadBoxes",
    "ReadStage",
    "ReadsOf",
    "Recipe",
    "WorkerOptions",
    "WorkerPart",
    "WriteParts",
    "WriteStage",
    "read_report",
]

WriteStage: TypeAlias = Callable[[Sequence[Sequence[HostArray]]], bytes]
"""Called at a worker with, for each leaf that it holds, the elements of its boxes. Returns the report. See `WriteParts`."""

ReadStage: TypeAlias = Callable[[], tuple[bytes, Sequence[Sequence[HostArray]]]]
"""Called at a worker. Returns the report and, for each leaf, the elements of its boxes. See `ReadBoxes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of a `Context` that workers use. Plugins are those that are installed at the worker.

    Attributes:
        durability, io, storage: see `Context`.
    """

    durability: Literal["full", "none"]
    io: IOOptions
    storage: Mapping[str, Mapping[str, JSON]]

    @classmethod
    def of(cls, context: Context) -> WorkerOptions:
        """Return the options of the controller."""
        storage = {scheme: dict(options) for scheme, options in context.storage.items()}
        return cls(durability=context.durability, io=context.io, storage=storage)

    @property
    def context(self) -> Context:
        """Return a Context of this process with these options. It is cached, so that its threads are reused."""
        return _context(pickle.dumps(self))

    def open(self, address: LocationAddress, *, durable: bool = False) -> Location:
        """Open a location."""
        context = self.context
        return open_address(address, runtime_of(context).registry, durable=durable, config=context.storage)


@functools.lru_cache(maxsize=4)
def _context(options: bytes) -> Context:
    found: WorkerOptions = pickle.loads(options)
    return Context(durability=found.durability, io=found.io, storage=found.storage)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A part of a save, as a worker writes it.

    Attributes:
        directory: its directory within the checkpoint; empty if the part is the whole checkpoint.
        layout: stores it.
        plan: what the worker writes of it.
        held: for each item of the plan, the number of its leaf among those that the worker holds.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    held: tuple[int, ...]


class _WorkerSnapshot:
    """Arrays that an executor holds, and releases once all is written. See `ckptcore.protocols.Snapshot`."""

    def __init__(self, plan: WritePlan, arrays: Sequence[Sequence[HostArray]]) -> None:
        """Hold the arrays of each item of a plan."""
        self.plan = plan
        self._arrays = list(arrays)

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        return self._arrays[item]

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        self._arrays[item] = ()


@dataclass(frozen=True, slots=True)
class WriteParts:
    """Write what a worker holds into the location that the controller claimed. Reports the receipt of each part.

    Attributes:
        address: the location.
        claimed: the save.
        parts: what to write.
        options: options of the controller.
    """

    address: LocationAddress
    claimed: Claimed
    parts: tuple[WorkerPart, ...]
    options: WorkerOptions

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        """Write.

        Args:
            arrays: for each leaf that the worker holds, the elements of its boxes, with any strides. They do not
                change.

        Returns:
            The report.
        """
        try:
            return _done(self._write(arrays))
        except BaseException as error:  # noqa: BLE001  # raised at the controller
            return _failed(error)

    def _write(self, arrays: Sequence[Sequence[HostArray]]) -> Sequence[Receipt]:
        runtime = runtime_of(self.options.context)
        location = self.options.open(self.address, durable=self.options.durability == "full")
        expect_claim(self.claimed, location)
        store = location.commits.store_of(location, self.claimed.save_id, runtime.conditions)
        receipts = []
        for part in self.parts:
            inside = subdirectory(store, part.directory)
            recorder = ObjectRecorder(inside, runtime.io_threads, checksums=self.options.io.checksums)
            state = part.layout.write(_WorkerSnapshot(part.plan, [arrays[number] for number in part.held]), recorder)
            # The controller has the items: they are those of the plan.
            receipts.append(Receipt(part.plan.rank, (), state, recorder.objects))
        return receipts


@dataclass(frozen=True, slots=True)
class ReadsOf:
    """Boxes of an array.

    Attributes:
        leaf: its number in the tree that was saved.
        spec: the whole array.
        boxes: the boxes to read.
    """

    leaf: int
    spec: ArraySpec
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What derives the arrays of a checkpoint, for a worker that opens the checkpoints itself.

    Attributes:
        tree, derivations, values, most_bytes: see `ckptcore.loading.derived.Derived`.
        beside: the locations of the further checkpoints.
    """

    tree: TreeMetadata
    derivations: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    most_bytes: int
    beside: tuple[LocationAddress, ...]

    def make(self, opened: Checkpoint, open_beside: Callable[[LocationAddress], Checkpoint]) -> Checkpoint:
        """Return the derived checkpoint."""
        beside = [open_beside(address) for address in self.beside]
        return derive(
            opened, self.tree, self.derivations, values=self.values, beside=beside, most_bytes=self.most_bytes
        )

    @classmethod
    def all_of(cls, opened: Checkpoint) -> tuple[Recipe, ...]:
        """Return the recipes that derive a checkpoint from the stored one, in order."""
        if not isinstance(found := opened.derived, Derived) or found.is_builtin:
            return ()
        below, *beside = found.sources
        for other in beside:
            assert other.derived is None or other.derived.is_builtin  # further checkpoints are as they are stored
        addresses = tuple([other.location.to_open for other in beside])
        return (*cls.all_of(below), cls(found.tree, found.derivations, found.values, found.most_bytes, addresses))


@dataclass(frozen=True, slots=True)
class ReadBoxes:
    """Open the checkpoint that the controller has open, and read boxes of it. Reports nothing but errors.

    Attributes:
        address: the location of the checkpoint.
        save_id: the save that the controller found there; None if other software wrote it.
        reads: the boxes of each leaf.
        options: options of the controller.
        recipes: derive the arrays that are read from those that are stored, in order.
    """

    address: LocationAddress
    save_id: str | None
    reads: tuple[ReadsOf, ...]
    options: WorkerOptions
    recipes: tuple[Recipe, ...] = ()

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        """Read.

        Returns:
            The report, and for each leaf the elements of its boxes: C-contiguous, of the stored dtype, in memory of
            their own. No leaves after an error.
        """
        try:
            return _done(None), self._read()
        except BaseException as error:  # noqa: BLE001  # raised at the controller
            return _failed(error), ()

    def _read(self) -> Sequence[Sequence[HostArray]]:
        opened = self._open(self.address)
        found = None if opened.root is None else opened.root.save_id
        for recipe in self.recipes if found == self.save_id else ():
            opened = recipe.make(opened, self._open)
        for read in self.reads if found == self.save_id else ():
            record = opened.tree.leaves[read.leaf] if read.leaf < len(opened.tree.leaves) else None
            if not isinstance(record, ArrayRecord) or record.spec != read.spec:
                found = "another tree"
        if found != self.save_id:
            raise CorruptCheckpointError(
                f"{self.address.display} is not what the controller opened: expected the save {self.save_id}, found "
                f"{found}; it was replaced meanwhile, or this worker sees another storage"
            )
        arrays = [[allocate(ArraySpec(box.shape, read.spec.dtype)) for box in read.boxes] for read in self.reads]
        buffers = [array for of_leaf in arrays for array in of_leaf]
        owners = [read.leaf for read in self.reads for _ in read.boxes]
        plan = plan_read(opened.tree, [(read.leaf, read.boxes) for read in self.reads])
        filled = set(opened.read(plan, buffers))
        missing = next((leaf for number, leaf in enumerate(owners) if number not in filled), None)
        if missing is not None:
            raise unread(opened, missing)
        return arrays

    def _open(self, address: LocationAddress) -> Checkpoint:
        location = self.options.open(address)
        return open_tree(location, read_mark(location), self.options.context)


def _done(result: object) -> bytes:
    return pickle.dumps((None, result))


def _failed(error: BaseException) -> bytes:
    """Return the report of a stage that failed, with the error itself if it can be pickled."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, CheckpointError):
        try:
            data = pickle.dumps((told, error))
            pickle.loads(data)
        except Exception:  # noqa: BLE001  # an error of a plugin may contain anything; its text is reported instead
            return pickle.dumps((told, None))
        return data
    return pickle.dumps((told, None))


def read_report(report: bytes, worker: str) -> Any:
    """Return the result of a stage.

    Args:
        report: the report of the stage.
        worker: the name of the worker, for errors.

    Raises:
        CheckpointError: what the stage failed with; RankFailedError with its text for other errors.
    """
    told, result = pickle.loads(report)
    if told is None:
        return result
    if isinstance(result, CheckpointError):
        result.add_note(f"This was raised on the worker {worker}")
        raise result
    raise RankFailedError(f"the worker {worker} failed: {told}")
