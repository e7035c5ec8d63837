"""TreeDescription: the leaves of a tree to save, the boxes held here and at workers, and who writes them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ckptcore.commit.root import Member
from ckptcore.errors import UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import Pending, WriteItem, WritePlan
from ckptcore.model.tree import Node, TreePath, format_path
from ckptcore.planning import plan_write
from ckptcore.planning.replicas import Owners, Pieces, ReplicaOptions, Shares, cut_for_replicas, owners_of
from ckptcore.plugins import Plugins
from ckptcore.protocols import (
    Executor,
    HostMemory,
    Layout,
    LeafHandler,
)
from ckptcore.tree.flattening import Flat, flatten, leaves_of_each_process

__all__ = ["HeldBoxes", "Placeholders", "TreeDescription", "describe_tree"]


class HeldBoxes(NamedTuple):
    """Where the elements of a tree are.

    Attributes:
        here: by leaf, the boxes that this process holds; not of aliases.
        elsewhere: the leaves of which only other processes hold elements, and the leaves that are tied to them.
        at_workers: by worker of this controller and by leaf, the boxes that the worker holds; empty if no worker holds
            any.
    """

    here: Mapping[int, Sequence[Shard]]
    elsewhere: frozenset[int]
    at_workers: Sequence[Mapping[int, Sequence[Shard]]] = ()


class Placeholders(NamedTuple):
    """The placeholders of a tree, which stand for leaves of the base of an update.

    Attributes:
        paths: their paths.
        containers: by path, the given containers that have placeholders.
    """

    paths: Sequence[TreePath] = ()
    containers: Mapping[TreePath, Node] = MappingProxyType({})


_NO_PLACEHOLDERS: Final = Placeholders()


@dataclass(frozen=True, slots=True)
class TreeDescription:
    """A tree that can be saved.

    Attributes:
        name: the name of the checkpointable; empty if it is the whole checkpoint.
        layout: stores it.
        tree: its records. In a job, the union of the trees of all ranks.
        held: where its elements are.
        flat: its leaves.
        own: True if every process saves a tree of its own.
        places: by leaf of the tree, its place in `flat`; None if they are the same.
        pieces: by array whose boxes replicas share, how the boxes are cut; None if replica 0 writes all.
        replicas: by array whose handler knows it, how many processes hold each box.
        placeholders: the placeholders that were among its leaves.
    """

    name: str
    layout: Layout
    tree: TreeMetadata
    held: HeldBoxes
    flat: Flat
    own: bool
    places: Mapping[int, int] | None = None
    pieces: Mapping[int, Pieces] | None = None
    replicas: Mapping[int, int] = field(default_factory=dict)
    placeholders: Placeholders = _NO_PLACEHOLDERS

    def within(self, union: TreeMetadata, *, rank: int, size: int) -> TreeDescription:
        """Return the same leaves as a part of the tree that all processes save together.

        A leaf that only some processes have is divided among these: its handler gets their number, and the position of
        this process among them.

        Args:
            union: the tree of all processes, with every leaf of this tree.
            rank, size: of this process in the job.

        Raises:
            UnsupportedLeafError: a handler refuses it.
        """
        numbers = {path: number for number, path in enumerate(union.paths)}
        places = {numbers[path]: place for place, path in enumerate(self.tree.paths)}
        shards: dict[int, Sequence[Shard]] = {}
        replicas = {leaf: self.replicas[place] for leaf, place in places.items() if place in self.replicas}
        for leaf, place in places.items():
            if leaf in union.aliases or not isinstance(union.leaves[leaf], ArrayRecord):
                continue
            if place in self.held.elsewhere or not isinstance(self.tree.leaves[place], ArrayRecord):
                continue
            holders = union.held_by.get(leaf)
            if holders is None and place in self.held.here:
                shards[leaf] = self.held.here[place]
                continue
            position, count = (rank, size) if holders is None else (holders.index(rank), len(holders))
            handler = self.flat.handlers[place]
            assert handler is not None  # placeholders are for loading only
            try:
                found = handler.shards(self.flat.leaves[place], position, count)
            except UnsupportedLeafError as error:
                raise UnsupportedLeafError(f"{format_path(union.paths[leaf])}: {error}. Nothing was written") from error
            shards[leaf] = found or ()
            if replicas.get(leaf, 1) > 1:
                replicas[leaf] = handler.replicas(self.flat.leaves[place], count) or 1
        cut = self.pieces
        pieces = None if cut is None else {leaf: cut[place] for leaf, place in places.items() if place in cut}
        held = self.held._replace(here=shards)
        return replace(self, tree=union, held=held, places=places, pieces=pieces, replicas=replicas)

    def leaf(self, number: int) -> tuple[object, LeafHandler]:
        """Return a leaf and its handler, by its number in the tree."""
        place = number if self.places is None else self.places[number]
        handler = self.flat.handlers[place]
        assert handler is not None  # placeholders are for loading only
        return self.flat.leaves[place], handler

    def member(self, size: int) -> Member:
        """Return its entry in the root of a composite."""
        return Member("tree", size if self.own else None)

    def owners(self, rank: int, size: int) -> Mapping[int, Owners] | None:
        """Return, by array that replicas share, the replica that writes each cell; None if replica 0 writes all."""
        if self.pieces is None:
            return None
        rank, size = (0, 1) if self.own else (rank, size)
        return owners_of(Shares(self.tree, self.pieces, self.replicas), rank=rank, size=size)

    def plans(self, rank: int, size: int, save_id: str) -> tuple[WritePlan, ...]:
        """Return the plan of this process, then those of its workers. A controller is rank 0 of its workers."""
        save = functools.partial(plan_write, self.tree, save_id=save_id, name=self.name)
        here, _, at_workers = self.held
        if not at_workers:
            owners = self.owners(rank, size)
            rank, size = (0, 1) if self.own else (rank, size)
            return (save(here, rank=rank, size=size, owners=owners),)
        workers = len(at_workers)
        shares = None if self.pieces is None else Shares(self.tree, self.pieces)
        plans = [save(here, rank=0, size=1 + workers)]
        for worker, shards in enumerate(at_workers):
            owners = None if shares is None else owners_of(shares, rank=worker, size=workers)
            plans.append(save(shards, rank=1 + worker, size=1 + workers, owners=owners))
        return tuple(plans)

    def copy(self, item: WriteItem, memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Begin to copy the boxes of an item into memory of the save."""
        leaf, handler = self.leaf(item.leaf)
        return handler.copy_to_host(leaf, item.boxes, memory)

    def view(self, item: WriteItem) -> Sequence[Pending[HostArray]]:
        """Begin to bring the boxes of an item to the host, without a copy if they are there."""
        leaf, handler = self.leaf(item.leaf)
        return handler.view_on_host(leaf, item.boxes)


