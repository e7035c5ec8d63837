"""Roots: the small object by which a checkpoint exists. `ckptcore.commit.root_json` encodes and decodes them."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from ckptcore.commit.references import Base, References
from ckptcore.errors import InvalidLocationError
from ckptcore.installed import version_of
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.objects import ObjectRecord, check_key
from ckptcore.model.tree import JSON

__all__ = [
    "HOST_COPIES",
    "PARTIAL_KEY",
    "ROOT_KEY",
    "Claimed",
    "Composite",
    "KnownRoots",
    "Member",
    "PartialSave",
    "Role",
    "Root",
    "Session",
    "Summary",
    "check_name",
    "new_save_id",
    "this_writer",
]

ROOT_KEY: Final = "checkpoint.json"
"""The key of the root within a checkpoint."""

PARTIAL_KEY: Final = "checkpoint.partial.json"
"""The key of the session table in the hidden directory of a partial save; other storage has it under `ROOT_KEY`."""

Role: TypeAlias = Literal["checkpoint", "member", "export"]
"""A checkpoint by itself, a checkpointable of a composite, or an export in the directory of its save."""

HOST_COPIES: Final = "checkpoint.copies"
"""In a tree that hosts save to disks of their own: the directory of the copies that a host has besides its part."""

_SHOWN: Final = 8
"""The most sessions that are described; the others are counted."""

_OWN_DIRECTORY: Final = re.compile(r".*\.rank_[0-9]+", re.DOTALL)


class Claimed(NamedTuple):
    """The root of a save that is running or has failed.

    Attributes:
        save_id: the save id.
        created: when the save began, ISO 8601 in UTC.
    """

    save_id: str
    created: str


class Session(NamedTuple):
    """A complete session of a partial save.

    Attributes:
        first: the first of the ranks that its processes have in the whole save. It identifies the session.
        size: the number of its processes.
        created: when it was complete, ISO 8601 in UTC.
        arrays: the number of arrays of which it wrote a part.
        nbytes: the size of its objects in bytes.
        key: the key of the object that describes what it wrote.
        key_bytes: the size of that object in bytes.
        checksum: the checksum of that object, ``algorithm:value``.
    """

    first: int
    size: int
    created: str
    arrays: int
    nbytes: int
    key: str
    key_bytes: int
    checksum: str


class PartialSave(NamedTuple):
    """The session table of a partial save.

    Attributes:
        save_id: the save id of all sessions.
        created: when the first session began, ISO 8601 in UTC.
        layout: the name of the layout of all sessions.
        agreed: the options of the layout that all sessions have, in words.
        ranks: the number of ranks that were assigned, to processes of failed sessions and finalizations too. No rank is
            assigned twice, so that no two sessions write under one name.
        owner: the first rank of the session that may write now; None until another session begins.
        token: a random token of the last owner. Without it, two processes that try to become the owner at once would
            put equal bytes, and each would take the other's table for its own.
        sessions: the complete sessions.
    """

    save_id: str
    created: str
    layout: str
    agreed: str
    ranks: int
    owner: int | None
    token: str = ""
    sessions: tuple[Session, ...] = ()

    def own_by_next(self, size: int) -> PartialSave:
        """Return the table with a new session as its owner.

        Args:
            size: the number of processes of that session.
        """
        return self._replace(ranks=self.ranks + size, owner=self.ranks, token=new_save_id())

    def complete(self, session: Session) -> PartialSave:
        """Return the table with one more session, and without an owner."""
        return self._replace(owner=None, sessions=(*self.sessions, session))

    def __str__(self) -> str:
        """Return the complete sessions in words."""
        if not self.sessions:
            return "no complete session"
        shown = [
            f"one at {one.created} with {one.arrays} array{'' if one.arrays == 1 else 's'}"
            for one in self.sessions[-_SHOWN:]
        ]
        if len(self.sessions) > _SHOWN:
            shown.insert(0, f"{len(self.sessions) - _SHOWN} before")
        return f"{len(self.sessions)} complete session{'' if len(self.sessions) == 1 else 's'} ({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Root:
    """A committed checkpoint.

    Attributes:
        save_id: the save id: 16 hexadecimal digits.
        created: when the save began, ISO 8601 in UTC.
        writer: names and versions of the software that wrote it.
        layout: the name of its layout.
        state: JSON that the layout owns.
        tree: the tree.
        objects: every object but the root and its parts, by key.
        custom: metadata of the user.
        parts: the keys of the objects that have large tables of the root.
        metrics: measurements that the user gave.
        timeline: the durations of the save, as `ckptcore.events` encodes them; not checked.
        role: ``member`` has the save id of its composite; ``export`` is replaced and deleted with its save.
        progress: the progress of the training: ``step``, ``epoch``.
        references: the arrays of the tree that are stored in other checkpoints.
    """

    save_id: str
    created: str
    writer: Mapping[str, str]
    layout: str
    state: JSON
    tree: TreeMetadata
    objects: Mapping[str, ObjectRecord]
    custom: Mapping[str, JSON] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: JSON = None
    role: Role = "checkpoint"
    progress: Mapping[str, int] = field(default_factory=dict)
    references: References = field(default_factory=References)


class Member(NamedTuple):
    """One checkpointable of a composite.

    Attributes:
        kind: a tree, or files that the object wrote itself.
        processes: the number of processes that saved a state of their own; None if all saved one together.
    """

    kind: Literal["tree", "files"]
    processes: int | None = None

    def directory(self, name: str, rank: int) -> str:
        """Return the directory, within the composite, that one process saved."""
        return name if self.processes is None or self.processes == 1 else f"{name}.rank_{rank}"


@dataclass(frozen=True, slots=True)
class Composite:
    """A committed checkpoint of several checkpointables, each a checkpoint in a directory of its own.

    Attributes:
        save_id, created, writer, custom, parts, metrics, timeline, progress: see `Root`.
        members: the checkpointables by name, including deleted ones.
    """

    save_id: str
    created: str
    writer: Mapping[str, str]
    members: Mapping[str, Member]
    custom: Mapping[str, JSON] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: JSON = None
    progress: Mapping[str, int] = field(default_factory=dict)


class Summary(NamedTuple):
    """The small members of a root.

    Attributes:
        committed: True for a checkpoint, False for a claim or a session table.
        save_id, created, metrics, progress: see `Root`.
        members: the checkpointables by name; None for one tree.
        nbytes: the size of its objects in bytes; None if a part of the root has it, and 0 for a composite.
        bases: the checkpoints that it refers to.
    """

    committed: bool
    save_id: str
    created: str
    metrics: Mapping[str, float]
    progress: Mapping[str, int]
    members: Mapping[str, Member] | None
    nbytes: int | None
    bases: tuple[Base, ...] = ()


def new_save_id() -> str:
    """Return a new save id."""
    return os.urandom(8).hex()


def check_name(name: str) -> str:
    """Return the name, if a checkpointable can have it.

    Raises:
        InvalidLocationError
    """
    reason = None
    if not isinstance(name, str) or not name:
        reason = "a name is a str that is not empty"
    elif "/" in name:
        reason = "a name is one directory and has no '/'"
    elif name.startswith("."):
        reason = "names that begin with a dot are hidden"
    elif name.startswith("checkpoint."):
        reason = "names that begin with 'checkpoint.' are those of ckptcore's own files"
    elif _OWN_DIRECTORY.fullmatch(name):
        reason = "names that end in '.rank_' and a number are those of what one process saved"
    elif len(name.encode("utf-8", "surrogatepass")) > 200:
        reason = "a name has at most 200 bytes"
    if reason is not None:
        raise InvalidLocationError(f"{name!r} cannot be the name of a checkpointable: {reason}")
    return check_key(name)


@functools.cache
def this_writer() -> Mapping[str, str]:
    """Return the software that writes roots: names of distributions, with their versions."""
    return {"ckptcore": version_of("ckptcore")}


_MOST: Final = 4
"""The most roots in the cache."""

_MOST_BYTES: Final = 1 << 20
"""The largest root in the cache, in bytes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    data: bytes
    root: Root
    kept: T


