"""Loading checkpoints of several checkpointables: each by its name, restored in place or built anew."""

from __future__ import annotations

import difflib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from ckptcore.commit import root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    TargetUndefinedError,
    TreeMismatchError,
)
from ckptcore.events import Recording
from ckptcore.flattening import PLACEHOLDER
from ckptcore.loading import check_target, load_into_target, load_value
from ckptcore.locations import LocationLike, Within
from ckptcore.opening import Opened, OpenedComposite, find_composite, open_checkpoint, while_unchanged
from ckptcore.parts import PerProcess
from ckptcore.protocols import FilesHandler
from ckptcore.root import Member

__all__ = ["Wanted", "load_composite", "open_composite", "present_members", "while_composite_unchanged"]

T = TypeVar("T")

logger = logging.getLogger("ckptcore.composites")

Wanted: TypeAlias = Mapping[str, object] | Sequence[str] | None
"""What is asked for: names with what each is to be loaded like or into, names alone, or None for all there is."""

_ATTEMPTS: Final = 20
_PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Request:
    """One checkpointable that is asked for.

    Attributes:
        name: its name.
        place: where it is.
        like: what it is loaded like or into; None: as it was saved.
        files: who restores it from files, where it wrote some; None for a tree, and where the files themselves are asked for.
        is_files: whether it is stored as files.
        in_place: whether `like` is changed.
    """

    name: str
    place: Within
    like: object
    files: FilesHandler | None
    is_files: bool
    in_place: bool


def open_composite(location: LocationLike, context: Context) -> OpenedComposite:
    """Open a checkpoint of several checkpointables.

    Raises:
        CompositeCheckpointError: if it is one tree.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError: if there is none.
    """
    found = find_composite(location, context)
    if found is not None:
        return found
    opened = open_checkpoint(location, context)
    raise CompositeCheckpointError(f"{opened.location.display} is one tree and has no names: use load")


def present_members(composite: OpenedComposite, location: LocationLike, context: Context) -> Iterator[str]:
    """The names of what is still there: what was saved may have been deleted since."""
    for name, member in composite.root.members.items():
        if any(composite.location.store.list_names(directory) for directory in member.directories(name)):
            yield name


def load_composite(location: LocationLike, wanted: Wanted, context: Context, recording: Recording) -> dict[str, object]:
    """Load checkpointables by name.

    Raises:
        CheckpointNotFoundError: if a name was never saved, or was deleted; nothing was changed.
        TreeMismatchError: if something is stored otherwise than it is asked for; nothing was changed.
        TargetUndefinedError: if it failed after an object was changed.
    """
    return while_composite_unchanged(
        open_composite(location, context),
        location,
        context,
        lambda composite: _load_once(composite, location, wanted, context, recording),
    )


def while_composite_unchanged(
    composite: OpenedComposite, location: LocationLike, context: Context, attempt: Callable[[OpenedComposite], T]
) -> T:
    """Read a checkpoint of several checkpointables; begin again if it was replaced meanwhile, so that all is of one save.

    Raises:
        What `open_composite` and `attempt` do.
    """
    for _ in range(_ATTEMPTS):
        try:
            made = attempt(composite)
        except (CorruptCheckpointError, CheckpointNotFoundError, TargetUndefinedError):
            if root_bytes(composite.location.store) == composite.data:
                raise
        else:
            if root_bytes(composite.location.store) == composite.data:
                return made
        composite = open_composite(location, context)
    raise CorruptCheckpointError(
        f"{location} was replaced {_ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def _load_once(
    composite: OpenedComposite, location: LocationLike, wanted: Wanted, context: Context, recording: Recording
) -> dict[str, object]:
    with recording.phase("open"):
        requests = list(_requests(composite, location, wanted, context))
        for request in requests:
            _check(request, composite, context)
    loaded: dict[str, object] = {}
    changed: list[str] = []
    # What is built anew comes first: if it cannot be read, nothing was changed yet.
    for request in sorted(requests, key=lambda request: request.in_place):
        try:
            loaded[request.name] = _load(request, context, recording)
        except Exception as error:
            if not changed or isinstance(error, TargetUndefinedError):
                raise
            raise TargetUndefinedError(
                f"loading {request.name!r} failed, after {', '.join(changed)} had been restored: they belong to different "
                f"moments now; load again before using them: {error}"
            ) from error
        if request.in_place:
            changed.append(request.name)
    return {request.name: loaded[request.name] for request in requests}