def describe_tree(
    name: str,
    value: object,
    layout: Layout,
    plugins: Plugins,
    rank: int,
    size: int,
    replicas: ReplicaOptions | None,
    executor: Executor[Any, Any] | None,
    *,
    own: bool,
    placeholders: bool = False,
) -> TreeDescription:
    """Describe a tree to save, and refuse what cannot be saved. Writes nothing. See `describe_part`.

    Args:
        name, value, layout, plugins, rank, size, replicas, executor, placeholders: see `describe_part`.
        own: True if every process saves a tree of its own.

    Raises:
        UnsupportedLeafError: with every leaf that cannot be saved, up to 20.
        UnsupportedKeyError, NameCollisionError
    """
    rank, size = (0, 1) if own else (rank, size)
    flat = flatten(value, plugins, placeholders=placeholders)
    found = _NO_PLACEHOLDERS
    if placeholders:
        flat, found = _without_placeholders(flat)
    at_workers: Sequence[dict[int, Sequence[Shard]]] = [{} for _ in executor.workers] if executor is not None else ()
    tree, shards, elsewhere = _describe_leaves(flat, rank, size, executor, at_workers)
    if not any(at_workers):
        at_workers = ()
    held = HeldBoxes(shards, elsewhere, at_workers)
    sharing = len(at_workers) or size
    pieces, counts = None, dict[int, int]()
    if replicas is not None and sharing > 1:
        counts = {} if at_workers else _count_replicas(flat, tree, size)  # handlers do not know of workers
        for leaf in leaves_of_each_process(flat):
            if counts.get(leaf, size) == size:
                counts[leaf] = 1  # each process holds all of its own: replica 0 writes it
        shares = cut_for_replicas(tree, replicas, size=sharing, replicas=counts)
        tree, pieces = shares.tree, shares.pieces
    layout.check(tree, size + len(at_workers))
    return TreeDescription(name, layout, tree, held, flat, own, None, pieces, counts, found)


