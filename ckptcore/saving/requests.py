"""Requests of saves, drafts, and saves that are ready to be written, with their parts."""

from __future__ import annotations

import datetime
import json
import math
import numbers
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ckptcore.commit.location import AnyLocation, Location
from ckptcore.commit.root import Claim, Member, Role, SaveOrder
from ckptcore.commit.stored_root import FindForeign, Overwrite
from ckptcore.context import Context
from ckptcore.errors import converts_errors
from ckptcore.events import Recording
from ckptcore.io.snapshot import StateBoxes, StateCopy
from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import Receipt, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.progress import ProgressCallback
from ckptcore.protocols import CheckpointInfo, Layout, MemberKind, SaveStrategy, Snapshot, WriteStore
from ckptcore.saving.descriptions import FilesDescription, PartDescription

if TYPE_CHECKING:
    from ckptcore.commit.stored_root import OwnKeys

NOTHING_COMMITTED: Final = "nothing was committed"
"""The consequence of an error on any rank before the commit. Part of error messages."""

_EMPTY: Final[Mapping[str, Any]] = {}


class OneTree(NamedTuple):
    """The value of a checkpoint that is one tree."""

    state: object


class SaveDestination(NamedTuple):
    """The requested location of a save.

    Attributes:
        location: the path or URL.
        overwrite: True to replace a checkpoint there. See `ckptcore.save`.
        name: a name of the location that is equal on every rank of a job; None if `location` itself is equal.
    """

    location: AnyLocation
    overwrite: Overwrite = False
    name: str | None = None

    @property
    def exchange_name(self) -> object:
        """The name of the exchanges of this save, equal on every rank."""
        return self.location if self.name is None else self.name


class SaveNotes(NamedTuple):
    """Metadata of the user for a checkpoint.

    Attributes:
        custom: any JSON.
        metrics: numbers by name.
        step, epoch: progress of the training, as integers of any type; None if unknown.
    """

    custom: Mapping[str, JSON] | None = None
    metrics: Mapping[str, float] = _EMPTY
    step: int | None = None
    epoch: int | None = None

    def info(self) -> CommitInfo:
        """Check the metadata, and return it in the form of a root. Its save id is still empty.

        Raises:
            ValueError, TypeError: invalid metadata, metrics, step or epoch.
        """
        custom, metrics = check_custom(self.custom), _check_metrics(self.metrics)
        return CommitInfo("", "", custom, metrics, _check_progress(self.step, self.epoch))


class SaveHooks(NamedTuple):
    """Functions that a save calls. An error of `allowed`, `order`, `before_commit` or `progress` fails the save.

    Attributes:
        allowed: called on the leader before anything is written.
        order: called on the leader after `allowed`; returns the order of the save. None: the next order after the order
            of the replaced checkpoint.
        before_commit: called on each process that commits, right before the commit.
        committed: called on every rank after the commit and before further saves, on the thread that writes.
        progress: called from any thread with the bytes of arrays that this process has written so far, and with the
            total bytes that it writes.
    """

    allowed: Callable[[], None] | None = None
    order: Callable[[], SaveOrder] | None = None
    before_commit: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None
    progress: ProgressCallback | None = None


class SaveRequest(NamedTuple):
    """A requested save.

    Attributes:
        destination: the location to save to.
        values: one tree, or checkpointables by name.
        layout: a name, or a layout with options.
        strategy: plans, claims and commits the save.
        notes: metadata of the user.
        hooks: functions to call.
    """

    destination: SaveDestination
    values: OneTree | Mapping[str, object]
    layout: str | Layout
    strategy: SaveStrategy[SaveDraft, Save]
    notes: SaveNotes = SaveNotes()
    hooks: SaveHooks = SaveHooks()


class CommitTarget(NamedTuple):
    """The location at which a save commits.

    Attributes:
        location: the location.
        overwrite: True to replace a checkpoint there. See `ckptcore.save`.
        before_commit: called right before a process commits; its error fails the save.
    """

    location: Location
    overwrite: Overwrite = False
    before_commit: Callable[[], None] | None = None

    @property
    def keeps_others(self) -> bool:
        """True if a save moves its objects into an existing directory with other files. Only the leader reads this."""
        return (
            self.overwrite == "keep-other-files"
            and self.location.commit_method.replaces_atomically
            and bool(self.location.store.list_names())
        )


class CommitInfo(NamedTuple):
    """The content of a root besides its tree and its objects.

    Attributes:
        save_id: the id of the save.
        created: the time at which the save began, ISO 8601 in UTC.
        custom, metrics, progress: metadata of the user.
        members: the checkpointables by name; None if the checkpoint is one tree.
        role: ``export`` for an export in the directory of its save. See `Root.role`.
        order: see `SaveOrder`.
        default: see `CompositeRoot`.
    """

    save_id: str
    created: str
    custom: Mapping[str, JSON] = _EMPTY
    metrics: Mapping[str, float] = _EMPTY
    progress: Mapping[str, int] = _EMPTY
    members: Mapping[str, Member] | None = None
    role: Role = "checkpoint"
    order: SaveOrder = SaveOrder()
    default: str | None = None

    @property
    def claimed(self) -> Claim:
        """The claim of the save."""
        return Claim(self.save_id, self.created)

    @property
    def checkpoint_info(self) -> CheckpointInfo:
        """The information that layouts may write about the checkpoint."""
        members: dict[str, MemberKind] = {
            member.directory(name, rank): member.kind
            for name, member in (self.members or {}).items()
            for rank in range(member.processes or 1)
        }
        return CheckpointInfo(self.created, self.custom, self.metrics, members)


