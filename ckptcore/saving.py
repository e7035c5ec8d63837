"""Saving: describe, snapshot, persist. Each stage's input can only be had from the stage before."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import xxhash

from ckptcore.agreement import Agreement
from ckptcore.background import SaveHandle
from ckptcore.commit import Overwrite, refuse_to_replace
from ckptcore.context import Context
from ckptcore.engine.memory import StagingMemory
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.flattening import of_each_process
from ckptcore.locations import Place, resolve_location
from ckptcore.model.tree import JSON, format_path
from ckptcore.parts import (
    Captured,
    FilesDescription,
    Part,
    PartDescription,
    TreeCaptured,
    TreeDescription,
    describe_part,
)
from ckptcore.persisting import NOTHING_COMMITTED, Described, fail_everywhere, persist
from ckptcore.protocols import Layout
from ckptcore.root import Member, check_name, new_save_id
from ckptcore.snapshots import BoundedSnapshot, CopiedSnapshot
from ckptcore.step_names import whole_number

__all__ = ["OneTree", "SaveRequest", "begin_save", "perform_save", "save_created"]

_MOST_PROGRESS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OneTree:
    """Says that a checkpoint is one tree.

    Attributes:
        state: the tree.
    """

    state: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save that a user asked for.

    Attributes:
        location: where to.
        values: what: one tree, or checkpointables by name.
        layout: a name, or a layout with options.
        overwrite: whether what is there is replaced.
        custom: metadata of the user's; JSON.
        metrics: measurements to be kept with it.
        step, epoch: how far the training is, in integers of any type; None where nobody says.
        when_busy: what an asynchronous save does while another runs; None: as the Context says.
        allowed: called on the leader before anything is written; an error of it stops the save.
        before_commit: called on the leader right before the commit; an error of it stops the save.
        committed: called on every rank once the checkpoint is there, on the thread that waited for it.
    """

    location: Place
    values: OneTree | Mapping[str, object]
    layout: str | Layout
    overwrite: Overwrite
    custom: Mapping[str, JSON] | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    when_busy: Literal["wait", "queue"] | None = None
    allowed: Callable[[], None] | None = None
    before_commit: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None


_Descriptions: TypeAlias = Sequence[PartDescription]


def perform_save(request: SaveRequest, context: Context) -> None:
    """Save and return once it is committed; arrays are not copied.

    Raises:
        CheckpointError: why it is not.
    """
    key = context.exchange_key(request.location)  # before anything can fail: every rank counts every save
    with _recorded(request, context) as recording, recording.phase("blocking"):
        agreement = Agreement(context.job(), key, recording)
        with recording.phase("describe"):
            described, descriptions = _describe(request, context, recording, agreement)
        captured: list[Captured] = []
        try:
            try:
                with recording.phase("wait_for_previous"):
                    context.saves.wait()
                for part, description in zip(described.parts, descriptions, strict=True):
                    if isinstance(description, FilesDescription):
                        captured.append(description.capture())
                    else:
                        captured.append(description.view(part.plan))
            except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
                fail_everywhere(agreement, "claim", error)
            persist(described, captured, context, recording)
        finally:
            _close(captured)
    if request.committed is not None:
        request.committed()


def begin_save(request: SaveRequest, context: Context) -> SaveHandle:
    """Begin to save and return once the save owns its memory; it goes on in the background.

    Raises:
        CheckpointError: why it cannot begin; what comes later is told by the handle.
    """
    key = context.exchange_key(request.location)  # before anything can fail: every rank counts every save
    with _recorded(request, context, goes_on=True) as recording, recording.phase("blocking"):
        agreement = Agreement(context.job(), key, recording)
        try:
            with recording.phase("wait_for_previous"):
                if (request.when_busy or context.when_busy) == "wait":
                    context.saves.wait()
                else:
                    context.saves.wait_for_room()
        except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
            fail_everywhere(agreement, "describe", error)
        with recording.phase("describe"):
            described, descriptions = _describe(request, context, recording, agreement)
        total = sum(item.spec.nbytes for part in described.parts for item in part.plan.items)
        handle = SaveHandle(described.location.display, total)
        memory = StagingMemory(context.staging, context.io_threads)
        if context.memory.save_bytes is None:
            _begin_copied(described, descriptions, memory, handle, context, recording, request.committed)
        else:
            limit = context.memory.save_bytes
            _begin_bounded(described, descriptions, memory, handle, context, recording, request.committed, limit)
        return handle


