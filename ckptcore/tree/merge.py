"""Merge the trees of ranks that save different parts together, as in pipeline and expert parallelism."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from ckptcore.errors import TreeMismatchError
from ckptcore.model.columns import column_summary
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import JSON, LEAF, Node, Skeleton, TreePath, format_path, leaf_paths

_MAPPINGS: Final = ("dict", "OrderedDict")
_RULES: Final = {
    "rank": "Ranks may have different keys, but a leaf must be equal on every rank that has it. Wrap state that "
    "differs between ranks in PerProcess(...), and save different objects under different keys",
    "session": "Sessions may differ only in the keys of mappings, and a leaf must be equal in every session that has "
    "it",
}

_SHOWN: Final = 20
"""Maximum number of differences in an error message. `TreeMismatchError.differences` has all."""


def merge_trees(
    trees: Sequence[TreeMetadata],
    ranks: Sequence[Sequence[int]],
    *,
    size: int,
    remote_leaves: Sequence[Collection[int]] | None = None,
    may_differ: Sequence[Collection[int]] | None = None,
    savers: Literal["rank", "session"] = "rank",
) -> TreeMetadata:
    """Return one tree with every leaf of several trees.

    Mappings are merged by key: first the keys of the first tree, in its order, then the keys that the second tree
    adds, and so on. Any other container must have the same children in each tree that has the container. A leaf must be
    equal in each tree that has the leaf: an array of the same shape, dtype, kind and cuts, or the same value. Notes
    come from the first tree that has the leaf.

    Leaves stay tied unless a rank has two of them as separate arrays. In that case all of them are stored separately,
    which takes more space but is always correct. A rank without elements of an array is ignored here, because it does
    not know whether the array is tied.

    Args:
        trees: all different trees.
        ranks: for each tree, the ranks that have it. Each rank of the job has one tree.
        size: the number of processes of the job.
        remote_leaves: for each tree, the arrays without elements on the ranks of the tree.
        may_differ: for each tree, the leaves that may differ between trees if they are not sharded. The leaf of the
            first tree is used.
        savers: the word for the savers in errors: ranks of a job, or sessions of a partial save.

    Raises:
        TreeMismatchError: lists the differences, with the ranks.
    """
    nothing: Sequence[Collection[int]] = [()] * len(trees)
    merge = _TreeMerge(trees, ranks, size, remote_leaves or nothing, may_differ or nothing, savers)
    skeleton = merge.node((), list(enumerate(tree.skeleton for tree in trees)))
    merge.expect_no_difference()  # `aliases` needs the number of every leaf; leaves below a difference have none
    aliases = merge.aliases()
    held_by = merge.held_by(skeleton, aliases)
    merge.expect_no_difference()
    return TreeMetadata(skeleton, tuple(merge.records), aliases, held_by)


def refuse_different_arrays(
    trees: Sequence[TreeMetadata], ranks: Sequence[Sequence[int]], digests: Sequence[Mapping[str, int]]
) -> None:
    """Refuse arrays that must be equal on several ranks but differ.

    Args:
        trees: for each group of ranks with equal trees and digests, the tree.
        ranks: for each group, its ranks.
        digests: for each group, the result of `ckptcore.saving.common_trees.replica_digests`.

    Raises:
        TreeMismatchError: lists the arrays, with the ranks that have equal elements.
    """
    ranks_of: dict[tuple[TreePath, str], dict[int, list[int]]] = {}
    for tree, of_tree, having in zip(trees, digests, ranks, strict=True):
        paths = tree.paths
        for box, digest in of_tree.items():
            leaf, _, part = box.partition(" ")
            ranks_of.setdefault((paths[int(leaf)], part), {}).setdefault(digest, []).extend(having)
    lines = {
        path: f"{format_path(path)}: different on " + "; ".join([_ranks(group, "rank") for group in by_digest.values()])
        for (path, _), by_digest in ranks_of.items()
        if len(by_digest) > 1
    }
    if lines:
        differences = list(lines.values())
        raise TreeMismatchError(
            "arrays that every rank has must be equal, because with this layout each rank writes some of them:"
            f"{_listed(differences)}\n"
            "To store the array of every rank, wrap it in PerProcess(...). To store one for all, copy it from one rank "
            "to the others before the save, for example with torch.distributed.broadcast, or use the layout "
            "safetensors, which stores that of the lowest rank. Nothing was written",
            differences,
        )


class _TreeMerge:
    """A running merge. Leaves are numbered in the order of visits."""

    def __init__(
        self,
        trees: Sequence[TreeMetadata],
        ranks: Sequence[Sequence[int]],
        size: int,
        remote_leaves: Sequence[Collection[int]],
        may_differ: Sequence[Collection[int]],
        savers: Literal["rank", "session"],
    ) -> None:
        self.savers = savers
        self.trees = trees
        self.ranks = ranks
        self.size = size
        self.remote_leaves = [frozenset(numbers) for numbers in remote_leaves]
        self.may_differ = [frozenset(numbers) for numbers in may_differ]
        self.differences: list[str] = []
        self.records: list[LeafRecord] = []
        self.sources: list[Mapping[int, int]] = []
        """For each merged leaf, its number in each tree that has it, by tree."""
        self._numbers = [{path: number for number, path in enumerate(tree.paths)} for tree in trees]

    def node(self, path: TreePath, subtrees: Sequence[tuple[int, Skeleton]]) -> Skeleton:
        """Merge the nodes that some trees have at a path."""
        nodes = [(tree, node) for tree, node in subtrees if isinstance(node, Node)]
        if not nodes:
            self._leaf(path, [tree for tree, _ in subtrees])
            return LEAF
        first = nodes[0][1]
        kinds = {tree: node.kind if isinstance(node, Node) else "a leaf" for tree, node in subtrees}
        if len(set(kinds.values())) > 1:
            self._differ(path, kinds)
            return LEAF
        keys = tuple(dict.fromkeys([key for _, node in nodes for key in node.keys]))
        if first.kind not in _MAPPINGS and any(node.keys != first.keys for _, node in nodes):
            lengths = {tree: f"{node.kind} of {len(node.keys)}" for tree, node in nodes}
            self._differ(path, lengths, {tree: node.keys for tree, node in nodes})
            return LEAF
        children = [(tree, dict(zip(node.keys, node.children, strict=True))) for tree, node in nodes]
        merged = [self.node((*path, key), [(tree, of[key]) for tree, of in children if key in of]) for key in keys]
        return Node(first.kind, keys, tuple(merged), first.type, _merged_attributes([node for _, node in nodes]))

    def expect_no_difference(self) -> None:
        """Raise an error if differences were found so far.

        Raises:
            TreeMismatchError
        """
        if self.differences:
            raise TreeMismatchError(
                f"the {self.savers}s save different trees, which cannot be merged:{_listed(self.differences)}\n"
                f"{_RULES[self.savers]}. Nothing was written",
                self.differences,
            )

    def aliases(self) -> dict[int, int]:
        """Map each tied leaf to the first leaf of its group. Leaves that a rank has as separate arrays are not tied."""
        # Union-find: following `group_of` leads to the first leaf of a group.
        group_of = list(range(len(self.records)))

        def first_of(leaf: int) -> int:
            while group_of[leaf] != leaf:
                group_of[leaf] = leaf = group_of[group_of[leaf]]
            return leaf

        numbers = [{number: leaf for leaf, of in enumerate(self.sources) if (number := of.get(tree)) is not None}
                   for tree in range(len(self.trees))]  # fmt: skip
        for leaves, tree in zip(numbers, self.trees, strict=True):
            for alias, target in tree.aliases.items():
                first, second = sorted((first_of(leaves[alias]), first_of(leaves[target])))
                group_of[second] = first
        members: dict[int, list[int]] = {}
        for leaf in range(len(group_of)):
            members.setdefault(first_of(leaf), []).append(leaf)
        return {
            leaf: first
            for first, tied in members.items()
            if len(tied) > 1 and self._are_tied_everywhere(tied)
            for leaf in tied[1:]
        }

    def _are_tied_everywhere(self, leaves: Sequence[int]) -> bool:
        for number, tree in enumerate(self.trees):
            own = [self.sources[leaf][number] for leaf in leaves if number in self._holding(leaf)]
            if len({tree.aliases.get(leaf, leaf) for leaf in own}) > 1:
                return False
        return True

    def held_by(self, skeleton: Skeleton, aliases: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Map each leaf to the ranks that hold it. Leaves that every rank holds are left out."""
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        held = {}
        for leaf, of in enumerate(self.sources):
            trees = self._holding(leaf)
            if not trees:
                trees = tuple(of)
                if leaf not in aliases:
                    path = next(itertools.islice(leaf_paths(skeleton), leaf, None))
                    self._differ(path, dict.fromkeys(of, "an array that only other processes hold"))
            if trees not in known:
                known[trees] = tuple(sorted([rank for tree in trees for rank in self.ranks[tree]]))
            if len(known[trees]) < self.size:
                held[leaf] = known[trees]
        return held

    def _holding(self, leaf: int) -> tuple[int, ...]:
        """Return the trees whose ranks hold elements of a leaf."""
        return tuple([tree for tree, number in self.sources[leaf].items() if number not in self.remote_leaves[tree]])

    def _leaf(self, path: TreePath, trees: Sequence[int]) -> None:
        sources = {tree: self._numbers[tree][path] for tree in trees}
        records = {tree: self.trees[tree].leaves[number] for tree, number in sources.items()}
        texts = {tree: _compared(record) for tree, record in records.items()}
        if len(set(texts.values())) > 1 and not all(
            number in self.may_differ[tree] and _is_whole(records[tree]) for tree, number in sources.items()
        ):
            self._differ(path, {tree: _shown(record) for tree, record in records.items()}, texts)
        self.records.append(records[trees[0]])
        self.sources.append(sources)

    def _differ(self, path: TreePath, shown: Mapping[int, str], apart: Mapping[int, object] | None = None) -> None:
        """Record a difference at a path. `apart` has a value for each tree, to distinguish trees with equal texts."""
        ranks: dict[object, list[int]] = {}
        texts: dict[object, str] = {}
        for tree, text in shown.items():
            different = apart[tree] if apart is not None else text
            ranks.setdefault(different, []).extend(self.ranks[tree])
            texts.setdefault(different, text)
        self.differences.append(
            f"{format_path(path)}: " + "; ".join(f"{texts[key]} on {_ranks(ranks[key], self.savers)}" for key in ranks)
        )


