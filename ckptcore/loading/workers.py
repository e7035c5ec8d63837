"""Reads by the workers of a single controller."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckptcore.commit.location import LocationAddress, open_address
from ckptcore.commit.mark import read_mark
from ckptcore.commit.root import Claimed
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context, IOOptions
from ckptcore.errors import CheckpointError, CorruptCheckpointError, RankFailedError
from ckptcore.io.memory import allocate
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.snapshot import HeldSnapshot
from ckptcore.job.visibility import expect_claim
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.opening import open_tree
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Receipt, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import plan_read
from ckptcore.protocols import Executor, Layout, WantedLeaf
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.derived import Recipe

__all__ = [
    "ReadBoxes",
    "ReadsOf",
    "WantedAtWorkers",
    "WorkerOptions",
    "WorkerPart",
    "WriteParts",
    "fetch_leaves",
    "read_report",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of a `Context` that workers use, too. Workers use the plugins that are installed there.

    Attributes:
        durability, io, storage: as of a `Context`.
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
        """A Context of this process with these options; the same one each time, so that its threads are reused."""
        return _context(pickle.dumps(self))


@functools.lru_cache(maxsize=4)
def _context(options: bytes) -> Context:
    found: WorkerOptions = pickle.loads(options)
    return Context(durability=found.durability, io=found.io, storage=found.storage)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A part of a save, as a worker writes it.

    Attributes:
        directory: where it goes within the checkpoint; empty where it is the whole checkpoint.
        layout: how it is laid out.
        plan: what the worker writes of it.
        held: by item of the plan, the number of the leaf among those that the worker holds.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteParts:
    """Writes what a worker holds into the location that the controller claimed; reports receipts, one for each part.

    Attributes:
        address: of the checkpoint.
        claimed: the save.
        parts: what to write.
        options: of the controller.
    """

    address: LocationAddress
    claimed: Claimed
    parts: tuple[WorkerPart, ...]
    options: WorkerOptions

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        """See `ckptcore.protocols.WriteStage`."""
        try:
            return _done(self._write(arrays))
        except BaseException as error:  # noqa: BLE001  # raised at the controller
            return _failed(error)

    def _write(self, arrays: Sequence[Sequence[HostArray]]) -> Sequence[Receipt]:
        context = self.options.context
        durable = self.options.durability == "full"
        location = open_address(self.address, runtime_of(context).registry, durable=durable, config=context.storage)
        expect_claim(self.claimed, location)
        store = location.commits.store_of(location, self.claimed.save_id, runtime_of(context).conditions)
        receipts = []
        for part in self.parts:
            inside = subdirectory(store, part.directory)
            recorder = ObjectRecorder(inside, runtime_of(context).io_threads, checksums=self.options.io.checksums)
            state = part.layout.write(HeldSnapshot(part.plan, [arrays[number] for number in part.held]), recorder)
            # What was written is told by the plan, which the controller has.
            receipts.append(Receipt(part.plan.rank, (), state, recorder.objects))
        return receipts


@dataclass(frozen=True, slots=True)
class ReadsOf:
    """Boxes of an array.

    Attributes:
        leaf: its number in the tree that was saved.
        spec: the whole array.
        boxes: what is read of it.
    """

    leaf: int
    spec: ArraySpec
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class ReadBoxes:
    """Opens the checkpoint that the controller has open, and reads boxes of it; reports nothing but errors.

    Attributes:
        address: of the checkpoint.
        save_id: the save that the controller found there; None where other software wrote it.
        reads: what to read, by leaf that is wanted.
        options: of the controller.
        recipes: what makes the arrays that are read of those that are stored, one after the other.
    """

    address: LocationAddress
    save_id: str | None
    reads: tuple[ReadsOf, ...]
    options: WorkerOptions
    recipes: tuple[Recipe, ...] = ()

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        """See `ckptcore.protocols.ReadStage`."""
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
                f"{self.address.display} is not what the controller opened: expected the save {self.save_id}, found {found}; it was "
                "replaced meanwhile, or this worker sees another storage"
            )
        arrays = [[allocate(ArraySpec(box.shape, read.spec.dtype)) for box in read.boxes] for read in self.reads]
        buffers = [array for of_leaf in arrays for array in of_leaf]
        owners = [read.leaf for read in self.reads for _ in read.boxes]
        plan = plan_read(opened.tree, [(read.leaf, read.boxes) for read in self.reads])
        filled = set(opened.read(plan, buffers))
        missing = next((leaf for number, leaf in enumerate(owners) if number not in filled), None)
        if missing is not None:
            raise CorruptCheckpointError(
                f"the layout {opened.layout.name} did not read {format_path(opened.tree.paths[missing])} whole"
            )
        return arrays

    def _open(self, address: LocationAddress) -> Checkpoint:
        context = self.options.context
        location = open_address(address, runtime_of(context).registry, durable=False, config=context.storage)
        return open_tree(location, read_mark(location), context)


def _done(result: object) -> bytes:
    return pickle.dumps((None, result))


def _failed(error: BaseException) -> bytes:
    """The report of a stage that failed, with the error itself where that can be made again from it."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, CheckpointError):
        try:
            data = pickle.dumps((told, error))
            pickle.loads(data)
        except Exception:  # noqa: BLE001  # the error of a plugin may have anything in it; its text is told instead
            return pickle.dumps((told, None))
        return data
    return pickle.dumps((told, None))


