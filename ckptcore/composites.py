"""Loading checkpoints of several checkpointables: each by its name, restored in place or built anew."""

from __future__ import annotations

import difflib
import enum
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from ckptcore.agreement import Agreement
from ckptcore.builtin.files_layout import FilesLayout, empty_directories
from ckptcore.builtin.staging import StagingDirectory
from ckptcore.commit import root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageError,
    TargetUndefinedError,
    TreeMismatchError,
    UnknownCheckpointableError,
)
from ckptcore.events import Recording
from ckptcore.flattening import PLACEHOLDER
from ckptcore.loading import (
    check_target,
    check_tree_of_objects,
    holds_objects,
    load_into_target,
    load_nothing,
    load_value,
)
from ckptcore.locations import Location, Place, Within, subdirectory
from ckptcore.model.tree import JSON
from ckptcore.opening import (
    Opened,
    OpenedComposite,
    Source,
    file_pieces,
    find_names,
    open_checkpoint,
    open_files,
    root_mark,
    while_unchanged,
)
from ckptcore.parts import PerProcess
from ckptcore.protocols import Coordinator, FilesHandler
from ckptcore.root import Member
from ckptcore.root_json import is_claim

__all__ = [
    "Everything",
    "Wanted",
    "is_deleted",
    "load_composite",
    "open_composite",
    "open_member",
    "present_members",
    "while_composite_unchanged",
]

T = TypeVar("T")

logger = logging.getLogger("ckptcore.composites")

Wanted: TypeAlias = Mapping[str, object] | Sequence[str] | None
"""What is asked for: names with what each is to be loaded like or into, names alone, or None for all there is."""


class Everything(enum.Enum):
    """What can be asked for besides what is `Wanted`."""

    SAVED = enum.auto()
    """All that was saved, as against all that is there: what is absent is an error."""


