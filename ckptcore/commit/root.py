"""The root of a checkpoint: the one small object by which it exists. `ckptcore.commit.root_json` knows its bytes."""

from __future__ import annotations

import functools
import os
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from ckptcore.errors import CorruptCheckpointError, InvalidLocationError
from ckptcore.installed import version_of
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.objects import ObjectRecord, check_key
from ckptcore.model.tree import JSON

__all__ = [
    "HOST_COPIES",
    "PARTIAL_KEY",
    "ROOT_KEY",
    "Base",
    "Claimed",
    "Composite",
    "KnownRoots",
    "Member",
    "PartialSave",
    "References",
    "Role",
    "Root",
    "Session",
    "Summary",
    "check_name",
    "is_save_id",
    "new_save_id",
    "this_writer",
]

ROOT_KEY: Final = "checkpoint.json"
"""The key of the root within a checkpoint."""

PARTIAL_KEY: Final = "checkpoint.partial.json"
"""The session table in the hidden directory of a partial save. On other storage the table is in the place of the root."""

Role: TypeAlias = Literal["checkpoint", "member", "export"]
"""A checkpoint by itself, one checkpointable of a composite, or an export in the directory of its save."""

HOST_COPIES: Final = "checkpoint.copies"
"""The directory, within a tree that hosts save to disks of their own, of what a host has copies of beside its part."""

_SAVE_ID: Final = re.compile(r"[0-9a-f]{16}")
_TOLD: Final = 8
"""Sessions of which an error tells; of more, how many they are."""

