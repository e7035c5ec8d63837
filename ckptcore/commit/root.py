"""Roots: the small JSON object that commits a checkpoint. `ckptcore.commit.root_json` encodes and decodes them."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Final, Literal, TypeAlias

from ckptcore.errors import CorruptCheckpointError, InvalidLocationError
from ckptcore.installed import version_of
from ckptcore.model.metadata import ArrayRecord, ObjectRecord, TreeMetadata, check_key
from ckptcore.model.tree import JSON, LEAF, Node, Skeleton, TreePath
from ckptcore.records import NamedTuple, dataclass

NO_LEAVES: Final = TreeMetadata(Node("dict", (), ()), ())
"""The tree of a checkpoint of files that an object wrote itself. It has no leaves."""

ROOT_KEY: Final = "checkpoint.json"
"""The key of the root within a checkpoint."""

PARTIAL_KEY: Final = "checkpoint.partial.json"
"""The key of the session table in the hidden directory of a partial save. In an object store its key is `ROOT_KEY`."""

Role: TypeAlias = Literal["checkpoint", "member", "export"]
"""An independent checkpoint, a checkpointable of a composite, or an export inside the checkpoint of its save."""

HOST_COPIES: Final = "checkpoint.copies"
"""In a per-host save: the directory of copies that a host stores in addition to its part."""

_SHOWN: Final = 8
"""Maximum number of sessions in a message. The others are counted."""

_RANK_DIRECTORY: Final = re.compile(r".*\.rank_[0-9]+", re.DOTALL)
_OF_RANK: Final = re.compile(r"(.+)\.rank_(0|[1-9][0-9]{0,8})", re.DOTALL)


class Claim(NamedTuple):
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
        first: the first rank of its processes within the whole partial save. It identifies the session.
        size: the number of its processes.
        created: when it was completed, ISO 8601 in UTC.
        arrays: the number of arrays. The session wrote at least a part of each.
        nbytes: the size of its objects in bytes.
        key: the key of the object that describes its receipts.
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
        agreed: the options of the layout that all sessions share, as text.
        ranks: the number of assigned ranks, including those of failed sessions and finalizations. No rank is assigned
            twice, so two sessions never write objects with equal names.
        owner: the first rank of the session that may write now; None between sessions.
        token: a random token of the last owner. Without it, two processes that try to become the owner at the same time
            would put equal bytes, and each would mistake the other's table for its own.
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

    def with_next_owner(self, size: int) -> PartialSave:
        """Return the table with a new owner, which is a session or a finalization.

        Args:
            size: the number of processes of the owner.
        """
        return self._replace(ranks=self.ranks + size, owner=self.ranks, token=new_save_id())

    def __str__(self) -> str:
        """Describe the complete sessions."""
        if not self.sessions:
            return "no complete session"
        shown = [
            f"one at {session.created} with {session.arrays} array{'' if session.arrays == 1 else 's'}"
            for session in self.sessions[-_SHOWN:]
        ]
        if len(self.sessions) > _SHOWN:
            shown.insert(0, f"{len(self.sessions) - _SHOWN} earlier")
        return f"{len(self.sessions)} complete session{'' if len(self.sessions) == 1 else 's'} ({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that another checkpoint refers to.

    Attributes:
        path: its path, relative to the parent directory of the referring checkpoint. Names are separated by ``/``, and
            ``..`` is only at the beginning.
        save_id: its save id; empty if other software wrote it.
    """

    path: str
    save_id: str

    def __post_init__(self) -> None:
        """Refuse an invalid path, which may be hostile.

        Raises:
            CorruptCheckpointError
        """
        names = self.path.lstrip("/").split("/")
        while names and names[0] == "..":
            names.pop(0)
        plain = all(name not in ("", ".", "..") and "\0" not in name for name in names)
        if not names or not plain or posixpath.isabs(self.path) or names[-1].startswith("."):
            raise CorruptCheckpointError(
                f"a checkpoint refers to a base at {self.path[:200]!r}: expected a relative path to a checkpoint; load "
                "another checkpoint"
            )

    @property
    def is_sibling(self) -> bool:
        """True if it is in the same directory as the referring checkpoint."""
        return "/" not in self.path


