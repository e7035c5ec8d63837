"""Loads of several checkpointables by name: requests, and the load of each, in place or as a new object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Literal, TypeAlias

from ckptcore.commit.location import AnyLocation, SubPath
from ckptcore.commit.root import Member
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PartialLoadError,
    TargetUndefinedError,
    TreeMismatchError,
    UnknownCheckpointableError,
)
from ckptcore.events import Recording, logger_named
from ckptcore.loading.in_place import Undo, check_target, load_into_target
from ckptcore.loading.load import DEFAULT_REQUEST, LoadAs, LoadRequest, choose_strategy
from ckptcore.loading.targets import (
    load_files_into,
    load_nothing,
    load_value,
)
from ckptcore.model.tree import MAX_DEPTH
from ckptcore.opening.checkpoint import CompositeCheckpoint, Source, format_names
from ckptcore.opening.members import is_deleted, open_member, present_members
from ckptcore.opening.open_checkpoints import ConsistentRead, open_names
from ckptcore.plugins import Plugins
from ckptcore.protocols.values import FilesHandler
from ckptcore.records import dataclass
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER, PerProcess
from ckptcore.tree.suggestions import NameSuggestions

logger = logger_named("ckptcore.loading")

Abstracts: TypeAlias = Mapping[str, object] | Sequence[str] | None
"""Objects to build: abstract trees by name, names alone, or None."""

Absent: TypeAlias = Literal["skip", "error"]
"""Treatment of objects that were deleted or lost since the save."""


@dataclass(frozen=True, slots=True)
class CompositeRequest:
    """Objects to load. Without arguments: every object that exists.

    Attributes:
        abstract: objects to build; None: all objects, or no object if `into` is given.
        into: objects to restore in place, by name.
        absent: treatment of objects that were deleted or lost since the save, if all objects are requested: skip them
            with a warning, or raise an error.
    """

    abstract: Abstracts = None
    into: Mapping[str, object] | None = None
    absent: Absent = "skip"

    def __post_init__(self) -> None:
        """Check the types.

        Raises:
            TypeError: `abstract` is a str or bytes, or `into` is not a mapping.
            ValueError: a name is in both `abstract` and `into`.
        """
        if isinstance(self.abstract, str | bytes):
            raise TypeError(f"abstract={self.abstract!r}: pass a list of names, [{self.abstract!r}], or a mapping")
        if self.into is None:
            return
        if not isinstance(self.into, Mapping):
            raise TypeError(f"into={self.into!r}: pass a mapping of names to the objects to restore")
        for name in self.abstract or ():
            if name in self.into:
                raise ValueError(f"{name!r} is in both abstract and into: pass it in one of them")

    @property
    def names(self) -> Sequence[str] | None:
        """The names, those of `abstract` first; None for all objects."""
        return None if self.abstract is None and self.into is None else [*(self.abstract or ()), *(self.into or ())]

    @property
    def likes(self) -> dict[str, tuple[object, bool]]:
        """The abstract tree or object for each name, with True if it is restored in place."""
        abstract = self.abstract if isinstance(self.abstract, Mapping) else dict.fromkeys(self.abstract or ())
        built = {name: (like, False) for name, like in abstract.items()}
        return built | {name: (like, True) for name, like in (self.into or {}).items()}


class Changes(IntEnum):
    """Kind of change that a load makes. Loads run in this order, so that an early error leaves more unchanged."""

    NOTHING = 0  #: the load returns a new value
    OBJECTS = 1  #: objects that may refuse their state; their old state is put back if another object refuses
    FILES = 2  #: an object that restores itself from files
    ARRAYS = 3  #: arrays and other leaves of a target


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """A request for one checkpointable that exists. A target to restore in place was checked against the stored tree.

    Attributes:
        name: its name.
        source: its location, or the open checkpoint.
        like: its abstract tree, or the object to restore in place; None: the saved value.
        options: the options of its load.
        files: restores `like` from stored files; None for a tree, and for files that are loaded as bytes.
        changes: what the load changes.
        nbytes: bytes of the stored arrays.
    """

    name: str
    source: Source
    like: object
    options: LoadRequest
    files: FilesHandler | None
    changes: Changes
    nbytes: int


class CompositeLoad:
    """A load of several checkpointables by name, in the order of `Changes`.

    Attributes:
        location, context, recording: the arguments.
        attempts: the attempts to read the checkpoint.
    """

    def __init__(self, location: AnyLocation, wanted: CompositeRequest, context: Context, recording: Recording) -> None:
        """Keep the arguments. `run` opens the checkpoint."""
        self.location = location
        self.context = context
        self.recording = recording
        self.attempts = ConsistentRead(location, context, open_names)
        self._wanted = wanted
        self._undo = Undo()
        # Names of objects whose change cannot be undone, over all attempts.
        self._changed: dict[str, None] = {}
        # By name: errors for objects whose per-process states do not fit the number of processes of this job.
        self._refused: dict[str, TreeMismatchError] = {}

    def run(self) -> dict[str, object]:
        """Load the requested objects. Returns them in the order of the request, or of the save if all are requested.

        Raises:
            TypeError: `abstract` has an object that must be restored in place, or `into` has None for a name.
            CheckpointNotFoundError: a name was not saved, or was deleted or lost. Nothing was changed.
            CorruptCheckpointError: the checkpoint is damaged. Also if all objects are requested with
                ``absent="error"``, and one is missing.
            TreeMismatchError: an object does not match its request. Nothing was changed.
            PartialLoadError: each process saved a separate state of an object to restore, and the job that saved had
                another number of processes. All other objects were loaded.
            TargetUndefinedError: the load failed after an object was changed.
        """
        try:
            strategy = choose_strategy(self.context, runtime_of(self.context))
            if strategy is None:
                loaded = self.attempts.retry_if_replaced(self._load)
            else:
                from ckptcore.loading.joint import load_composite_collectively  # only jobs need it

                loaded = load_composite_collectively(self, strategy)
        except Exception as error:
            if isinstance(error, TargetUndefinedError):
                raise
            if not self._changed:
                self._undo.run(error)  # this rank may have changed objects before another rank failed
                raise
            raise TargetUndefinedError(
                f"{self.location} was replaced or deleted after {format_names(self._changed)} had been restored from "
                "it, and loading again failed. The objects may have states of different saves. Before using them, load "
                f"a sound checkpoint into them, or create them again: {error}"
            ) from error
        if self._refused:
            raise self._partial_load(loaded)
        return loaded

    def _partial_load(self, loaded: Mapping[str, object]) -> PartialLoadError:
        """Return the error for the objects that were not loaded."""
        errors = list(self._refused.values())
        others = f"{format_names(loaded)} was loaded. " if loaded else ""
        differences = [line for error in errors for line in error.differences]
        return PartialLoadError(f"{others}{'. '.join(map(str, errors))}", differences, list(self._refused))

    def _load(self, composite: CompositeCheckpoint) -> dict[str, object]:
        requests = self.plan(composite)
        loaded = {
            request.name: self.load(request, self.context)
            for request in sorted(requests, key=lambda request: request.changes)
        }
        return self.in_order(composite, loaded)

    def plan(self, composite: CompositeCheckpoint) -> Sequence[MemberRequest]:
        """Find the requested objects, and check that they can be loaded. Reads no array, and changes nothing."""
        self._refused.clear()
        with self.recording.phase("open"):
            requests = list(self._requests(composite))
        if (progress := self.recording.progress) is not None:
            progress.later = sum([request.nbytes for request in requests])
            progress.plan(0)
        return requests

    def _requests(self, composite: CompositeCheckpoint) -> Iterator[MemberRequest]:
        """Yield the requests in the order of the save.

        Checks that each member exists, and that the stored tree can be loaded into a target that is restored in place.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, TreeMismatchError, TypeError: see `run`.
        """
        members, present, display = composite.members, present_members(composite), composite.location.display
        likes = self._wanted.likes
        if self._wanted.names is None:
            likes = dict.fromkeys(_existing_names(composite, present, self._wanted.absent, self.context), (None, False))
        order = {name: number for number, name in enumerate(members)}
        # Every process of a job calls objects in this order, because `state_dict` may be collective.
        for name, (asked, in_place) in sorted(likes.items(), key=lambda item: order.get(item[0], -1)):
            like, options = _unwrap(asked)
            if like is PLACEHOLDER:
                continue
            if name not in members:
                raise UnknownCheckpointableError(_unknown(composite, name, list(present)))
            if name not in present:
                raise CheckpointNotFoundError(
                    f"{display}: {name!r} was saved and deleted later, or lost. Existing names: "
                    f"{', '.join(present) or 'none'}"
                )
            member = members[name]
            try:
                directory = _directory(composite, name, member, self.context)
            except TreeMismatchError as error:
                if not in_place:
                    raise
                self._refused[name] = error
                continue
            if directory not in present[name]:
                raise CheckpointNotFoundError(
                    f"{display}: {directory!r}, the state of one process, was saved and deleted later, or lost. "
                    f"Existing directories: {format_names(present[name])}"
                )
            checkpoint = open_member(composite, name, directory, self.location, self.context)
            # Do not retry without a root: there is no save id to compare.
            source = checkpoint if checkpoint.root is None else SubPath(self.location, directory)
            files = _files_handler(name, member, like, options, in_place, self.context)
            changes = Changes.NOTHING if files is None else Changes.FILES
            if in_place and member.kind == "tree":
                is_filled = check_target(checkpoint, like, self.context, options)
                changes = Changes.ARRAYS if is_filled else Changes.OBJECTS
            yield MemberRequest(name, source, like, options, files, changes, checkpoint.tree.nbytes)

    def load(self, request: MemberRequest, context: Context) -> object:
        """Load one checkpointable."""
        if self.recording.progress is not None:
            self.recording.progress.later -= request.nbytes  # the load itself plans the exact number
        try:
            loaded = self._load_member(request, context)
        except Exception as error:
            # The failed load undid its own changes, unless it raised TargetUndefinedError.
            restored = list(self._changed)
            if isinstance(error, TargetUndefinedError):
                self._changed[request.name] = None
            if not restored:
                raise
            raise TargetUndefinedError(
                f"loading {request.name!r} failed after {', '.join(restored)} had been restored. The objects may have "
                "states of different saves. Before using them, load a sound checkpoint into all of them, or create "
                f"them again: {error}"
            ) from error
        if request.changes >= Changes.FILES:
            self._changed[request.name] = None
        return loaded

    def _load_member(self, request: MemberRequest, context: Context) -> object:
        source, like = request.source, request.like
        if request.files is not None:
            return load_files_into(source, request.name, like, request.files, context, self.recording)
        if request.changes is Changes.NOTHING:
            return load_value(source, like, context, self.recording, request.options)
        return load_into_target(source, like, context, self.recording, request.options, self._undo)

    def take_part(self, composite: CompositeCheckpoint, name: str) -> None:
        """Take part in the collective load of a checkpointable that this process does not request."""
        checkpoint = open_member(composite, name, name, self.location, self.context)
        source = checkpoint if checkpoint.root is None else SubPath(self.location, name)
        load_nothing(source, self.context, self.recording)

    def in_order(self, composite: CompositeCheckpoint, loaded: Mapping[str, object]) -> dict[str, object]:
        """Return loaded objects in the order of the request; in the order of the save if all were requested."""
        wanted = self._wanted.names
        return {name: loaded[name] for name in (composite.members if wanted is None else wanted) if name in loaded}


def _existing_names(
    composite: CompositeCheckpoint, present: Mapping[str, Sequence[str]], absent: Absent, context: Context
) -> dict[str, None]:
    """Return the names of all objects that exist for this process. Logs a warning that lists missing objects.

    Raises:
        CorruptCheckpointError: `absent` is ``"error"``, and an object is missing; or other software wrote the
            checkpoint, and none of its objects exists.
    """
    missing: dict[str, None] = {}
    for name, member in composite.members.items():
        directories = present.get(name, ())
        directory = _directory(composite, name, member, context) if directories else ""
        if directory not in directories or is_deleted(composite, directory):
            missing[name] = None
    if missing and composite.root is None and len(missing) == len(composite.members):
        raise CorruptCheckpointError(
            f"{composite.location.display}: {format_names(missing)} is listed, and nothing of it exists: copy it "
            "again, or load another checkpoint",
            key=next(iter(missing)),
        )
    if missing and absent == "error":
        raise CorruptCheckpointError(
            f"{composite.location.display}: {format_names(missing)} was saved, and deleted or lost later. Request the "
            "names that you need, or load this checkpoint explicitly to get the remaining objects"
        )
    if missing:
        logger.warning("%s: %s was saved and deleted later, or lost", composite.location.display, format_names(missing))
    return dict.fromkeys([name for name in composite.members if name not in missing])


def _unwrap(asked: object) -> tuple[object, LoadRequest]:
    """Return an abstract tree or object without its nested wrappers, and the options of the wrappers."""
    options = DEFAULT_REQUEST
    while True:
        if isinstance(asked, PerProcess):
            asked = asked.value
        elif isinstance(asked, LoadAs):
            options = asked.request
            asked = asked.like
        else:
            return asked, options


def _unknown(composite: CompositeCheckpoint, name: str, present: Sequence[str]) -> str:
    near = NameSuggestions(present).nearest(str(name))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{composite.location.display} has no {name!r}. Existing names: {', '.join(present) or 'none'}{hint}"


def _directory(composite: CompositeCheckpoint, name: str, member: Member, context: Context) -> str:
    """Return the directory of a member that contains the state for this process.

    Raises:
        TreeMismatchError: each process saved a separate state, and this job has another number of processes.
    """
    job = runtime_of(context).job()
    if member.processes is None or member.processes == job.size:
        return member.directory(name, job.rank)
    raise TreeMismatchError(
        f"{name!r} in {composite.location.display} has a separate state for each of {member.processes} processes, but "
        f"this job has {job.size}. Load the state that each process needs by its own location, such as "
        f"{composite.location.display.rstrip('/')}/{member.directory(name, 0)}, and other objects by their names",
        [f"{name}: {member.processes} processes saved it, {job.size} load it"],
    )


def _files_handler(
    name: str, member: Member, like: object, options: LoadRequest, in_place: bool, context: Context
) -> FilesHandler | None:
    """Check a request for an object that exists. Return the handler that restores it from files; None for others.

    Args:
        name, member: the object.
        like, options: the abstract tree or the object, and its options.
        in_place: True for an object to restore in place.
        context: its plugins dispatch the object.

    Raises:
        TreeMismatchError: the object is stored as files, and `options` are for trees or `like` cannot be restored from
            files.
        TypeError: `like` is an object that must be restored in place, and `in_place` is False. Also if `like` is None,
            and `in_place` is True.
    """
    if member.kind == "files" and options != DEFAULT_REQUEST:
        raise TreeMismatchError(
            f"{name!r} is stored as files of an object, not as a tree: request it without LoadAs, which is only for "
            "trees",
            [f"{name}: files are stored"],
        )
    if like is None:
        if in_place:
            raise TypeError(f"into={{{name!r}: None}}: pass the object to restore, or the name in abstract=[{name!r}]")
        return None
    registry = runtime_of(context).registry
    files = registry.dispatch_named(like).files
    if not in_place and (files is not None or _holds_objects(like, registry)):
        raise TypeError(
            f"abstract={{{name!r}: {type(like).__qualname__}(...)}} is or contains an object with a state: pass it as "
            f"into={{{name!r}: ...}} to restore it in place, or ckptcore.abstract(...) of it to load its state"
        )
    if member.kind == "files" and files is None:
        raise TreeMismatchError(
            f"{name!r} is stored as files of an object, and a {type(like).__qualname__} cannot be restored from "
            "files: pass an object like the one that was saved, or None to load the files as bytes",
            [f"{name}: files are stored"],
        )
    return files if member.kind == "files" else None


def _holds_objects(node: object, registry: Plugins, depth: int = MAX_DEPTH) -> bool:
    """Return True if a tree is, or contains, an object that must be restored in place."""
    handlers = registry.dispatch(node)
    if handlers.checkpointable is not None:
        return handlers.checkpointable.is_object
    container = handlers.container
    if container is None or depth == 0:
        return False  # flattening raises an error for such a tree
    if container.is_object(node):
        return True
    return any(_holds_objects(child, registry, depth - 1) for child in container.flatten(node).children)