def read_report(report: bytes, worker: str) -> Any:
    """What a stage reported.

    Args:
        report: of a worker of ours.
        worker: which one, for an error.

    Raises:
        CheckpointError: what the stage failed with; RankFailedError with its text, if that was none.
    """
    told, result = pickle.loads(report)
    if told is None:
        return result
    if isinstance(result, CheckpointError):
        result.add_note(f"This was raised on the worker {worker}")
        raise result
    raise RankFailedError(f"the worker {worker} failed: {told}")


@dataclass(frozen=True, slots=True)
class WantedAtWorkers:
    """A leaf that workers are to read and make.

    Attributes:
        leaf: its number in the tree that was saved; no alias.
        wanted: what is asked for.
        boxes: by worker, what it reads of the array.
    """

    leaf: int
    wanted: WantedLeaf
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def nbytes(self) -> int:
        """The most that one worker reads of it, in bytes."""
        elements = [sum([box.size for box in boxes]) for boxes in self.boxes]
        return max(elements, default=0) * self.wanted.stored.spec.numpy_dtype.itemsize


def fetch_leaves(
    opened: Checkpoint, executor: Executor, leaves: Sequence[WantedAtWorkers], context: Context
) -> Sequence[object]:
    """Let workers read and make leaves; returns these in order.

    Raises:
        CheckpointError: what a worker found wrong, or RankFailedError if one is gone.
    """
    save_id = None if opened.root is None else opened.root.save_id
    options = WorkerOptions.of(context)
    recipes = () if opened.derived is None else _recipes(opened)
    stages = {}
    for worker in range(len(executor.workers)):
        reads = [ReadsOf(leaf.leaf, leaf.wanted.stored.spec, leaf.boxes[worker]) for leaf in leaves]
        if any(read.boxes for read in reads):
            stages[worker] = ReadBoxes(opened.location.to_open, save_id, tuple(reads), options, recipes)
    fetched = executor.read(stages, [leaf.wanted for leaf in leaves])
    failed: list[CheckpointError] = []
    for worker, report in fetched.reports.items():
        try:
            read_report(report, executor.workers[worker])
        except CheckpointError as error:
            failed.append(error)
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
    return fetched.leaves


def _recipes(opened: Checkpoint) -> tuple[Recipe, ...]:
    from ckptcore.loading.derived import Recipe  # is there by now

    return Recipe.all_of(opened)