@dataclass(frozen=True, slots=True)
class References:
    """The arrays of a tree that are stored in bases, as columns. All columns are empty if there are none.

    Attributes:
        bases: the checkpoints that store the arrays. If there are no arrays, the base of the layout, if any: see
            `ckptcore.protocols.Layout.base`.
        leaf: the numbers of the arrays, ascending; for tied arrays, the first.
        base: for each array, the number of its base.
        stored: for each array, its number in the tree of the base. The base itself stores the array: references are not
            chained.
    """

    bases: tuple[Base, ...] = ()
    leaf: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()

    def check(self, tree: TreeMetadata) -> None:
        """Refuse references that do not fit a tree. Both may be hostile.

        Raises:
            CorruptCheckpointError
        """
        ascending = all(first < second for first, second in zip(self.leaf, self.leaf[1:], strict=False))
        fitting = len(self.leaf) == len(self.base) == len(self.stored) and all(
            leaf < len(tree.leaves) and isinstance(tree.leaves[leaf], ArrayRecord) and leaf not in tree.aliases
            for leaf in self.leaf
        )
        if not ascending or not fitting or (self.leaf and set(self.base) != set(range(len(self.bases)))):
            raise CorruptCheckpointError("the references of a checkpoint do not fit its tree; load another checkpoint")


MAPPINGS: Final = ("dict", "OrderedDict")
"""Kinds of containers that keep their kind when they lose children. Other containers become dicts."""


def stored_leaves(tree: TreeMetadata, references: References) -> list[int]:
    """Return the numbers of the leaves that a checkpoint stores itself: all but arrays in bases and their aliases."""
    referred = frozenset(references.leaf)
    return [leaf for leaf in range(len(tree.leaves)) if tree.aliases.get(leaf, leaf) not in referred]


def stored_numbers(tree: TreeMetadata, references: References) -> Mapping[int, int]:
    """Return a mapping from leaf numbers in the whole tree to leaf numbers in the `stored_tree`."""
    return {leaf: number for number, leaf in enumerate(stored_leaves(tree, references))}


def stored_tree(tree: TreeMetadata, references: References) -> TreeMetadata:
    """Return the tree of the leaves that a checkpoint stores itself. Its layout stores this tree."""
    if not references.leaf:
        return tree
    kept = stored_leaves(tree, references)
    numbers = {leaf: number for number, leaf in enumerate(kept)}
    return TreeMetadata(
        pruned(tree.skeleton, set(kept)),
        tuple([tree.leaves[leaf] for leaf in kept]),
        {numbers[alias]: numbers[target] for alias, target in tree.aliases.items() if alias in numbers},
        {numbers[leaf]: ranks for leaf, ranks in tree.held_by.items() if leaf in numbers},
    )


def pruned(skeleton: Skeleton, kept: Collection[int]) -> Skeleton:
    """Return a skeleton without some leaves, and without containers that become empty.

    A container that loses a child becomes a mapping.

    Args:
        skeleton: the skeleton; its leaves are numbered from 0.
        kept: the numbers of the leaves that stay.
    """
    rest, _ = _pruned(skeleton, kept, 0)
    return Node("dict", (), ()) if rest is None else rest


def _pruned(skeleton: Skeleton, kept: Collection[int], number: int) -> tuple[Skeleton | None, int]:
    if not isinstance(skeleton, Node):
        return (LEAF if number in kept else None), number + 1
    if not skeleton.keys:
        return skeleton, number
    children = []
    for key, child in zip(skeleton.keys, skeleton.children, strict=True):
        rest, number = _pruned(child, kept, number)
        if rest is not None:
            children.append((key, rest))
    if not children:
        return None, number
    keys, nodes = zip(*children, strict=True)
    if len(keys) == len(skeleton.keys):
        return skeleton._replace(keys=keys, children=nodes), number
    kind = skeleton.kind if skeleton.kind in MAPPINGS else "dict"
    return Node(kind, keys, nodes), number