_OWN_DIRECTORY: Final = re.compile(r".*\.rank_[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A root that says: a save is under way here.

    Attributes:
        save_id: the save.
        created: when it began, ISO 8601 in UTC.
    """

    save_id: str
    created: str


@dataclass(frozen=True, slots=True)
class Session:
    """What one session of a partial save wrote.

    Attributes:
        first: the first of the ranks that its processes have in the whole save; what the session is known by.
        size: how many processes it had.
        created: when it was complete, ISO 8601 in UTC.
        arrays: of how many arrays it wrote something.
        nbytes: bytes of its objects.
        key: the object that says what it wrote.
        key_bytes: bytes of that.
        checksum: of that, ``algorithm:value``.
    """

    first: int
    size: int
    created: str
    arrays: int
    nbytes: int
    key: str
    key_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class PartialSave:
    """What stands in the place of a root while a checkpoint is filled in several sessions.

    Attributes:
        save_id: of the save that all sessions are.
        created: when the first one began, ISO 8601 in UTC.
        layout: the name of the layout that all sessions have.
        agreed: the options of the layout that all sessions have, in words.
        ranks: how many ranks were given away: to processes of sessions, of those that died too, and to who finalized and died. None
            is given twice, so that no two sessions write under one name.
        owner: the first rank of who may write now; None: nobody, until another session begins.
        token: drawn by who owns it, or did last. Of two that saw the same and want to own it at once, each would take what the other
            put for its own, were the bytes the same.
        sessions: those that are complete.
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
        """The same where somebody who has not been there yet may write, and nobody else.

        Args:
            size: how many processes that are.
        """
        return replace(self, ranks=self.ranks + size, owner=self.ranks, token=new_save_id())

    def complete(self, session: Session) -> PartialSave:
        """The same with one more session, and nobody who may write."""
        return replace(self, owner=None, sessions=(*self.sessions, session))

    def __str__(self) -> str:
        """Which sessions there are, for a person."""
        told = [
            f"one at {one.created} with {one.arrays} array{'' if one.arrays == 1 else 's'}"
            for one in self.sessions[-_TOLD:]
        ]
        more = [f"{len(self.sessions) - _TOLD} before"] if len(self.sessions) > _TOLD else []
        sessions = "1 complete session" if len(self.sessions) == 1 else f"{len(self.sessions)} complete sessions"
        return f"{sessions} ({', '.join([*more, *told])})" if told else "no complete session"


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that another one refers to.

    Attributes:
        path: where it is, relative to the directory that the referring one is in; ``/`` between names, ``..`` in front only.
        save_id: the save that is meant.
    """

    path: str
    save_id: str

    def __post_init__(self) -> None:
        """Refuse a path that is none.

        Raises:
            CorruptCheckpointError
        """
        names = self.path.lstrip("/").split("/")
        while names and names[0] == "..":
            names.pop(0)
        plain = all(name not in ("", ".", "..") and "\0" not in name for name in names)
        if not names or not plain or posixpath.isabs(self.path) or names[-1].startswith("."):
            raise CorruptCheckpointError(
                f"a checkpoint refers to a base at {self.path[:200]!r}: expected a relative path to a checkpoint; load another one"
            )

    @property
    def is_beside(self) -> bool:
        """Whether it is in the directory that the referring one is in."""
        return "/" not in self.path


@dataclass(frozen=True, slots=True)
class References:
    """Which arrays of a tree are stored in bases, a column for each thing.

    Attributes:
        bases: the checkpoints that have them.
        leaf: the numbers of the arrays, ascending; of tied ones the first.
        base: for each, the number of its base.
        stored: for each, the number of the leaf in the tree of that base, which is stored there: references are one deep.
    """

    bases: tuple[Base, ...] = ()
    leaf: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.leaf)

    def check(self, tree: TreeMetadata) -> None:
        """Refuse references that do not fit a tree; both may be hostile.

        Raises:
            CorruptCheckpointError
        """
        ascending = all(first < second for first, second in zip(self.leaf, self.leaf[1:], strict=False))
        fitting = len(self.leaf) == len(self.base) == len(self.stored) and all(
            leaf < len(tree.leaves) and isinstance(tree.leaves[leaf], ArrayRecord) and leaf not in tree.aliases
            for leaf in self.leaf
        )
        if not ascending or not fitting or set(self.base) != set(range(len(self.bases))):
            raise CorruptCheckpointError("the references of a checkpoint do not fit its tree; load another one")


@dataclass(frozen=True, slots=True)
class Root:
    """A committed checkpoint.

    Attributes:
        save_id: the save that wrote it: 16 hexadecimal digits.
        created: when the save began, ISO 8601 in UTC.
        writer: names and versions of the software that wrote it.
        layout: the name of its layout.
        state: JSON that the layout owns.
        tree: what is in it.
        objects: every object but the root and its parts, by key.
        custom: metadata of the user's.
        parts: the objects that hold tables of the root.
        metrics: measurements that the user gave with it.
        timeline: how long the save took at what, as `ckptcore.events` encodes it; not checked.
        role: ``member`` has the save id of its composite; ``export`` is replaced and deleted with the save that it is in.
        progress: how far the training was: ``step``, ``epoch``.
        references: which arrays of the tree are stored in other checkpoints.
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


@dataclass(frozen=True, slots=True)
class Member:
    """One checkpointable of a composite.

    Attributes:
        kind: whether it is a tree, or files that the object wrote itself.
        processes: how many processes saved a state of their own; None where all saved one together.
    """

    kind: Literal["tree", "files"]
    processes: int | None = None

    def directory(self, name: str, rank: int) -> str:
        """The directory, within the composite, of what one process saved."""
        return name if self.processes is None or self.processes == 1 else f"{name}.rank_{rank}"


@dataclass(frozen=True, slots=True)
class Composite:
    """A committed checkpoint of several checkpointables, each a checkpoint in a directory of its own.

    Attributes:
        save_id, created, writer, custom, parts, metrics, timeline, progress: as of a `Root`.
        members: the checkpointables by name. One that was deleted since is still listed.
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


@dataclass(frozen=True, slots=True)
class Summary:
    """What a root says without its tables.

    Attributes:
        committed: whether it is one of a checkpoint, and not a claim.
        save_id, created, metrics, progress: as of a `Root`.
        members: the checkpointables by name; None of a checkpoint that is one tree.
        nbytes: bytes of its objects; None where the root names a part that has them, and 0 of a composite.
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
    """A save id that no other save has."""
    return os.urandom(8).hex()


def is_save_id(text: str) -> bool:
    """Whether this is a save id: 16 hexadecimal digits."""
    return _SAVE_ID.fullmatch(text) is not None


def check_name(name: str) -> str:
    """The name itself, if a checkpointable can have it.

    Raises:
        InvalidLocationError: says what is wrong with it.
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
"""Roots that are kept."""

_MOST_BYTES: Final = 1 << 20
"""Of the bytes of a root that is kept."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    data: bytes
    root: Root
    kept: T


class KnownRoots(Generic[T]):
    """Roots that were parsed last, each with what its reader keeps of it. Any thread.

    A root is known by all of its bytes, which are read and compared each time. One that has parts is not kept, for these have to be read and
    verified again; nor is one with values that somebody who is given them could change.
    """

    def __init__(self) -> None:
        """None yet."""
        self._known: tuple[_Known[T], ...] = ()
        self._lock = threading.Lock()

    def root(
        self, data: bytes, parse: Callable[[], Root | Composite | Claimed | PartialSave]
    ) -> Root | Composite | Claimed | PartialSave:
        """What these bytes of a root say.

        Args:
            data: the bytes.
            parse: parses them; called where they are not known.
        """
        known = self._find(data)
        return parse() if known is None else known.root

    def keep(self, data: bytes, root: Root, make: Callable[[], T]) -> T:
        """Return what is kept of a root, and keep the root from now on.

        Args:
            data: the bytes of the root.
            root: what they say.
            make: makes what is kept; called if the root is not known.
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
        for known in self._known:
            if known.data == data:
                return known
        return None


def _has_containers(root: Root) -> bool:
    """Whether a value of the tree is a list or mapping, which its handler may give out as it is."""
    leaves = root.tree.leaves
    if {*map(type, leaves)} == {ArrayRecord}:  # as most are, and sooner told
        return False
    return any(isinstance(record, ValueRecord) and isinstance(record.value, list | dict) for record in leaves)