@contextmanager
def _recorded(request: SaveRequest, context: Context, *, goes_on: bool = False) -> Iterator[Recording]:
    """Record an operation; one that goes on in the background is over later, unless it failed to begin."""
    recording = Recording("save", str(request.location), context.observers, step=request.step, rank=context.job().rank)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    if not goes_on:
        recording.finish()


def _begin_copied(
    described: Described,
    descriptions: _Descriptions,
    memory: StagingMemory,
    handle: SaveHandle,
    context: Context,
    recording: Recording,
    committed: Callable[[], None] | None,
) -> None:
    """Copy everything, then let it be written."""
    captured: list[Captured] = []
    snapshots: list[CopiedSnapshot] = []
    try:
        with recording.phase("copy") as phase:
            for part, description in zip(described.parts, descriptions, strict=True):
                if isinstance(description, FilesDescription):
                    captured.append(description.capture())
                    continue
                start = description.start_copy(part.plan, memory)
                snapshots.append(CopiedSnapshot(part.plan, start, memory.give_back))
                captured.append(TreeCaptured(snapshots[-1]))
            for snapshot in snapshots:
                snapshot.wait()
            phase.nbytes = memory.copied_bytes
    except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
        _close(captured)
        memory.close()
        fail_everywhere(described.agreement, "claim", error)

    def work() -> None:
        try:
            persist(described, captured, context, recording, handle)
        finally:
            _close(captured)
            memory.close()
            _release(context)

    _run(work, described, captured, memory, handle, context, recording, committed)


def _begin_bounded(
    described: Described,
    descriptions: _Descriptions,
    memory: StagingMemory,
    handle: SaveHandle,
    context: Context,
    recording: Recording,
    committed: Callable[[], None] | None,
    limit: int,
) -> None:
    """Copy while it is written, so that little is held copied at a time."""
    captured: list[Captured] = []
    snapshots: list[BoundedSnapshot] = []
    try:
        for part, description in zip(described.parts, descriptions, strict=True):
            if isinstance(description, FilesDescription):
                captured.append(description.capture())
                continue
            start = description.start_copy(part.plan, memory)
            snapshots.append(BoundedSnapshot(part.plan, start, memory.give_back, limit))
            captured.append(TreeCaptured(snapshots[-1]))
    except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
        _close(captured)
        memory.close()
        fail_everywhere(described.agreement, "claim", error)

    def work() -> None:
        try:
            persist(described, captured, context, recording, handle)
        finally:
            for snapshot in snapshots:
                snapshot.writer_ended()
            snapshots.clear()
            _close(captured)
            memory.close()
            _release(context)

    to_copy = tuple(snapshots)
    _run(work, described, captured, memory, handle, context, recording, committed)
    try:
        with recording.phase("copy") as phase:
            for number, snapshot in enumerate(to_copy):
                if number:
                    to_copy[number - 1].wait_until_written()
                snapshot.copy_all()
            phase.nbytes = memory.copied_bytes
    except BaseException as error:
        for snapshot in to_copy:
            snapshot.fail(error)
        handle.exception()  # the writer ends with the same error, which is told here and need not be again
        raise


def _run(
    work: Callable[[], None],
    described: Described,
    captured: list[Captured],
    memory: StagingMemory,
    handle: SaveHandle,
    context: Context,
    recording: Recording,
    committed: Callable[[], None] | None,
) -> None:
    """Do the work in the background, and record when the operation is over."""

    def recorded() -> None:
        try:
            work()
        except BaseException as error:
            recording.finish(error=error)
            raise
        recording.finish(handle.progress.written)
        if committed is not None:
            committed()

    try:
        context.saves.run(handle, recorded)
    except RuntimeError as error:
        _close(captured)
        memory.close()
        fail_everywhere(described.agreement, "claim", error)


def _close(captured: list[Captured]) -> None:
    """Let go of what was captured; the functions in the traceback of an error hold the list for as long as that is kept."""
    for held in captured:
        held.close()
    captured.clear()


def _release(context: Context) -> None:
    if not context.memory.keep_staging:
        context.staging.release_unused()