def cut_containers(skeleton: Skeleton, kept: Collection[int]) -> Mapping[TreePath, Node]:
    """Return the containers that lose children in `pruned`, in their original form."""
    leaves = [path for path, node in containers_and_leaves((), skeleton) if not isinstance(node, Node)]
    lost = [path for number, path in enumerate(leaves) if number not in kept]
    losing = {path[:length] for path in lost for length in range(len(path))}
    return {
        path: node for path, node in containers_and_leaves((), skeleton) if path in losing and isinstance(node, Node)
    }


def containers_and_leaves(path: TreePath, skeleton: Skeleton) -> Iterator[tuple[TreePath, Skeleton]]:
    """Yield all containers and leaves of a subtree with their paths, each container before its children."""
    yield path, skeleton
    if isinstance(skeleton, Node):
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            yield from containers_and_leaves((*path, key), child)


MAX_ORDER: Final = 1 << 62
"""The highest number in an order."""


class SaveOrder(NamedTuple):
    """The order of saves of one checkpoint. If two copies of a step exist, the copy with the higher order is valid.

    Times are not compared, because the clocks of two machines differ. A save has a higher order than the checkpoint
    that it replaces. If a run resumes from an earlier step, its new saves have a higher order than the existing later
    steps.

    Attributes:
        owner: the number of the owner of the directory. Each owner has a higher number than all owners before it. 0 for
            the first owner, and for a checkpoint that was not saved as a step.
        save: a count. Raised by each save of this owner that replaces a checkpoint, or whose step precedes an existing
            step.
    """

    owner: int = 0
    save: int = 0

    @property
    def next(self) -> SaveOrder:
        """The order of a save that replaces a save with this order."""
        return SaveOrder(self.owner, self.save + 1) if self.save < MAX_ORDER else SaveOrder(self.owner + 1)


_FIRST: Final = SaveOrder()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRoot:
    """The fields that the roots of one tree and of a composite share.

    Attributes:
        save_id: the save id: 16 hexadecimal digits.
        created: when the save began, ISO 8601 in UTC.
        writer: names and versions of the software that wrote it.
        order: see `SaveOrder`.
        custom: metadata of the user.
        parts: the keys of the objects that store large tables of the root.
        metrics: measurements of the user, by name.
        timeline: the durations of the save, as `ckptcore.events` encodes them; not checked.
        progress: the progress of the training: ``step``, ``epoch``.
    """

    save_id: str
    created: str
    writer: Mapping[str, str]
    order: SaveOrder = _FIRST
    custom: Mapping[str, JSON] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: JSON = None
    progress: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root(CommittedRoot):
    """The root of a committed checkpoint of one tree, or of files that an object wrote.

    Attributes:
        layout: the name of its layout; empty for files.
        state: JSON that the layout owns; for files, see `ckptcore.builtin.files.state_of_files`.
        tree: the tree; `NO_LEAVES` for files.
        objects: every object but the root and its parts, by key.
        role: see `Role`. A ``member`` has the save id of its composite. An ``export`` is replaced and deleted together
            with the checkpoint that contains it.
        references: the arrays of the tree that are stored in other checkpoints.
        index: the key of the index that other software reads, if the names of objects contain the save id; else empty.
            `objects` does not include it, because it is replaced after the root. See
            `ckptcore.protocols.Layout.with_own_names`.
    """

    layout: str
    state: JSON
    tree: TreeMetadata
    objects: Mapping[str, ObjectRecord]
    role: Role = "checkpoint"
    references: References = field(default_factory=References)
    index: str = ""


