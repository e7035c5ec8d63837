"""Descriptions of values to save: the leaves of trees, which processes hold their boxes, and which of them write."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptcore.commit.root import NO_LEAVES, Member, cut_containers, pruned
from ckptcore.errors import (
    CheckpointError,
    NameCollisionError,
    TreeMismatchError,
    UnsupportedKeyError,
    UnsupportedLeafError,
    converts_errors,
)
from ckptcore.io.snapshot import StateBoxes
from ckptcore.model.arrays import ArraySpec, Box, Shard
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON, Node, TreePath, format_path
from ckptcore.planning import plan_write
from ckptcore.planning.partition import Owners, ReplicaOptions, SplitTree, cut_for_replicas, owners_of
from ckptcore.plugins import Plugins
from ckptcore.protocols import Continuation, FilesHandler, Layout, WriteStore
from ckptcore.tree.flattening import (
    Flat,
    PerProcess,
    flatten,
    leaves_of_values,
    per_process_leaves,
    per_process_values,
    saved_columns,
)

if TYPE_CHECKING:
    from ckptcore.builtin.staging import StagingDirectory


class BoxHolders(NamedTuple):
    """The processes that hold the boxes of a tree.

    Attributes:
        local: by leaf, the boxes that this process holds. Has no aliases.
        remote_leaves: the leaves whose elements are only in other processes, and the aliases of such leaves.
    """

    local: Mapping[int, Sequence[Shard]]
    remote_leaves: frozenset[int]


class Placeholders(NamedTuple):
    """The placeholders of a tree, which represent leaves of the base of an update.

    Attributes:
        paths: their paths.
        containers: by path, the containers of the state that have placeholders.
    """

    paths: Sequence[TreePath] = ()
    containers: Mapping[TreePath, Node] = MappingProxyType({})


_NO_PLACEHOLDERS: Final = Placeholders()


class TreeDescription(NamedTuple):
    """A tree that can be saved.

    Attributes:
        name: the name of the checkpointable; empty if it is the whole checkpoint.
        layout: stores it.
        tree: its records. In a job, the union of the trees of all ranks.
        holders: the processes that hold its boxes.
        flat: its leaves.
        own: True if every process saves its own tree.
        positions: for each leaf number of the tree, the position of the leaf in `flat`; None if they are equal.
        shares: how replicas divide the boxes that they write; None if replica 0 writes all.
        placeholders: the placeholders that the state had among its leaves.
    """

    name: str
    layout: Layout
    tree: TreeMetadata
    holders: BoxHolders
    flat: Flat
    own: bool
    positions: Mapping[int, int] | None = None
    shares: SplitTree | None = None
    placeholders: Placeholders = _NO_PLACEHOLDERS

    def boxes(self, leaf: int, boxes: tuple[Box, ...] = ()) -> StateBoxes:
        """Return boxes of a leaf, by its number in the tree."""
        position = leaf if self.positions is None else self.positions[leaf]
        handler = self.flat.handlers[position]
        assert handler is not None  # placeholders are for loading only
        return StateBoxes(self.flat.leaves[position], handler, boxes)

    def member(self, size: int) -> Member:
        """Return its entry in the root of a composite."""
        return Member("tree", size if self.own else None)

    def owners(self, rank: int, size: int) -> Mapping[int, Owners] | None:
        """Return the replica that writes each cell, for arrays that replicas divide. None if replica 0 writes all."""
        if self.shares is None:
            return None
        rank, size = (0, 1) if self.own else (rank, size)
        return owners_of(self.shares, rank=rank, size=size)

    def plan(self, rank: int, size: int, save_id: str) -> WritePlan:
        """Return the plan of this process."""
        owners = self.owners(rank, size)
        rank, size = (0, 1) if self.own else (rank, size)
        return plan_write(
            self.tree, self.holders.local, rank=rank, size=size, save_id=save_id, name=self.name, owners=owners
        )


class FilesDescription(NamedTuple):
    """An object that writes its own files.

    Attributes:
        name: the name of the checkpointable.
        layout: the layout of the trees of the save, which writes the metadata files of the checkpoint.
        value: the object.
        handler: saves the object.
    """

    name: str
    layout: Layout
    value: object
    handler: FilesHandler

    def member(self, size: int) -> Member:
        """Return its entry in the root of a composite."""
        return Member("files", size)

    def plan(self, rank: int, size: int, save_id: str) -> WritePlan:
        """Return a plan without arrays."""
        return WritePlan(NO_LEAVES, (), 0, 1, save_id, self.name)

    def capture(self) -> _FilesCaptured:
        """Run the first phase of the object's save, into a directory of the local disk."""
        from ckptcore.builtin.staging import StagingDirectory  # needed only by objects that write files

        directory = StagingDirectory()
        try:
            with naming(self.name):
                return _FilesCaptured(self.name, directory, self.handler.save(self.value, directory.path))
        except BaseException:
            directory.close()
            raise


