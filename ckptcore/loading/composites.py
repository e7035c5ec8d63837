"""Loading checkpoints of several checkpointables: each by its name, restored in place or built anew."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptcore.builtin.files import StagingDirectory, empty_directories
from ckptcore.commit.location import Place, Within
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, StorageError, TargetUndefinedError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, file_pieces
from ckptcore.loading.consistent_read import (
    ATTEMPTS,
    ConsistentRead,
    replaced_too_often,
    while_tree_unchanged,
    while_unchanged,
)
from ckptcore.loading.load import load_into_target, load_nothing, load_value
from ckptcore.loading.members import open_member, told_names
from ckptcore.loading.opening import open_names
from ckptcore.loading.wanted import Everything, Request, Wanted, plan_requests
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

__all__ = ["load_composite"]


def load_composite(
    location: Place, wanted: Wanted | Everything, context: Context, recording: Recording
) -> dict[str, object]:
    """Load checkpointables by name.

    Raises:
        TypeError: if an object that is restored in place is given as an abstract tree.
        CheckpointNotFoundError: if a name was never saved, or was deleted; nothing was changed.
        CorruptCheckpointError: also if everything that was saved is asked for, and some of it is gone.
        TreeMismatchError: if something is stored otherwise than it is asked for; nothing was changed.
        TargetUndefinedError: if it failed after an object was changed.
    """
    changed: list[str] = []
    """The names of what was restored in place, also by an attempt that was overtaken."""
    job = runtime_of(context).job() if context.job.reads != "alone" else None
    try:
        if job is not None and job.size > 1:
            return _load_together(location, wanted, context, recording, job, changed)
        return while_unchanged(
            location,
            context,
            lambda composite: _load_once(composite, location, wanted, context, recording, changed),
            open_names,
        )
    except Exception as error:
        if not changed or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{location} was replaced or deleted after {told_names(changed)} had been restored from it, and loading again failed: they "
            f"may belong to different moments now; load again before using them: {error}"
        ) from error


def _load_once(
    composite: CompositeCheckpoint,
    location: Place,
    wanted: Wanted | Everything,
    context: Context,
    recording: Recording,
    changed: list[str],
) -> dict[str, object]:
    """Load from a composite; adds the names of what was restored in place to `changed`, also where it fails."""
    with recording.phase("open"):
        requests = list(plan_requests(composite, location, wanted, context))
    # What is built anew comes first: if it cannot be read, nothing was changed yet.
    loaded = {
        request.name: _load_request(request, context, recording, changed)
        for request in sorted(requests, key=lambda request: request.in_place)
    }
    return _as_asked_for(loaded, wanted, composite)


def _as_asked_for(
    loaded: Mapping[str, object], wanted: Wanted | Everything, composite: CompositeCheckpoint
) -> dict[str, object]:
    """Return what was loaded, in the order of `wanted`; in that of the save if all checkpointables were loaded."""
    names = None if isinstance(wanted, Everything) else wanted.names
    return {name: loaded[name] for name in (composite.members if names is None else names) if name in loaded}


def _load_request(request: Request, context: Context, recording: Recording, changed: list[str]) -> object:
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
    from ckptcore.loading.joint_loading import (
        agreed_name,  # only jobs need it
        take_step,
    )

    agreement = Agreement(job, runtime_of(context).exchange_key(f"{agreed_name(location, recording)}/names"), recording)
    for number in range(ATTEMPTS):
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
    raise replaced_too_often(location)


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
        self._tries = ConsistentRead(location, context, open_names)
        self._composite: CompositeCheckpoint | None = None
        self._requests: dict[str, Request] = {}
        self._loaded: dict[str, object] = {}

    def stands(self) -> bool:
        """Whether what was opened is there still."""
        return self._tries.stands()

    def begin(self) -> JSON:
        """Open the composite, and look whether what is wanted is there."""
        self._composite = self._tries.open()
        with self._recording.phase("open"):
            requests = plan_requests(self._composite, self._location, self._wanted, self._context)
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
            context = (
                self._context if is_shared else replace(self._context, job=replace(self._context.job, reads="alone"))
            )
            self._loaded[name] = _load_request(request, context, self._recording, self._changed)
        elif is_shared:
            opened = open_member(composite, name, name, self._location, self._context)
            source = opened if opened.root is None else Within(self._location, name)
            load_nothing(source, self._context, self._recording)
        return None

    def end(self) -> JSON:
        """Make sure that all was read of one save."""
        from ckptcore.loading.joint_loading import Replaced  # only jobs need it

        if not self._tries.is_unchanged():
            raise Replaced
        return None

    def loaded(self) -> dict[str, object]:
        """By name, in the order in which it was asked for."""
        assert self._composite is not None  # the first step has opened it
        return _as_asked_for(self._loaded, self._wanted, self._composite)


def _add(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _load(request: Request, context: Context, recording: Recording) -> object:
    if request.is_files:
        return _load_files(request, context, recording)
    if request.in_place:
        load_into_target(request.source, request.like, context, recording, request.how)
        return request.like
    return load_value(request.source, request.like, context, recording, request.how)


def _load_files(request: Request, context: Context, recording: Recording) -> object:
    began = False

    def attempt(opened: Checkpoint) -> object:
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
        return while_tree_unchanged(request.source, context, attempt)
    except Exception as error:
        if not began or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{request.source} was replaced or deleted as {request.name!r} took its state from it, and loading again failed: "
            f"{error}; it may hold a mix now: load again before using it"
        ) from error


def _copy_out(opened: Checkpoint, directory: Path) -> None:
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