class Member(NamedTuple):
    """One checkpointable of a composite.

    Attributes:
        kind: a tree, or files that the object wrote itself.
        processes: the number of processes that each saved their own state; None if they saved one state together.
    """

    kind: Literal["tree", "files"]
    processes: int | None = None

    def directory(self, name: str, rank: int) -> str:
        """Return the directory, within the composite, that one process saved."""
        return name if self.processes is None or self.processes == 1 else f"{name}.rank_{rank}"

    def directories(self, name: str) -> str:
        """Return the first and the last directory as text. A hostile root may state a huge number of processes."""
        first, last = self.directory(name, 0), self.directory(name, (self.processes or 1) - 1)
        return first if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeRoot(CommittedRoot):
    """The root of a committed checkpoint of several checkpointables. Each is a checkpoint in a subdirectory.

    Attributes:
        members: the checkpointables by name, including checkpointables that were deleted after the commit.
        files: the keys of files that the save wrote next to the checkpointables, such as metadata for other software.
        default: the checkpointable that is loaded if a load names none. Only a copy of a checkpoint of other software
            may have one. None: a load must name a checkpointable.
    """

    members: Mapping[str, Member]
    files: tuple[str, ...] = ()
    default: str | None = None

    def has_directory(self, entry: str) -> bool:
        """Return True if an entry of a listing is the directory of a checkpointable, or of one process' part of it."""
        directory = entry.removesuffix("/")
        name, rank = split_rank(directory) or (directory, 0)
        member = self.members.get(name)
        return (
            directory != entry
            and member is not None
            and rank < (member.processes or 1)
            and directory == member.directory(name, rank)
        )


AnyRoot: TypeAlias = Root | CompositeRoot | Claim | PartialSave
"""The content of a root: a committed checkpoint, the claim of a save, or the session table of a partial save."""


class RootSummary(NamedTuple):
    """The small fields of a root, and the sizes of its objects.

    Attributes:
        committed: True for a checkpoint, False for a claim or a session table.
        save_id, created, metrics, progress, timeline: see `Root`.
        members: the checkpointables by name; None for one tree.
        objects: the size of each object in bytes, by key; empty for a composite; None if the sizes are in a part.
        parts: the size of each part of the root in bytes, by key.
        bases: the checkpoints that it refers to.
        order: see `SaveOrder`.
        index_key: the index of `Root`.
        files: see `CompositeRoot`; empty for one tree.
    """

    committed: bool
    save_id: str
    created: str
    metrics: Mapping[str, float]
    progress: Mapping[str, int]
    members: Mapping[str, Member] | None
    objects: Mapping[str, int] | None
    parts: Mapping[str, int]
    bases: tuple[Base, ...] = ()
    timeline: JSON = None
    order: SaveOrder = SaveOrder()
    index_key: str = ""
    files: tuple[str, ...] = ()


def new_save_id() -> str:
    """Return a new save id."""
    return os.urandom(8).hex()


def check_name(name: str) -> str:
    """Return the name if it is valid for a checkpointable.

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
        reason = "names that begin with 'checkpoint.' are reserved for files of ckptcore"
    elif _RANK_DIRECTORY.fullmatch(name):
        reason = "names that end in '.rank_' and a number are reserved for the states of single processes"
    elif len(name.encode("utf-8", "surrogatepass")) > 200:
        reason = "a name has at most 200 bytes"
    if reason is not None:
        raise InvalidLocationError(f"{name!r} cannot be the name of a checkpointable: {reason}")
    return check_key(name)


def split_rank(directory: str) -> tuple[str, int] | None:
    """Return the checkpointable and the rank of a directory that one process of several saved; None for other names."""
    matched = _OF_RANK.fullmatch(directory)
    return None if matched is None else (matched[1], int(matched[2]))


@functools.cache
def this_writer() -> Mapping[str, str]:
    """Return the software that writes roots: the name and version of each distribution."""
    return {"ckptcore": version_of("ckptcore")}