def _without_placeholders(flat: Flat) -> tuple[Flat, Placeholders]:
    """Return the leaves without placeholders, and the placeholders."""
    kept = [number for number, handler in enumerate(flat.handlers) if handler is not None]
    left = [path for path, handler in zip(flat.paths(), flat.handlers, strict=True) if handler is None]
    if not left:
        return flat, _NO_PLACEHOLDERS
    from ckptcore.commit.references import cut_containers, pruned  # only updates need it

    leaves, handlers = [flat.leaves[number] for number in kept], [flat.handlers[number] for number in kept]
    given = flat._replace(skeleton=pruned(flat.skeleton, set(kept)), leaves=leaves, handlers=handlers)
    return given, Placeholders(left, cut_containers(flat.skeleton, set(kept)))


def _count_replicas(flat: Flat, tree: TreeMetadata, size: int) -> dict[int, int]:
    """Return, by array whose handler knows it, how many processes hold each box."""
    counts = {}
    for number, (leaf, handler) in enumerate(zip(flat.leaves, flat.handlers, strict=True)):
        if handler is not None and isinstance(tree.leaves[number], ArrayRecord):
            found = handler.replicas(leaf, size)
            if found is not None:
                counts[number] = found
    return counts


def _describe_leaves(
    flat: Flat,
    rank: int,
    size: int,
    executor: Executor[Any, Any] | None,
    at_workers: Sequence[dict[int, Sequence[Shard]]],
) -> tuple[TreeMetadata, dict[int, Sequence[Shard]], frozenset[int]]:
    """Return the tree, the boxes here, and the leaves elsewhere. Fills `at_workers` with the boxes of workers."""
    records: list[LeafRecord] = []
    refused: dict[int, UnsupportedLeafError] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, Hashable], int] = {}
    shards: dict[int, Sequence[Shard]] = {}
    elsewhere: set[int] = set()
    for number, (leaf, handler) in enumerate(zip(flat.leaves, flat.handlers, strict=True)):
        assert handler is not None  # placeholders are for loading only
        try:
            record = handler.describe(leaf)
            records.append(record)
            if isinstance(record, ArrayRecord):
                there = executor if executor is not None and executor.takes(leaf) else None
                identity = (handler if there is None else there).identity(leaf)
                if identity is not None:
                    original = first.setdefault((id(handler), identity), number)
                    if original != number and _same_array(records[original], record):
                        aliases[number] = original
                        if original in elsewhere:
                            elsewhere.add(number)
                        continue
                if there is not None:
                    for worker, at_worker in enumerate(at_workers):
                        at_worker[number] = there.shards(leaf, worker)
                    continue
                held = handler.shards(leaf, rank, size)
                if held is not None:
                    shards[number] = held
                    continue
                elsewhere.add(number)
                if size == 1:
                    raise UnsupportedLeafError(
                        "the array is spread over other processes only, and this process saves alone: expected "
                        "elements of it here; save together with the processes that hold it, or leave it out"
                    )
        except UnsupportedLeafError as error:
            refused[number] = error
            if len(records) == number:
                records.append(ArrayRecord(ArraySpec((), "bool")))
    if refused:
        paths = list(flat.paths())
        lines = [f"{format_path(paths[number])}: {error}" for number, error in refused.items()]
        more = f"; and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise UnsupportedLeafError("; ".join(lines[:20]) + more + ". Nothing was written") from next(
            iter(refused.values())
        )
    return TreeMetadata(flat.skeleton, tuple(records), aliases), shards, frozenset(elsewhere)


def _same_array(first: LeafRecord, second: ArrayRecord) -> bool:
    return isinstance(first, ArrayRecord) and first.spec == second.spec and first.kind == second.kind