@dataclass(slots=True)
class SavePart:
    """One tree, or the files of one object. The stages of a save fill it: plan, capture, write.

    Attributes:
        directory: its directory within the checkpoint; empty if the part is the whole checkpoint.
        layout: the layout that stores it. For files: the layout of the trees of the save.
        plan: the boxes that this process writes.
        own: True if every process writes its own part. Otherwise all processes write it together.
        source: the arrays or files to capture; None after the capture.
        captured: the captured content; None before the capture, and after `close`.
        receipts: the receipts of this process. On the leader, before the commit, the receipts of all ranks.
        is_files: True for the files of an object, which need no layout.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    own: bool = False
    source: ArraySource | FilesDescription | None = None
    captured: Captured | None = None
    receipts: Sequence[Receipt] = ()
    is_files: bool = False

    def close(self) -> None:
        """Release the captured content. Closing again is no error."""
        captured, self.captured, self.source = self.captured, None, None
        if captured is not None:
            captured.close()


class ArraySource(Protocol):
    """The arrays of a part before the capture."""

    def boxes(self, leaf: int, boxes: tuple[Box, ...]) -> StateBoxes:
        """Return boxes of a leaf, by its number in the plan of the part."""
        ...


class Captured(Protocol):
    """The captured content of a part. It does not change while the save runs."""

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Write the content, and return the state of the layout for the receipt."""
        ...

    def close(self) -> None:
        """Release the content. Closing again is no error."""
        ...