def _listed(differences: Sequence[str]) -> str:
    """Return the first differences, each on a line of its own."""
    more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "".join(f"\n  {line}" for line in differences[:_SHOWN]) + more


def _is_whole(record: LeafRecord) -> bool:
    """Return True if a process has all of a leaf: a value, or an array that is not sharded."""
    return isinstance(record, ValueRecord) or record.cuts is None


def _compared(record: LeafRecord) -> str:
    """Return a text that is equal for two records only if they describe the same array or value. -0.0 is not 0.0."""
    if isinstance(record, ArrayRecord):
        return json.dumps([record.kind, str(record.spec), record.cuts])
    return json.dumps([record.kind, record.value], sort_keys=True)


def _shown(record: LeafRecord) -> str:
    if isinstance(record, ArrayRecord):
        kind = "" if record.kind == "array" else f" ({record.kind})"
        return f"{record.spec}{kind}" + ("" if record.cuts is None else f" cut at {record.cuts}"[:200])
    if record.value is None:
        return record.kind
    return f"{record.kind} {column_summary(record) or json.dumps(record.value)[:60]}"


def _ranks(ranks: Sequence[int], called: str) -> str:
    """Format ranks for errors: ``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:12])
    return f"{called}{'s' if len(ranks) > 1 else ''} {shown}" + (", ..." if len(runs) > 12 else "")


def _merged_attributes(nodes: Sequence[Node]) -> Mapping[str, JSON] | None:
    """Return the attributes of all nodes. Merges dicts, because each process may have versions of different modules."""
    merged: dict[str, JSON] = {}
    for node in nodes:
        for name, value in (node.attributes or {}).items():
            before = merged.get(name)
            merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged or None
