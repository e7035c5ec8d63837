"""Requests for a checkpoint of several objects: names, abstract trees, and objects that are restored in place."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptcore.commit.location import Place, Within
from ckptcore.commit.root import Member
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TreeMismatchError,
    UnknownCheckpointableError,
)
from ckptcore.loading.checkpoint import CompositeCheckpoint, Source
from ckptcore.loading.load import check_target, holds_objects
from ckptcore.loading.load_requests import AS_IT_IS, LoadAs, LoadRequest
from ckptcore.loading.members import is_deleted, open_member, present_members, told_names
from ckptcore.protocols import FilesHandler
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER
from ckptcore.tree.per_process import PerProcess
from ckptcore.tree.suggestions import NearNames

__all__ = ["Abstracts", "Everything", "Request", "Wanted", "plan_requests"]

logger = logging.getLogger("ckptcore.wanted")

Abstracts: TypeAlias = Mapping[str, object] | Sequence[str] | None
"""Objects to build anew: abstract trees by name, names alone, or None."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Objects to load. Without arguments: every object that exists.

    Attributes:
        abstract: objects to build anew; None: all, unless `into` has names.
        into: objects to restore in place, by name.
    """

    abstract: Abstracts = None
    into: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        """Check the types.

        Raises:
            TypeError: for one str, and for an `into` that is not a mapping.
            ValueError: if a name is to be both built anew and restored in place.
        """
        if isinstance(self.abstract, str | bytes):
            raise TypeError(f"abstract={self.abstract!r}: give a list of names, [{self.abstract!r}], or a mapping")
        if self.into is None:
            return
        if not isinstance(self.into, Mapping):
            raise TypeError(f"into={self.into!r}: give a mapping of names to the objects to restore")
        for name in self.abstract or ():
            if name in self.into:
                raise ValueError(f"{name!r} is in abstract and in into: give it once")

    @property
    def names(self) -> Sequence[str] | None:
        """The names, those of `abstract` first; None for all objects."""
        return None if self.abstract is None and self.into is None else [*(self.abstract or ()), *(self.into or ())]

    @property
    def likes(self) -> dict[str, tuple[object, bool]]:
        """For each name the abstract tree or the object, and True for an object that is restored in place."""
        abstract = self.abstract if isinstance(self.abstract, Mapping) else dict.fromkeys(self.abstract or ())
        built = {name: (like, False) for name, like in abstract.items()}
        return built | {name: (like, True) for name, like in (self.into or {}).items()}


class Everything(enum.Enum):
    """A request besides those of `Wanted`."""

    SAVED = enum.auto()
    """All that was saved, as against all that is there: what is absent is an error."""


@dataclass(frozen=True, slots=True)
class Request:
    """One checkpointable that is asked for.

    Attributes:
        name: its name.
        source: where it is; what other software wrote is open already.
        like: what it is loaded like or into; None: as it was saved.
        how: which of it, and what may differ.
        files: who restores it from files, where it wrote some; None for a tree, and where the files themselves are asked for.
        is_files: whether it is stored as files.
        in_place: whether `like` is changed.
    """

    name: str
    source: Source
    like: object
    how: LoadRequest
    files: FilesHandler | None
    is_files: bool
    in_place: bool


def plan_requests(
    composite: CompositeCheckpoint, location: Place, wanted: Wanted | Everything, context: Context
) -> Iterator[Request]:
    """What is to be loaded, each looked at as it comes: whether it is there, and whether what it is loaded into can take it.

    The order is that of the save, not that of `wanted`.

    Raises:
        CheckpointNotFoundError: if a name was never saved, or was deleted.
        CorruptCheckpointError: also if everything that was saved is asked for, and some of it is gone.
        TreeMismatchError: if something is stored otherwise than it is asked for.
        TypeError: if an object that is restored in place is given as an abstract tree.
    """
    members = composite.members
    present = present_members(composite)
    if isinstance(wanted, Everything):
        likes = Wanted(_all_for(composite, present, context)).likes
    elif wanted.names is None:
        likes = Wanted(_there_for(composite, present, context)).likes
    else:
        likes = wanted.likes
    order = {name: number for number, name in enumerate(members)}
    # Every process of a job asks objects for their state in this order, because `state_dict` may be collective.
    for name, (asked, in_place) in sorted(likes.items(), key=lambda item: order.get(item[0], -1)):
        like, how = _unwrapped(asked)
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
                f"since; there are {told_names(present[name])}"
            )
        opened = open_member(composite, name, directory, location, context)
        # What has no root would only be looked for again: nothing tells whether it was replaced.
        source = opened if opened.root is None else Within(location, directory)
        request = _request(name, source, member, like, how, in_place, context)
        if request.in_place and not request.is_files:
            check_target(opened, like, context, how)
        yield request


def _there_for(
    composite: CompositeCheckpoint, present: Mapping[str, Sequence[str]], context: Context
) -> dict[str, object]:
    """All there is for this process; a warning says what was deleted."""
    absent = _absent_for(composite, present, context)
    if absent:
        logger.warning("%s was saved with %s, which was deleted since", composite.location.display, told_names(absent))
    return dict.fromkeys([name for name in composite.members if name not in absent])


def _all_for(
    composite: CompositeCheckpoint, present: Mapping[str, Sequence[str]], context: Context
) -> dict[str, object]:
    """All that was saved for this process.

    Raises:
        CorruptCheckpointError: if some of it is not there.
    """
    absent = list(_absent_for(composite, present, context))
    if absent:
        raise CorruptCheckpointError(
            f"{composite.location.display} was saved with {told_names(absent)}, which was deleted or lost since; ask for the names "
            "that you need, or for this very checkpoint to get what is left of it"
        )
    return dict.fromkeys(composite.members)


def _absent_for(
    composite: CompositeCheckpoint, present: Mapping[str, Sequence[str]], context: Context
) -> dict[str, None]:
    """The names of which nothing is there for this process."""
    absent: dict[str, None] = {}
    for name, member in composite.members.items():
        directories = present.get(name, ())
        directory = member.directory(name, _rank(composite, name, member, context)) if directories else ""
        if directory not in directories or is_deleted(composite, directory):
            absent[name] = None
    return absent


def _unwrapped(asked: object) -> tuple[object, LoadRequest]:
    """What something is loaded like, and how; the wrappers may stand in each other."""
    how = AS_IT_IS
    while True:
        if isinstance(asked, PerProcess):
            asked = asked.value
        elif isinstance(asked, LoadAs):
            how = asked.request
            asked = asked.like
        else:
            return asked, how


def _unknown(composite: CompositeCheckpoint, name: str, present: Sequence[str]) -> str:
    near = NearNames(present).nearest(str(name))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{composite.location.display} was saved without {name!r}; there are {', '.join(present) or 'none'}{hint}"


def _rank(composite: CompositeCheckpoint, name: str, member: Member, context: Context) -> int:
    """The process whose state is asked for: this one's."""
    job = runtime_of(context).job()
    if member.processes is None or member.processes == job.size:
        return job.rank
    raise TreeMismatchError(
        f"{name!r} in {composite.location.display} has a state for each of {member.processes} processes, and this job has "
        f"{job.size}: which one is this process to take? Load what you need by its own location, such as "
        f"{composite.location.display.rstrip('/')}/{member.directory(name, 0)}",
        [f"{name}: {member.processes} processes saved it, {job.size} load it"],
    )