class _FilesCaptured:
    """Files that an object has written, or will write in a continuation. See `Captured`."""

    def __init__(self, name: str, directory: StagingDirectory, continuation: Continuation | None) -> None:
        self._name = name
        self._directory = directory
        self._continuation = continuation

    def write(self, part: object, store: WriteStore) -> JSON:
        """Run the continuation, and store every file. The returned state lists the empty directories."""
        from ckptcore.builtin.files import state_of_files  # needed only by objects that write files

        if self._continuation is not None:
            with naming(self._name):
                self._continuation()
        with naming(self._name):
            files, empty = self._directory.contents()
            state = state_of_files(empty)
        for key, segment in files.items():
            store.write(key, [segment])
        return state

    def close(self) -> None:
        """Remove the local files."""
        self._directory.close()


PartDescription: TypeAlias = TreeDescription | FilesDescription


def describe_part(
    name: str,
    value: object,
    layout: Layout,
    plugins: Plugins,
    *,
    rank: int,
    size: int,
    replicas: ReplicaOptions | None = None,
    placeholders: bool = False,
    refusals: list[CheckpointError] | None = None,
    merged: bool = False,
) -> PartDescription:
    """Describe a value to save, and refuse what cannot be saved. Writes nothing.

    Args:
        name: the name of the checkpointable; empty if it is the whole checkpoint, which is a tree.
        value: the checkpointable.
        layout: the layout of trees.
        plugins: find the handlers.
        rank, size: the rank of this process, and the number of processes of the job.
        replicas: how replicas divide the boxes that they write; None: replica 0 writes them.
        placeholders: True if the state may have placeholders for leaves of the base of an update.
        refusals: gets an error for each value and leaf that cannot be saved; None: raise an error. Errors of the layout
            are always raised.
        merged: True if other saves add keys to the dicts of the value. See `SaveStrategy.merges_keys`.

    Raises:
        UnsupportedLeafError: lists up to 20 leaves that cannot be saved.
        UnsupportedKeyError: a key of a container is not an int, a bool, a str, or a tuple of them.
        NameCollisionError: two leaves would get the same name in the layout.
        CheckpointError: the layout writes differences, and the checkpoint has several objects.
    """
    own = False
    if name and isinstance(value, PerProcess):
        own, value = True, value.value
    with naming(name):
        if name:
            handled = plugins.dispatch_named(value)
            if handled.files is not None:
                return FilesDescription(name, layout, value, handled.files)
            own = own or (handled.checkpointable is not None and handled.checkpointable.per_process)
        columns = saved_columns(plugins, mappings=not merged and (own or size == 1))
        flat = flatten(value, plugins, rank=rank, placeholders=placeholders, refusals=refusals, columns=columns)
        if own:
            rank, size = 0, 1
            _refuse_nested(flat)
        absent = _NO_PLACEHOLDERS
        if placeholders or refusals:
            flat, absent = _without_placeholders(flat)
        tree, shards, remote_leaves = _describe_leaves(flat, rank, size, refusals)
        shares: SplitTree | None = None
        if replicas is not None and size > 1:
            shares = cut_for_replicas(tree, replicas, size=size, replicas=_count_replicas(flat, tree, size))
            tree = shares.tree
        layout.check(tree, size)
        if name:
            refuse_differences(
                layout, "which only a checkpoint of one tree can have: save each object to a location of its own"
            )
        return TreeDescription(name, layout, tree, BoxHolders(shards, remote_leaves), flat, own, None, shares, absent)


def refuse_differences(layout: Layout, reason: str) -> None:
    """Refuse a layout that writes differences, before anything is written.

    Args:
        layout: the layout of a tree.
        reason: why the save cannot store them, and what to do. Completes the error.

    Raises:
        CheckpointError
    """
    if layout.capabilities.differences is not None:
        raise CheckpointError(
            f"the layout {layout.name!r} stores differences from a base, {reason}, or pass another layout. Nothing was "
            "written"
        )


@converts_errors
def naming(name: str) -> Iterator[None]:
    """Add the name of a checkpointable to errors. An empty name adds nothing."""
    if not name:
        yield
        return
    try:
        yield
    except TreeMismatchError as error:
        raise TreeMismatchError(f"in {name!r}: {error}", error.differences) from error
    except (UnsupportedLeafError, UnsupportedKeyError, NameCollisionError) as error:
        raise type(error)(f"in {name!r}: {error}") from error
    except Exception as error:
        error.add_note(f"This error occurred while {name!r} was saved. Nothing was committed")
        raise


