"""Saves as they are requested, drafted, and prepared to be written."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from ckptcore.commit.location import AnyLocation, Location
from ckptcore.commit.root import Claim, Member, Role
from ckptcore.commit.target import IsForeign, Overwrite
from ckptcore.context import Context
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import seen_by_all
from ckptcore.model.tree import JSON
from ckptcore.protocols import CheckpointInfo, Layout, MemberKind, SaveStrategy
from ckptcore.saving.parts import PartDescription, SavePart

__all__ = [
    "NOTHING_COMMITTED",
    "CommitInfo",
    "Destination",
    "OneTree",
    "Save",
    "SaveDraft",
    "SaveHooks",
    "SaveNotes",
    "SaveRequest",
    "Target",
    "as_integer",
    "check_custom",
    "fail_before_claim",
    "fail_everywhere",
    "foreign_checkpoints",
]

NOTHING_COMMITTED: Final = "nothing was committed"
"""What it means if a stage before the commit fails on any rank."""

_MOST_PROGRESS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OneTree:
    """The value of a checkpoint that is one tree.

    Attributes:
        state: the tree.
    """

    state: object


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes.

    Attributes:
        place: the path or URL.
        overwrite: True to replace a checkpoint there. See `ckptcore.save`.
        name: the name of the place on every rank of a job, if its path differs between them; None: the place itself.
    """

    place: AnyLocation
    overwrite: Overwrite = False
    name: str | None = None

    @property
    def agreed(self) -> object:
        """Return the name that the exchanges of the save have on every rank."""
        return self.place if self.name is None else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNotes:
    """Metadata of the user for a checkpoint.

    Attributes:
        custom: JSON.
        metrics: numbers by name.
        step, epoch: progress of the training, as integers of any type; None if unknown.
    """

    custom: Mapping[str, JSON] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None

    def info(self) -> CommitInfo:
        """Check the metadata; return it for a root, without the id of a save.

        Raises:
            ValueError, TypeError: invalid metadata, metrics, step or epoch.
        """
        custom, metrics = check_custom(self.custom), _check_metrics(self.metrics)
        return CommitInfo(
            save_id="", created="", custom=custom, metrics=metrics, progress=_check_progress(self.step, self.epoch)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHooks:
    """Functions that a save calls. An error of the first two stops the save.

    Attributes:
        allowed: called on the leader before anything is written.
        before_commit: called on each process that commits, right before the commit.
        committed: called on every rank once the checkpoint exists, on the thread that writes, before further saves.
    """

    allowed: Callable[[], None] | None = None
    before_commit: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save as it is requested.

    Attributes:
        destination: the place to save to.
        values: one tree, or checkpointables by name.
        layout: a name, or a layout with options.
        strategy: plans, claims and commits the save.
        notes: metadata of the user.
        hooks: functions to call.
    """

    destination: Destination
    values: OneTree | Mapping[str, object]
    layout: str | Layout
    strategy: SaveStrategy[SaveDraft, Save]
    notes: SaveNotes = field(default_factory=SaveNotes)
    hooks: SaveHooks = field(default_factory=SaveHooks)


@dataclass(frozen=True, slots=True)
class Target:
    """The location that a save commits.

    Attributes:
        location: the location.
        overwrite: True to replace a checkpoint there. See `ckptcore.save`.
        before_commit: called right before a process commits; its error stops the save.
    """

    location: Location
    overwrite: Overwrite = False
    before_commit: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """What the root of a checkpoint says besides its tree and its objects.

    Attributes:
        save_id: the save.
        created: time at which it began, ISO 8601 in UTC.
        custom, metrics, progress: metadata of the user.
        members: the checkpointables by name; None if the checkpoint is one tree.
        role: ``export`` for an export in the directory of its save. See `Root.role`.
    """

    save_id: str
    created: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, Member] | None = None
    role: Role = "checkpoint"

    @property
    def claimed(self) -> Claim:
        """Return the claim of the save."""
        return Claim(self.save_id, self.created)

    @property
    def checkpoint_info(self) -> CheckpointInfo:
        """Return the information that layouts may write about the checkpoint."""
        members: dict[str, MemberKind] = {
            member.directory(name, rank): member.kind
            for name, member in (self.members or {}).items()
            for rank in range(member.processes or 1)
        }
        return CheckpointInfo(self.created, self.custom, self.metrics, members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint that can be written: every rank has the same trees, and their layouts can store them.

    Attributes:
        target: the location.
        info: what its root says besides trees and objects.
        parts: the parts that this process writes.
        strategy: claims and commits it.
        agreement: exchanges with the other processes of the job.
        recording: records its phases.
        context: options.
        further: saves of boxes that this save captures, which the strategy writes after its commit. Each has one part.
    """

    target: Target
    info: CommitInfo
    parts: Sequence[SavePart]
    strategy: SaveStrategy[SaveDraft, Save]
    agreement: Agreement
    recording: Recording
    context: Context
    further: Sequence[Save] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process and its workers write, further saves included."""
        own = sum(item.nbytes for part in self.parts for plan in part.plans for item in plan.items)
        return own + sum(save.nbytes for save in self.further)

    @property
    def uses_workers(self) -> bool:
        """True if workers of this controller write some of it."""
        return any(part.worker_plans for part in self.parts)

    def encode_receipts(self) -> bytes:
        """Return the message of this process to the leader: its receipt of each part. A job has no workers."""
        from ckptcore.job.receipts import encode_receipts  # only a job needs it

        common = self._common_parts()
        return encode_receipts([part.plan.tree for part in common], [part.receipts[0] for part in common])

    def take_receipts(self, payloads: Sequence[object]) -> None:
        """On the leader of a job: give each part the receipts of all ranks, from their messages."""
        from ckptcore.job.receipts import decode_receipts  # only a job needs it

        common = self._common_parts()
        trees = [part.plan.tree for part in common]
        by_rank = [decode_receipts(trees, data) for data in payloads if isinstance(data, bytes)]
        for number, part in enumerate(common):
            part.receipts = [of_rank[number] for of_rank in by_rank]

    def _common_parts(self) -> list[SavePart]:
        """Return the parts that all processes write together."""
        return [part for part in self.parts if not part.own]


@dataclass(frozen=True, slots=True)
class SaveDraft:
    """A save before its parts are planned. Every rank has equal trees.

    Attributes:
        save: the save without parts.
        descriptions: the checkpointables. They refer to the state.
    """

    save: Save
    descriptions: Sequence[PartDescription]

    def plan(self, strategy: SaveStrategy[SaveDraft, Save]) -> Save:
        """Plan what this process writes of each checkpointable; return the save."""
        rank, size, info = self.save.agreement.rank, self.save.agreement.size, self.save.info
        parts = []
        for description in self.descriptions:
            member = description.member(size)
            directory = "" if info.members is None else member.directory(description.name, rank)
            plan, *of_workers = description.plans(rank, size, info.save_id)
            own = member.processes is not None
            parts.append(SavePart(directory, description.layout, plan, own, tuple(of_workers), description))
        return replace(self.save, parts=parts, strategy=strategy)


def fail_everywhere(agreement: Agreement, stage: str, error: BaseException) -> NoReturn:
    """Raise an error of this process, and fail the save on the other ranks at the end of a stage that they wait for."""
    with agreement.stage(stage):
        raise error
    raise error  # the stage has raised it


def fail_before_claim(agreement: Agreement, error: BaseException) -> NoReturn:
    """Raise an error of this process after the save was prepared; the other ranks get it in the stage of the claim."""
    with agreement.stage("claim"), seen_by_all(agreement, "claimed", "", bool):  # `bool` is never called
        raise error
    raise error  # the stage has raised it


def foreign_checkpoints(context: Context) -> IsForeign:
    """Return a function that recognises checkpoints of other software. See `ckptcore.loading.foreign`."""

    def is_foreign(location: Location) -> bool:
        from ckptcore.loading import foreign  # a save to an empty location reads nothing

        return foreign.foreign_checkpoints(context)(location)

    return is_foreign


def check_custom(custom: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    """Return metadata of the user as it is stored.

    Raises:
        ValueError: it is no JSON, or would be loaded differently.
    """
    if custom is None:
        return {}
    try:
        decoded: dict[str, JSON] = json.loads(json.dumps(dict(custom), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata= must be JSON, with str keys and finite numbers: {error}. Nothing was written"
        ) from error
    if decoded != _lists(custom):
        raise ValueError("metadata= must be JSON, with str keys; it would come back changed. Nothing was written")
    return decoded


def _check_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return metrics as they are stored.

    Raises:
        ValueError, TypeError: a metric is no number, or its name no text.
    """
    checked = {}
    for name, value in metrics.items():
        try:
            number = float(value)
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
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        pass
    raise TypeError(f"{name}={repr(value)[:200]}: expected a whole number, as an int{hint}")


def _check_progress(step: int | None, epoch: int | None) -> Mapping[str, int]:
    """Return the step and the epoch as they are stored.

    Raises:
        ValueError, TypeError: one is no whole number of at most 64 bits.
    """
    checked = {}
    for name, value in (("step", step), ("epoch", epoch)):
        if value is None:
            continue
        number = as_integer(name, value, hint=". Nothing was written")
        if abs(number) > _MOST_PROGRESS:
            raise ValueError(f"{name}= must fit into 64 bits, as a signed integer. Nothing was written")
        checked[name] = number
    return checked


def _lists(value: Any) -> Any:
    """Return JSON with tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, list | tuple) else value