def _describe(
    request: SaveRequest, context: Context, recording: Recording, agreement: Agreement
) -> tuple[Described, _Descriptions]:
    """Look at what is to be saved and where, and refuse what cannot be. Writes nothing.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError, CheckpointExistsError, InvalidLocationError
        ValueError, TypeError: for what is no metadata, metric, step or epoch.
        BackgroundSaveError: an earlier save failed unnoticed, here; in a job the other ranks hear of it.
    """
    rank, size = agreement.rank, agreement.size
    composite = not isinstance(request.values, OneTree)
    with agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        context.saves.raise_unnoticed()
        chosen = context.registry.layout(request.layout)
        custom = _check_custom(request.custom)
        metrics = _check_metrics(request.metrics)
        progress = _check_progress(request)
        recording.step = progress.get("step")
        values = {"": request.values.state} if isinstance(request.values, OneTree) else dict(request.values)
        location = resolve_location(
            request.location, context.registry, durable=context.durability == "full", config=context.storage
        )
        if composite:
            for name in values:
                check_name(name)
        descriptions = [
            describe_part(name, value, chosen, context.registry, rank=rank, size=size) for name, value in values.items()
        ]
        if size > 1:
            _refuse_what_differs(values, descriptions, size)
        members = (
            {name: part.member(size) for name, part in zip(values, descriptions, strict=True)} if composite else None
        )
        if rank == 0:
            if request.allowed is not None:
                request.allowed()
            refuse_to_replace(location, request.overwrite)
        if size > 1:
            stage.payload = _digest(members, descriptions)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _same_trees(payloads))
    save_id, created = decided["save_id"], decided["created"]
    recording.save_id = save_id
    parts = []
    try:
        for name, description in zip(values, descriptions, strict=True):
            member = description.member(size)
            directory = member.directory(name, rank) if composite else ""
            own = member.processes is not None
            parts.append(Part(directory, description.layout, description.plan(rank, size, save_id), own))
    except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
        fail_everywhere(agreement, "claim", error)
    described = Described(
        location=location,
        overwrite=request.overwrite,
        custom=custom,
        metrics=metrics,
        progress=progress,
        save_id=save_id,
        created=created,
        parts=parts,
        members=members,
        before_commit=request.before_commit,
        agreement=agreement,
    )
    return described, descriptions


def save_created() -> str:
    """Now, as the root of a checkpoint states it: ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _check_custom(custom: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
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


def _check_progress(request: SaveRequest) -> Mapping[str, int]:
    """The step and the epoch, as they are stored."""
    checked = {}
    for name, value in (("step", request.step), ("epoch", request.epoch)):
        if value is None:
            continue
        number = whole_number(name, value, hint=". Nothing was written")
        if abs(number) > _MOST_PROGRESS:
            raise ValueError(f"{name}= must fit into 64 bits, as a signed integer. Nothing was written")
        checked[name] = number
    return checked


def _refuse_what_differs(values: Mapping[str, object], descriptions: _Descriptions, size: int) -> None:
    """Refuse objects in shared trees of which every process has one of its own: one of them would be stored.

    Also where they are equal now, so that a job that could save once can save again.
    """
    for name, description in zip(values, descriptions, strict=True):
        if not isinstance(description, TreeDescription) or description.own:
            continue
        found = [
            f"{format_path(path)} is a {type(thing).__module__}.{type(thing).__qualname__}"
            for path, thing in of_each_process(description.flat.shape)
        ]
        if found:
            where = f"in {name!r}: " if name else ""
            more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
            raise UnsupportedLeafError(
                f"{where}{'; '.join(found[:20])}{more}: every process has one of its own, and of a tree that {size} processes "
                "save together only one would be stored; it goes under a name of its own in save_checkpointables. "
                "Nothing was written"
            )


def _lists(value: Any) -> Any:
    """JSON with its tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, list | tuple) else value


def _digest(members: Mapping[str, Member] | None, descriptions: _Descriptions) -> JSON:
    """Equal on two ranks exactly if they save the same names, and the same trees where they save them together.

    Notes may differ: on which device an array of one device was is said by each rank in its own way.
    """
    common = [
        _without_notes(description.tree.to_json())
        for description in descriptions
        if isinstance(description, TreeDescription) and not description.own
    ]
    names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
    return xxhash.xxh3_128_hexdigest(json.dumps([names, common], sort_keys=True).encode())


def _without_notes(tree: dict[str, JSON]) -> JSON:
    extras: Any = tree["extras"]
    kept = {leaf: {name: value for name, value in extra.items() if name != "notes"} for leaf, extra in extras.items()}
    columns = {name: column for name, column in tree.items() if name not in ("notes", "note")}
    return {**columns, "extras": kept}


def _same_trees(digests: Sequence[JSON]) -> dict[str, str]:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"the ranks {different} describe another tree than rank 0 (other keys, shapes, dtypes or values); every rank must "
            "save the same tree; what differs from process to process goes under a name of its own, in PerProcess(...). "
            "Nothing was written"
        )
    return {"save_id": new_save_id(), "created": save_created()}