def _refuse_nested(flat: Flat) -> None:
    """Refuse `PerProcess` in a tree that every process saves by itself."""
    paths = [format_path(path) for path in per_process_values(flat.shape)]
    if paths:
        raise UnsupportedLeafError(
            f"{', '.join(paths[:20])}: PerProcess(...) is in a tree of which every process has its own already; remove "
            "this inner PerProcess. Nothing was written"
        )


def _without_placeholders(flat: Flat) -> tuple[Flat, Placeholders]:
    """Return the leaves without the placeholders, and the placeholders."""
    kept = [number for number, handler in enumerate(flat.handlers) if handler is not None]
    paths = [path for path, handler in zip(flat.paths(), flat.handlers, strict=True) if handler is None]
    if not paths:
        return flat, _NO_PLACEHOLDERS
    leaves, handlers = [flat.leaves[number] for number in kept], [flat.handlers[number] for number in kept]
    given = flat._replace(skeleton=pruned(flat.skeleton, set(kept)), leaves=leaves, handlers=handlers)
    return given, Placeholders(paths, cut_containers(flat.skeleton, set(kept)))


def _count_replicas(flat: Flat, tree: TreeMetadata, size: int) -> dict[int, int]:
    """Return the number of processes that hold each box, for arrays whose handler knows it.

    The number is 1 for an array that differs between processes, so that replica 0 writes all of it.
    """
    counts = {}
    for number, (leaf, handler) in enumerate(zip(flat.leaves, flat.handlers, strict=True)):
        if handler is not None and isinstance(tree.leaves[number], ArrayRecord):
            count = handler.replicas(leaf, size)
            if count is not None:
                counts[number] = count
    for number in per_process_leaves(flat):
        if counts.get(number, size) == size:
            counts[number] = 1
    return counts


def _describe_leaves(
    flat: Flat,
    rank: int,
    size: int,
    refusals: list[CheckpointError] | None,
) -> tuple[TreeMetadata, dict[int, Sequence[Shard]], frozenset[int]]:
    """Return the tree, the local boxes, and the remote leaves."""
    records: list[LeafRecord] = []
    refused: dict[int, UnsupportedLeafError] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, bool, Hashable], int] = {}
    shards: dict[int, Sequence[Shard]] = {}
    remote_leaves: set[int] = set()
    own = leaves_of_values(flat)
    for number, (leaf, handler) in enumerate(zip(flat.leaves, flat.handlers, strict=True)):
        assert handler is not None  # placeholders are for loading only
        # A value in `PerProcess` is saved as in a job of one process. It is no alias of an array of all processes.
        of_rank = (0, 1) if number in own else (rank, size)
        try:
            record = handler.describe(leaf)
            records.append(record)
            if isinstance(record, ArrayRecord):
                identity = handler.identity(leaf)
                if identity is not None:
                    original = first.setdefault((id(handler), number in own, identity), number)
                    if original != number and _same_array(records[original], record):
                        aliases[number] = original
                        if original in remote_leaves:
                            remote_leaves.add(number)
                        continue
                local = handler.shards(leaf, *of_rank)
                if local is not None:
                    shards[number] = local
                    continue
                remote_leaves.add(number)
                if of_rank[1] == 1:
                    raise UnsupportedLeafError(
                        "only other processes hold elements of the array, and this process saves alone. Save together "
                        "with the processes that hold it, or leave it out"
                    )
        except UnsupportedLeafError as error:
            refused[number] = error
            if len(records) == number:  # a dummy record keeps the indexes of `records` equal to the leaf numbers
                records.append(ArrayRecord(ArraySpec((), "bool")))
    if refused:
        paths = list(flat.paths())
        lines = [f"{format_path(paths[number])}: {error}" for number, error in refused.items()]
        if refusals is not None:
            refusals.extend(map(UnsupportedLeafError, lines))
            return TreeMetadata(flat.skeleton, tuple(records), aliases), shards, frozenset(remote_leaves)
        more = f"; and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise UnsupportedLeafError("; ".join(lines[:20]) + more + ". Nothing was written") from next(
            iter(refused.values())
        )
    return TreeMetadata(flat.skeleton, tuple(records), aliases), shards, frozenset(remote_leaves)


def _same_array(first: LeafRecord, second: ArrayRecord) -> bool:
    return isinstance(first, ArrayRecord) and first.spec == second.spec and first.kind == second.kind