class TreeCaptured(NamedTuple):
    """The arrays of a tree. See `Captured`.

    Attributes:
        snapshot: the arrays.
        copy: the running copy that fills the snapshot; None if nothing is copied.
        unreleased: the items of the snapshot that `close` releases if the writer has not released them.
    """

    snapshot: Snapshot
    copy: StateCopy | None = None
    unreleased: Collection[int] = ()

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`."""
        return part.layout.write(self.snapshot, store)

    def close(self) -> None:
        """End the copy's wait for the writer, and release the arrays that a failed writer did not release."""
        if self.copy is not None:
            self.copy.end_writing()
        for item in list(self.unreleased):
            with suppress(Exception):  # a copy that failed has no memory to free, and its error was raised already
                self.snapshot.release(item)


class Save(NamedTuple):
    """A checkpoint that is ready to be written. Trees that all ranks save together are equal on every rank.

    Attributes:
        target: the location.
        info: the content of its root besides trees and objects.
        parts: the parts that this process writes.
        strategy: claims and commits the save.
        agreement: exchanges messages with the other processes of the job.
        recording: records the phases.
        context: the options.
        further: more saves of boxes that this save captures. The strategy writes them after its commit. Each has one
            part.
        capture_elsewhere: starts the capture of boxes that workers hold and write for this process. The argument is
            True to copy them. None: workers hold no boxes.
        nbytes_elsewhere: bytes of the boxes that workers write, further saves included.
        receive_elsewhere: called with this save or a further save. Waits until the workers have written their boxes of
            that save, and adds their receipts to its parts.
    """

    target: CommitTarget
    info: CommitInfo
    parts: Sequence[SavePart]
    strategy: SaveStrategy[SaveDraft, Save]
    agreement: Agreement
    recording: Recording
    context: Context
    further: Sequence[Save] = ()
    capture_elsewhere: Callable[[bool], StateCopy] | None = None
    nbytes_elsewhere: int = 0
    receive_elsewhere: Callable[[Save], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process and its workers write, further saves included."""
        own = sum(item.nbytes for part in self.parts for item in part.plan.items)
        return own + self.nbytes_elsewhere + sum(save.nbytes for save in self.further)

    @property
    def has_other_writers(self) -> bool:
        """True if other processes write to the location too."""
        return self.agreement.size > 1 or any(part.plan.size > 1 for part in self.parts)

    def encode_receipts(self) -> bytes:
        """Encode the message of this process to the leader: one receipt for each part."""
        from ckptcore.job.receipts import encode_receipts  # needed only in a job

        shared = self._shared_parts()
        return encode_receipts([part.plan.tree for part in shared], [part.receipts[0] for part in shared])

    def take_receipts(self, payloads: Sequence[object]) -> None:
        """Store the receipts of all ranks in the parts, from their messages. Only the leader of a job calls this."""
        from ckptcore.job.receipts import decode_receipts  # needed only in a job

        shared = self._shared_parts()
        trees = [part.plan.tree for part in shared]
        by_rank = [decode_receipts(trees, data) for data in payloads if isinstance(data, bytes)]
        for number, part in enumerate(shared):
            part.receipts = [of_rank[number] for of_rank in by_rank]

    def _shared_parts(self) -> list[SavePart]:
        """Return the parts that all processes write together."""
        return [part for part in self.parts if not part.own]


class SaveDraft(NamedTuple):
    """A save before its parts are planned. Trees that all ranks save together are equal on every rank.

    Attributes:
        save: the save without parts.
        descriptions: the checkpointables. They refer to the state.
    """

    save: Save
    descriptions: Sequence[PartDescription]

    def plan(self, strategy: SaveStrategy[SaveDraft, Save]) -> Save:
        """Plan which boxes of each checkpointable this process writes, and return the save."""
        rank, size, info = self.save.agreement.rank, self.save.agreement.size, self.save.info
        parts = []
        for description in self.descriptions:
            member = description.member(size)
            directory = "" if info.members is None else member.directory(description.name, rank)
            plan, own = description.plan(rank, size, info.save_id), member.processes is not None
            part = SavePart(directory, description.layout, plan, own, description, is_files=member.kind == "files")
            parts.append(part)
        return self.save._replace(parts=parts, strategy=strategy)


@converts_errors
def failing_everywhere(agreement: Agreement, stage: str) -> Iterator[None]:
    """Run a block. If it fails, the other ranks, which wait at the end of `stage`, fail with its error."""
    try:
        yield
    except BaseException:
        with agreement.stage(stage):
            raise


@converts_errors
def failing_before_claim(agreement: Agreement) -> Iterator[None]:
    """Run a block after a save was prepared. If it fails, the other ranks fail with its error at the claim."""
    try:
        yield
    except BaseException:
        with agreement.stage("claim"):
            if agreement.rank == 0:
                agreement.lead("claimed", lambda: None)  # the other ranks wait for this message inside the stage
            raise


def foreign_finder(context: Context) -> FindForeign:
    """Return a function that detects checkpoints of other software. See `ckptcore.opening.foreign`."""

    def find_foreign(location: Location) -> OwnKeys | None:
        from ckptcore.opening.foreign import owner_of_files  # not needed for a save to an empty location

        return owner_of_files(location.store, context)

    return find_foreign


def save_created() -> str:
    """Return the current time in the format of roots: ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def check_custom(custom: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    """Return metadata of the user in its stored form.

    Raises:
        ValueError: it is not JSON, or a load would return something else.
    """
    if custom is None:
        return {}
    try:
        decoded: dict[str, JSON] = json.loads(json.dumps(dict(custom), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"metadata= must be JSON, with str keys and finite numbers: {error}. Nothing was written"
        ) from error
    if decoded != _lists(custom):
        raise ValueError("metadata= must be JSON, with str keys; a load would return it changed. Nothing was written")
    return decoded


def _check_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return metrics in their stored form.

    Raises:
        ValueError, TypeError: a metric is not a number, or its name not a str.
    """
    checked = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except OverflowError as error:  # Python refuses to print the largest ints
            raise ValueError(f"metrics={{{name!r}: ...}}: no float is as large. Nothing was written") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics={{{name!r}: {value!r}}}: a metric is one number. Nothing was written") from error
        if not isinstance(name, str):
            raise TypeError(f"metrics={{{name!r}: ...}}: the name of a metric is a str. Nothing was written")
        checked[name] = number
    return checked


def as_integer(name: str, value: object, *, hint: str = "") -> int:
    """Return the value of an argument as an int. Integers of NumPy, PyTorch and JAX are accepted.

    Args:
        name: the name of the argument.
        value: its value.
        hint: a remedy for the error.

    Raises:
        TypeError: it is a bool, or no integer.
        ValueError: it has more than 64 bits.
    """
    try:
        if not isinstance(value, bool):
            number = operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
            if -(2**63) <= number < 2**63:
                return number
            raise ValueError(f"{name}= must fit into 64 bits, as a signed integer{hint}")
    except TypeError:
        pass
    raise TypeError(f"{name}={repr(value)[:200]}: expected a whole number, as an int{hint}")


def as_seconds(name: str, value: object) -> float:
    """Return the value of an argument as a float of seconds, 0 or more.

    Raises:
        TypeError: it is a bool, or no real number.
        ValueError: it is negative or not finite, also as a float.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={repr(value)[:200]}: expected a number of seconds, as a float or an int")
    try:
        seconds = float(value)
    except OverflowError:  # Python refuses to print the largest ints
        seconds = math.inf
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}={seconds:g}: expected a finite number of seconds, not below 0")
    return seconds


def _check_progress(step: int | None, epoch: int | None) -> Mapping[str, int]:
    """Return the step and the epoch in their stored form.

    Raises:
        ValueError, TypeError: a number is not an integer of at most 64 bits.
    """
    checked = {}
    for name, value in (("step", step), ("epoch", epoch)):
        if value is None:
            continue
        checked[name] = as_integer(name, value, hint=". Nothing was written")
    return checked


def _lists(value: Any) -> Any:
    """Return JSON with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, list | tuple) else value