def _requests(
    composite: OpenedComposite, location: LocationLike, wanted: Wanted, context: Context
) -> Iterator[_Request]:
    members = composite.root.members
    present = list(present_members(composite, location, context))
    if wanted is None:
        absent = [name for name in members if name not in present]
        if absent:
            logger.warning(
                "%s was saved with %s, which was deleted since", composite.location.display, ", ".join(absent)
            )
        wanted = present
    likes = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    for name, like in likes.items():
        if like is PLACEHOLDER:
            continue
        if name not in present:
            raise CheckpointNotFoundError(_not_there(composite, name, present))
        member = members[name]
        place = Within(location, member.directory(name, _rank(composite, name, member, context)))
        yield _request(name, place, member, like.value if isinstance(like, PerProcess) else like, context)


def _not_there(composite: OpenedComposite, name: str, present: Sequence[str]) -> str:
    display = composite.location.display
    if name in composite.root.members:
        return f"{display} was saved with {name!r}, but it was deleted since; there are {', '.join(present) or 'none'}"
    near = difflib.get_close_matches(str(name), present, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{display} was saved without {name!r}; there are {', '.join(present) or 'none'}{hint}"


def _rank(composite: OpenedComposite, name: str, member: Member, context: Context) -> int:
    """The process whose state is asked for: this one's."""
    job = context.job()
    if member.processes is None or member.processes == job.size:
        return job.rank
    raise TreeMismatchError(
        f"{name!r} in {composite.location.display} has a state for each of {member.processes} processes, and this job has "
        f"{job.size}: which one is this process to take? Load what you need by its own location, such as "
        f"{composite.location.display.rstrip('/')}/{member.directory(name, 0)}",
        [f"{name}: {member.processes} processes saved it, {job.size} load it"],
    )


def _request(name: str, place: Within, member: Member, like: object, context: Context) -> _Request:
    is_files = member.kind == "files"
    if like is None:
        return _Request(name, place, None, None, is_files, in_place=False)
    named = context.registry.dispatch_named(like)
    if is_files:
        if named.files is None:
            raise TreeMismatchError(
                f"{name!r} is stored as files that its object wrote, and a {type(like).__qualname__} does not restore itself from "
                "files: pass an object like the one that was saved, or None for the files themselves",
                [f"{name}: files are stored"],
            )
        return _Request(name, place, like, named.files, is_files, in_place=True)
    handled = context.registry.dispatch(like)
    return _Request(name, place, like, None, is_files, in_place=handled.checkpointable is not None)


def _check(request: _Request, composite: OpenedComposite, context: Context) -> None:
    """Refuse what cannot be loaded before anything is changed."""
    opened = open_checkpoint(request.place, context)
    if opened.root is None or not opened.root.member or opened.root.save_id != composite.root.save_id:
        raise CorruptCheckpointError(
            f"{opened.location.display} was replaced by something else than it was saved with; load it by its own location, "
            "or delete it"
        )
    if request.in_place and not request.is_files:
        check_target(opened, request.like, context)


def _load(request: _Request, context: Context, recording: Recording) -> object:
    try:
        if request.is_files:
            return _load_files(request, context, recording)
        if request.in_place:
            load_into_target(request.place, request.like, context, recording)
            return request.like
        return load_value(request.place, request.like, context, recording)
    except CheckpointError:
        raise
    except Exception as error:
        if request.in_place:
            raise TargetUndefinedError(
                f"{request.name!r} failed as it took its state from {request.place}: {type(error).__name__}: {error}; it may "
                "hold a mix now: make it anew and load again"
            ) from error
        raise


def _load_files(request: _Request, context: Context, recording: Recording) -> object:
    def attempt(opened: Opened) -> object:
        with recording.phase("read") as phase:
            phase.nbytes = sum(record.size for record in opened.objects.values())
            if request.files is None:
                return {key: opened.store.get(key) for key in opened.objects}
            directory = tempfile.mkdtemp(prefix="ckptcore-")
            try:
                _copy_out(opened, directory)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        try:
            with recording.phase("restore"):
                return request.files.load(request.like, Path(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    return while_unchanged(request.place, context, attempt)


def _copy_out(opened: Opened, directory: str) -> None:
    """Write every file to a local directory, verified."""
    for key, record in opened.objects.items():
        path = os.path.join(directory, *key.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            for start in range(0, record.size, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, record.size)
                data = opened.store.get(key, start, stop)
                if len(data) != stop - start:
                    raise CorruptCheckpointError(
                        f"{key} ends at byte {start + len(data)}, where {record.size} were written",
                        key=key, start=start + len(data), stop=record.size,
                    )  # fmt: skip
                file.write(data)