_ATTEMPTS: Final = 20
_NAMES_TOLD: Final = 20
_OF_RANK: Final = re.compile(r"(.+)\.rank_(0|[1-9][0-9]{0,8})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Request:
    """One checkpointable that is asked for.

    Attributes:
        name: its name.
        source: where it is; what other software wrote is open already.
        like: what it is loaded like or into; None: as it was saved.
        files: who restores it from files, where it wrote some; None for a tree, and where the files themselves are asked for.
        is_files: whether it is stored as files.
        in_place: whether `like` is changed.
    """

    name: str
    source: Source
    like: object
    files: FilesHandler | None
    is_files: bool
    in_place: bool


def open_composite(location: Place, context: Context) -> OpenedComposite:
    """Open a checkpoint of several checkpointables, or one tree that the software which wrote it knows by a name.

    Raises:
        CompositeCheckpointError: if it is one tree.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError: if there is none.
    """
    found = find_names(location, context)
    if found is not None:
        return found
    opened = open_checkpoint(location, context)
    raise CompositeCheckpointError(f"{opened.location.display} is one tree and has no names: use load")


def present_members(composite: OpenedComposite) -> dict[str, list[str]]:
    """The names of what is still there, each with its directories in the order of ranks. One request, however many there are.

    Of what other software wrote one can be a file. What was saved may have been deleted since. On storage without directories a deletion that died leaves a directory:
    `is_deleted` tells.
    """
    names = composite.location.store.list_names()
    there = {entry.removesuffix("/") for entry in names if entry.endswith("/") or composite.root is None}
    of_ranks: dict[str, list[int]] = {}
    for directory in there:
        if (matched := _OF_RANK.fullmatch(directory)) is not None:
            of_ranks.setdefault(matched[1], []).append(int(matched[2]))
    present = {}
    for name, member in composite.members.items():
        # Not by counting to the number of processes: a hostile root may state any.
        ranks = [0] if member.processes in (None, 1) else sorted(of_ranks.get(name, ()))
        directories = [member.directory(name, rank) for rank in ranks if rank < (member.processes or 1)]
        if found := [directory for directory in directories if directory in there]:
            present[name] = found
    return present


def is_deleted(composite: OpenedComposite, directory: str) -> bool:
    """Whether nothing is in a directory of the composite, or a deletion of what was there began."""
    inside = subdirectory(composite.location.store, directory)
    data = root_bytes(inside)
    if data is not None:
        return is_claim(data)
    return not inside.list_names() and not (composite.root is None and _is_file(composite.location, directory))


def _is_file(location: Location, name: str) -> bool:
    try:
        location.store.size(name)
    except ObjectNotFoundError:
        return False
    return True


def open_member(composite: OpenedComposite, name: str, directory: str, location: Place, context: Context) -> Opened:
    """Open what was saved under a name of the composite.

    Raises:
        CorruptCheckpointError: if something else stands in its directory.
        What `open_checkpoint` does; of what other software wrote it says how to get the others.
    """
    if composite.root is None:
        return _open_foreign_member(composite, name, directory, location, context)
    opened = open_checkpoint(Within(location, directory), context)
    if opened.root is None or not opened.root.member or opened.root.save_id != composite.root.save_id:
        raise CorruptCheckpointError(
            f"{opened.location.display} was replaced by something else than it was saved with; load it by its own location, "
            "or delete it"
        )
    kind = composite.members[name].kind
    if (opened.layout.name == FilesLayout.name) != (kind == "files"):
        raise CorruptCheckpointError(
            f"{opened.location.display} has the layout {opened.layout.name!r}, and {composite.location.display} says that it is "
            f"a {kind!r}: one of the two is damaged or forged; load another checkpoint"
        )
    return opened


def _open_foreign_member(
    composite: OpenedComposite, name: str, directory: str, location: Place, context: Context
) -> Opened:
    place = Within(location, directory)
    others = _told([other for other in composite.members if other != name])
    hint = f"ask load_checkpointables for the names that you need, to load the others without it: {others}"
    try:
        return (
            open_files(place, context) if composite.members[name].kind == "files" else open_checkpoint(place, context)
        )
    except (CheckpointNotFoundError, CompositeCheckpointError) as error:
        raise CheckpointNotFoundError(
            f"{name!r} in {composite.location.display} is nothing that an installed plugin reads: {error}; {hint}"
        ) from error
    except CheckpointError as error:
        error.add_note(hint)
        raise


def load_composite(
    location: Place, wanted: Wanted | Everything, context: Context, recording: Recording
) -> dict[str, object]:
    """Load checkpointables by name.

    Raises:
        TypeError: if what is wanted is one str.
        CheckpointNotFoundError: if a name was never saved, or was deleted; nothing was changed.
        CorruptCheckpointError: also if everything that was saved is asked for, and some of it is gone.
        TreeMismatchError: if something is stored otherwise than it is asked for; nothing was changed.
        TargetUndefinedError: if it failed after an object was changed.
    """
    if isinstance(wanted, str | bytes):
        raise TypeError(f"what is wanted is a list of names, or a mapping; write [{wanted!r}]")
    changed: list[str] = []
    """The names of what was restored in place, also by an attempt that was overtaken."""
    job = context.job() if context.reads != "all" else None
    try:
        if job is not None and job.size > 1:
            return _load_together(location, wanted, context, recording, job, changed)
        return while_composite_unchanged(
            open_composite(location, context),
            location,
            context,
            lambda composite: _load_once(composite, location, wanted, context, recording, changed),
        )
    except Exception as error:
        if not changed or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{location} was replaced or deleted after {_told(changed)} had been restored from it, and loading again failed: they "
            f"may belong to different moments now; load again before using them: {error}"
        ) from error


def while_composite_unchanged(
    composite: OpenedComposite, location: Place, context: Context, attempt: Callable[[OpenedComposite], T]
) -> T:
    """Read a checkpoint of several checkpointables; begin again if it was replaced meanwhile, so that all is of one save.

    Raises:
        What `open_composite` and `attempt` do.
    """
    for _ in range(_ATTEMPTS):
        try:
            made = attempt(composite)
        except CheckpointError:
            if root_mark(composite.location.store) == composite.data:
                raise
        else:
            if root_mark(composite.location.store) == composite.data:
                return made
        composite = open_composite(location, context)
    raise _replaced_too_often(location)


