"""Stages: functions that the workers of a single controller run to write a part of a save or to read boxes.

Stages and their reports are pickled. They contain no arrays, threads or open storages. A stage does
not raise errors. Its report contains the error instead. Imports no JAX.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckptcore.commit.location import Location, LocationAddress, open_address
from ckptcore.commit.root import Claim
from ckptcore.commit.stored_root import read_version
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context, IOOptions
from ckptcore.errors import CheckpointError, CorruptCheckpointError, RankFailedError
from ckptcore.io.memory import allocate
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.threads import sizes_of
from ckptcore.job.visibility import expect_claim
from ckptcore.loading.reading import incomplete_read
from ckptcore.model import JSON, ArrayRecord, ArraySpec, Box, HostArray, Receipt, TreeMetadata, WritePlan
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import Derived, derive
from ckptcore.opening.open_checkpoints import open_tree
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray, Layout
from ckptcore.runtime import runtime_of

WriteStage: TypeAlias = Callable[[Sequence[Sequence[HostArray]]], bytes]
"""Called on a worker with the elements of the boxes of each held leaf. Returns the report. See `WriteParts`."""

ReadStage: TypeAlias = Callable[[], tuple[bytes, Sequence[Sequence[HostArray]]]]
"""Called on a worker. Returns the report, and the elements of the boxes of each leaf. See `ReadBoxes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of the controller's `Context` that workers use. A worker uses the plugins of its own installation.

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
        """A Context of this process with these options. Cached, so that its threads are reused."""
        return _cached_context(pickle.dumps(self))

    def open(self, address: LocationAddress, *, to_write: bool = False) -> Location:
        """Open a location."""
        return open_address(address, runtime_of(self.context).storages, to_write=to_write)


@functools.lru_cache(maxsize=4)
def _cached_context(pickled: bytes) -> Context:
    options: WorkerOptions = pickle.loads(pickled)
    return Context(durability=options.durability, io=options.io, storage=options.storage)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The share of one worker in a part of a save.

    Attributes:
        directory: directory of the part within the checkpoint; empty if the part is the whole
            checkpoint.
        layout: layout of the part.
        plan: the items that the worker writes.
        held: for each item of the plan, the index of its leaf among the worker's held leaves.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    held: tuple[int, ...]


class _WorkerSnapshot:
    """Arrays in the memory of a worker. See `ckptcore.protocols.Snapshot`."""

    def __init__(self, plan: WritePlan, arrays: Sequence[Sequence[HostArray]]) -> None:
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
    """Write the held elements of a worker to the location that the controller claimed. Reports the receipts.

    Attributes:
        address: address of the location.
        claimed: claim of the save.
        parts: the parts to write.
        options: options of the controller.
    """

    address: LocationAddress
    claimed: Claim
    parts: tuple[WorkerPart, ...]
    options: WorkerOptions

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        """Write the parts.

        Args:
            arrays: the elements of the boxes of each held leaf, with any strides. They must not
                change.

        Returns:
            The report, with a receipt for each part.
        """
        try:
            return _success_report(self._write(arrays))
        except BaseException as error:  # noqa: BLE001  # raised on the controller
            return _error_report(error)

    def _write(self, arrays: Sequence[Sequence[HostArray]]) -> Sequence[Receipt]:
        runtime = runtime_of(self.options.context)
        location = self.options.open(self.address, to_write=True)
        expect_claim(self.claimed, location)
        store = location.commit_method.store_of(location, self.claimed.save_id, is_new=True)
        receipts = []
        with store.defer_names(""):
            for part in self.parts:
                inside = subdirectory(store, part.directory)
                recorder = ObjectRecorder(
                    inside, runtime.io_threads, checksums=self.options.io.checksums, sizes=sizes_of(part.plan)
                )
                state = part.layout.write(
                    _WorkerSnapshot(part.plan, [arrays[number] for number in part.held]), recorder
                )
                # Leave out the items of the plan. The controller has them, and adds them to the receipt.
                receipts.append(Receipt(part.plan.rank, (), state, recorder.objects))
        return receipts


@dataclass(frozen=True, slots=True)
class LeafReads:
    """Boxes to read from one array.

    Attributes:
        leaf: number of the array in the tree of the checkpoint.
        spec: spec of the whole array.
        boxes: the boxes to read.
    """

    leaf: int
    spec: ArraySpec
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class DerivationRecipe:
    """The derivations of a derived checkpoint, as sent to a worker. The worker opens the source checkpoints itself.

    Attributes:
        tree, derivations, values, most_bytes: see `ckptcore.opening.derived.Derived`.
        further: locations of further source checkpoints.
    """

    tree: TreeMetadata
    derivations: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    most_bytes: int
    further: tuple[LocationAddress, ...]

    def derive(self, checkpoint: Checkpoint, open_further: Callable[[LocationAddress], Checkpoint]) -> Checkpoint:
        """Return the derived checkpoint.

        Args:
            checkpoint: the first source.
            open_further: opens a further source.
        """
        further = [open_further(address) for address in self.further]
        return derive(
            checkpoint, self.tree, self.derivations, values=self.values, additional=further, most_bytes=self.most_bytes
        )

    @classmethod
    def all_of(cls, checkpoint: Checkpoint) -> tuple[DerivationRecipe, ...]:
        """Return the recipes that derive a checkpoint from the stored one, in order."""
        if not isinstance(derived := checkpoint.derived, Derived) or derived.is_builtin:
            return ()
        first, *further = derived.sources
        for other in further:
            assert other.derived is None or other.derived.is_builtin  # only the first source can be derived
        addresses = tuple([other.location.address for other in further])
        return (
            *cls.all_of(first),
            cls(derived.tree, derived.derivations, derived.values, derived.most_bytes, addresses),
        )


@dataclass(frozen=True, slots=True)
class ReadBoxes:
    """Open the checkpoint of the controller, and read boxes. The report is empty, or contains an error.

    Attributes:
        address: address of the checkpoint.
        save_id: save id that the controller found; None if the checkpoint was not written by
            ckptcore.
        reads: the boxes of each leaf.
        options: options of the controller.
        recipes: recipes of derived arrays, in order.
    """

    address: LocationAddress
    save_id: str | None
    reads: tuple[LeafReads, ...]
    options: WorkerOptions
    recipes: tuple[DerivationRecipe, ...] = ()

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        """Read the boxes.

        Returns:
            The report, and for each leaf the elements of its boxes, as new C-contiguous arrays of
            the stored dtype. After an error the result has no leaves.
        """
        try:
            return _success_report(None), self._read()
        except BaseException as error:  # noqa: BLE001  # raised on the controller
            return _error_report(error), ()

    def _read(self) -> Sequence[Sequence[HostArray]]:
        checkpoint = self._open(self.address)
        save_id = None if checkpoint.root is None else checkpoint.root.save_id
        for recipe in self.recipes if save_id == self.save_id else ():
            checkpoint = recipe.derive(checkpoint, self._open)
        for read in self.reads if save_id == self.save_id else ():
            record = checkpoint.tree.leaves[read.leaf] if read.leaf < len(checkpoint.tree.leaves) else None
            if not isinstance(record, ArrayRecord) or record.spec != read.spec:
                save_id = "another tree"
        if save_id != self.save_id:
            raise CorruptCheckpointError(
                f"{self.address.display} is not the checkpoint that the controller opened: expected the save "
                f"{self.save_id}, found {save_id}; it was replaced meanwhile, or this worker uses another storage"
            )
        arrays = [[allocate(ArraySpec(box.shape, read.spec.dtype)) for box in read.boxes] for read in self.reads]
        buffers = [array for of_leaf in arrays for array in of_leaf]
        owners = [read.leaf for read in self.reads for _ in read.boxes]
        plan = plan_read(checkpoint.tree, [(read.leaf, read.boxes) for read in self.reads])
        filled = set(checkpoint.read(plan, buffers))
        missing = next((leaf for number, leaf in enumerate(owners) if number not in filled), None)
        if missing is not None:
            raise incomplete_read(checkpoint, missing)
        return arrays

    def _open(self, address: LocationAddress) -> Checkpoint:
        location = self.options.open(address)
        return open_tree(location, read_version(location), self.options.context)


def _success_report(result: object) -> bytes:
    return pickle.dumps((None, result))


def _error_report(error: BaseException) -> bytes:
    """Return the report of a failed stage, with the error object if it can be pickled."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, CheckpointError):
        try:
            data = pickle.dumps((message, error))
            pickle.loads(data)
        except Exception:  # noqa: BLE001  # a plugin's error can contain any object; report only its text
            return pickle.dumps((message, None))
        return data
    return pickle.dumps((message, None))


def read_report(report: bytes, worker: str) -> Any:
    """Return the result of a stage, or raise its error.

    Args:
        report: the report of the stage.
        worker: name of the worker, for errors.

    Raises:
        CheckpointError: the error of the stage.
        RankFailedError: for any other error of the stage. The message contains its text.
    """
    message, result = pickle.loads(report)
    if message is None:
        return result
    if isinstance(result, CheckpointError):
        result.add_note(f"This was raised on the worker {worker}")
        raise result
    raise RankFailedError(f"the worker {worker} failed: {message}")