class KnownRoots(Generic[T]):
    """Cache of the last parsed roots, each with an object that its reader made of it. Any thread.

    A root is found by all of its bytes, which are read and compared each time. A root with parts is not cached, because
    the parts have to be read and verified again; nor is a root with mutable values, which callers could change.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._known: tuple[_Known[T], ...] = ()
        self._lock = threading.Lock()

    def root(
        self, data: bytes, parse: Callable[[], Root | Composite | Claimed | PartialSave]
    ) -> Root | Composite | Claimed | PartialSave:
        """Return the root with these bytes.

        Args:
            data: the bytes.
            parse: parses them; called if they are not in the cache.
        """
        known = self._find(data)
        return parse() if known is None else known.root

    def keep(self, data: bytes, root: Root, make: Callable[[], T]) -> T:
        """Return the object that belongs to a root, and cache the root.

        Args:
            data: the bytes of the root.
            root: the root.
            make: makes the object; called if the root is not in the cache.
        """
        known = self._find(data)
        if known is not None and known.root is root:
            return known.kept
        kept = make()
        if not root.parts and len(data) <= _MOST_BYTES and not _has_containers(root):
            with self._lock:
                others = [other for other in self._known if other.data != data]
                self._known = (_Known(data, root, kept), *others[: _MOST - 1])
        return kept

    def _find(self, data: bytes) -> _Known[T] | None:
        return next((known for known in self._known if known.data == data), None)


def _has_containers(root: Root) -> bool:
    """Return True if a value of the tree is a list or mapping, which its handler may return without a copy."""
    leaves = root.tree.leaves
    if {*map(type, leaves)} == {ArrayRecord}:  # fast path
        return False
    return any(isinstance(record, ValueRecord) and isinstance(record.value, list | dict) for record in leaves)