def _replaced_too_often(location: Place) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{location} was replaced {_ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def _load_once(
    composite: OpenedComposite,
    location: Place,
    wanted: Wanted | Everything,
    context: Context,
    recording: Recording,
    changed: list[str],
) -> dict[str, object]:
    """Load from a composite; adds the names of what was restored in place to `changed`, also where it fails."""
    with recording.phase("open"):
        requests = list(_requests(composite, location, wanted, context))
    # What is built anew comes first: if it cannot be read, nothing was changed yet.
    loaded = {
        request.name: _load_request(request, context, recording, changed)
        for request in sorted(requests, key=lambda request: request.in_place)
    }
    return {request.name: loaded[request.name] for request in requests}


def _load_request(request: _Request, context: Context, recording: Recording, changed: list[str]) -> object:
    """Load one checkpointable; adds its name to `changed` if it was restored in place, also where that fails."""
    try:
        loaded = _load(request, context, recording)
    except TargetUndefinedError:
        _add(changed, request.name)
        raise
    except Exception as error:
        if not changed:
            raise
        raise TargetUndefinedError(
            f"loading {request.name!r} failed, after {', '.join(changed)} had been restored: they belong to different "
            f"moments now; load again before using them: {error}"
        ) from error
    if request.in_place:
        _add(changed, request.name)
    return loaded


def _load_together(
    location: Place,
    wanted: Wanted | Everything,
    context: Context,
    recording: Recording,
    job: Coordinator,
    changed: list[str],
) -> dict[str, object]:
    """Load from a composite on all ranks of a job, name by name: who wants nothing of one is there for the others.

    Adds the names of what was restored in place to `changed`, also where it fails.
    """
    from ckptcore.joint_steps import take_step  # only who shares needs it

    agreement = Agreement(job, context.exchange_key(f"{location}/names"), recording)
    for number in range(_ATTEMPTS):
        attempt = _JointAttempt(location, wanted, context, recording, changed)
        joint = take_step(agreement, f"begin-{number}", attempt.begin, stands=attempt.stands)
        if joint.again:
            continue
        told = joint.payloads
        names: Any = agreement.lead(f"names-{number}", functools.partial(_united, told))
        steps: list[tuple[str, Callable[[], JSON]]] = [
            (f"load-{number}/{name}", functools.partial(attempt.load, name)) for name in names
        ]
        if not any(
            take_step(agreement, name, work, stands=attempt.stands).again
            for name, work in [*steps, (f"end-{number}", attempt.end)]
        ):
            return attempt.loaded()
    raise _replaced_too_often(location)


def _united(told: Sequence[Any]) -> JSON:
    """The names that any rank wants, first those that none restores in place, each with whether one does."""
    in_place: dict[str, bool] = {}
    for requests in told:
        for name, is_in_place in requests:
            in_place[name] = in_place.get(name, False) or is_in_place
    return sorted(in_place, key=lambda name: in_place[name])


class _JointAttempt:
    """What one rank does in one try to load from a composite together with others; its methods are steps, and return what is told."""

    def __init__(
        self,
        location: Place,
        wanted: Wanted | Everything,
        context: Context,
        recording: Recording,
        changed: list[str],
    ) -> None:
        self._location = location
        self._wanted = wanted
        self._context = context
        self._recording = recording
        self._changed = changed
        self._composite: OpenedComposite | None = None
        self._requests: dict[str, _Request] = {}
        self._loaded: dict[str, object] = {}

    def stands(self) -> bool:
        """Whether what was opened is there still."""
        return self._composite is None or root_mark(self._composite.location.store) == self._composite.data

    def begin(self) -> JSON:
        """Open the composite, and look whether what is wanted is there."""
        self._composite = open_composite(self._location, self._context)
        with self._recording.phase("open"):
            requests = _requests(self._composite, self._location, self._wanted, self._context)
            self._requests = {request.name: request for request in requests}
        return [[request.name, request.in_place] for request in self._requests.values()]

    def load(self, name: str) -> JSON:
        """Load what has a name; where this rank does not want it, be there for those that do."""
        composite, request = self._composite, self._requests.get(name)
        assert composite is not None  # the step before has opened it
        member = composite.members[name]
        is_shared = member.processes is None and member.kind == "tree"
        if request is not None:
            # What a process saved for itself it reads for itself.
            context = self._context if is_shared else replace(self._context, reads="all")
            self._loaded[name] = _load_request(request, context, self._recording, self._changed)
        elif is_shared:
            opened = open_member(composite, name, name, self._location, self._context)
            source = opened if opened.root is None else Within(self._location, name)
            load_nothing(source, self._context, self._recording)
        return None

    def end(self) -> JSON:
        """Make sure that all was read of one save."""
        from ckptcore.joint_steps import Replaced  # only who shares needs it

        if not self.stands():
            raise Replaced
        return None

    def loaded(self) -> dict[str, object]:
        """By name, in the order in which it was asked for."""
        return {name: self._loaded[name] for name in self._requests}


def _add(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _requests(
    composite: OpenedComposite, location: Place, wanted: Wanted | Everything, context: Context
) -> Iterator[_Request]:
    members = composite.members
    present = present_members(composite)
    if wanted is None:
        likes = _there_for(composite, present, context)
    elif isinstance(wanted, Everything):
        likes = _all_for(composite, present, context)
    else:
        likes = _likes(wanted)
    for name, like in likes.items():
        if like is PLACEHOLDER:
            continue
        if name not in members:
            raise UnknownCheckpointableError(_unknown(composite, name, list(present)))
        if name not in present:
            raise CheckpointNotFoundError(
                f"{composite.location.display} was saved with {name!r}, but it was deleted since; there are "
                f"{', '.join(present) or 'none'}"
            )
        member = members[name]
        directory = member.directory(name, _rank(composite, name, member, context))
        if directory not in present[name]:
            raise CheckpointNotFoundError(
                f"{composite.location.display} was saved with {directory!r}, the state of one process, but it was deleted "
                f"since; there are {_told(present[name])}"
            )
        opened = open_member(composite, name, directory, location, context)
        # What has no root would only be looked for again: nothing tells whether it was replaced.
        source = opened if opened.root is None else Within(location, directory)
        request = _request(name, source, member, like, context)
        if request.in_place and not request.is_files:
            check = check_target if context.registry.dispatch(like).checkpointable else check_tree_of_objects
            check(opened, like, context)
        yield request


def _there_for(composite: OpenedComposite, present: Mapping[str, Sequence[str]], context: Context) -> dict[str, object]:
    """All there is for this process; a warning says what was deleted."""
    absent = _absent_for(composite, present, context)
    if absent:
        logger.warning("%s was saved with %s, which was deleted since", composite.location.display, _told(absent))
    return dict.fromkeys([name for name in composite.members if name not in absent])


def _all_for(composite: OpenedComposite, present: Mapping[str, Sequence[str]], context: Context) -> dict[str, object]:
    """All that was saved for this process.

    Raises:
        CorruptCheckpointError: if some of it is not there.
    """
    absent = list(_absent_for(composite, present, context))
    if absent:
        raise CorruptCheckpointError(
            f"{composite.location.display} was saved with {_told(absent)}, which was deleted or lost since; ask for the names "
            "that you need, or for this very checkpoint to get what is left of it"
        )
    return dict.fromkeys(composite.members)


def _absent_for(composite: OpenedComposite, present: Mapping[str, Sequence[str]], context: Context) -> dict[str, None]:
    """The names of which nothing is there for this process."""
    absent: dict[str, None] = {}
    for name, member in composite.members.items():
        directories = present.get(name, ())
        directory = member.directory(name, _rank(composite, name, member, context)) if directories else ""
        if directory not in directories or is_deleted(composite, directory):
            absent[name] = None
    return absent


def _likes(wanted: Mapping[str, object] | Sequence[str]) -> dict[str, object]:
    likes = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    return {name: like.value if isinstance(like, PerProcess) else like for name, like in likes.items()}


def _told(names: Collection[str]) -> str:
    """Names for a message: a hostile root may list any number of them."""
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return (", ".join(itertools.islice(names, _NAMES_TOLD)) or "none") + more


def _unknown(composite: OpenedComposite, name: str, present: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), present, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{composite.location.display} was saved without {name!r}; there are {', '.join(present) or 'none'}{hint}"


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


def _request(name: str, source: Source, member: Member, like: object, context: Context) -> _Request:
    is_files = member.kind == "files"
    if like is None:
        return _Request(name, source, None, None, is_files, in_place=False)
    named = context.registry.dispatch_named(like)
    if is_files:
        if named.files is None:
            raise TreeMismatchError(
                f"{name!r} is stored as files that its object wrote, and a {type(like).__qualname__} does not restore itself from "
                "files: pass an object like the one that was saved, or None for the files themselves",
                [f"{name}: files are stored"],
            )
        return _Request(name, source, like, named.files, is_files, in_place=True)
    is_object = context.registry.dispatch(like).checkpointable is not None
    in_place = is_object or holds_objects(like, context.registry)
    return _Request(name, source, like, None, is_files, in_place=in_place)


def _load(request: _Request, context: Context, recording: Recording) -> object:
    if request.is_files:
        return _load_files(request, context, recording)
    if request.in_place:
        load_into_target(request.source, request.like, context, recording)
        return request.like
    return load_value(request.source, request.like, context, recording)


def _load_files(request: _Request, context: Context, recording: Recording) -> object:
    began = False

    def attempt(opened: Opened) -> object:
        nonlocal began
        with recording.phase("read") as phase:
            phase.nbytes = sum(record.size for record in opened.objects.values())
            if request.files is None:
                return {key: b"".join(file_pieces(opened, record)) for key, record in opened.objects.items()}
            directory = StagingDirectory()
            try:
                _copy_out(opened, directory.path)
            except BaseException:
                directory.close()
                raise
        began = True
        try:
            with recording.phase("restore"):
                return request.files.load(request.like, directory.path)
        except Exception as error:
            raise TargetUndefinedError(
                f"{request.name!r} failed as it took its state from {request.source}: {type(error).__name__}: {error}; it may "
                "hold a mix now: make it anew and load again"
            ) from error
        finally:
            directory.close()

    try:
        return while_unchanged(request.source, context, attempt)
    except Exception as error:
        if not began or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{request.source} was replaced or deleted as {request.name!r} took its state from it, and loading again failed: "
            f"{error}; it may hold a mix now: load again before using it"
        ) from error


def _copy_out(opened: Opened, directory: Path) -> None:
    """Write every file to a local directory, verified, and make the directories that had none.

    Raises:
        CorruptCheckpointError: if a file is damaged, or no file system can hold these files beside each other.
        StorageError: if the local disk fails.
    """
    empty = dict.fromkeys(empty_directories(opened.state))
    for key, record in [*opened.objects.items(), *empty.items()]:
        path = os.path.join(directory, *key.split("/"))
        try:
            os.makedirs(path if record is None else os.path.dirname(path), exist_ok=True)
            if record is not None:
                with open(path, "xb") as file:
                    file.writelines(file_pieces(opened, record))
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise CorruptCheckpointError(
                f"{opened.location.display} lists the file {key!r} twice, or as a directory too: {error}; load another checkpoint",
                key=key,
            ) from error
        except CheckpointError:
            raise
        except OSError as error:
            raise StorageError(
                error.errno, f"cannot copy {key!r} of {opened.location.display} to {path}: {error}; nothing was changed"
            ) from error