def _request(
    name: str, source: Source, member: Member, like: object, how: LoadRequest, in_place: bool, context: Context
) -> Request:
    is_files = member.kind == "files"
    if is_files and how != AS_IT_IS:
        raise TreeMismatchError(
            f"{name!r} is stored as files that its object wrote, and no tree: give it without LoadAs, which is for trees",
            [f"{name}: files are stored"],
        )
    if like is None and in_place:
        raise TypeError(f"into={{{name!r}: None}}: give the object to restore, or the name in abstract=[{name!r}]")
    if like is None:
        return Request(name, source, None, how, None, is_files, in_place=False)
    named = runtime_of(context).registry.dispatch_named(like)
    if not in_place and (named.files is not None or holds_objects(like, runtime_of(context).registry)):
        raise TypeError(
            f"abstract={{{name!r}: {type(like).__qualname__}(...)}} is or holds an object with a state: give it as "
            f"into={{{name!r}: ...}} to restore it in place, or ckptcore.abstract(...) of it to build its state anew"
        )
    if is_files:
        if named.files is None:
            raise TreeMismatchError(
                f"{name!r} is stored as files that its object wrote, and a {type(like).__qualname__} does not restore itself from "
                "files: pass an object like the one that was saved, or None for the files themselves",
                [f"{name}: files are stored"],
            )
        return Request(name, source, like, how, named.files, is_files, in_place=True)
    return Request(name, source, like, how, None, is_files, in_place)
