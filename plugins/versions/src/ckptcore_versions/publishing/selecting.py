"""Selections of saves: the leaves of a described tree that a version has."""

from __future__ import annotations

from typing import Final

from ckptcore.commit.root import pruned
from ckptcore.errors import TreeMismatchError
from ckptcore.loading.abstract_trees import abstract_leaves_of
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import format_path
from ckptcore.planning.partition import SplitTree
from ckptcore.plugins import Plugins
from ckptcore.saving.descriptions import BoxHolders, TreeDescription
from ckptcore.select import LeafTable, Selection

_NAMED: Final = 10
"""Maximum number of leaves that an error names."""


def selected(description: TreeDescription, selection: Selection, plugins: Plugins) -> TreeDescription:
    """Return a described tree with only the selected leaves. The result is equal on every rank.

    A container that loses a child becomes a dict.

    Raises:
        TreeMismatchError: nothing is selected, or a selected name is not in the tree.
    """
    tree = description.tree
    kept = sorted(selection.leaves(LeafTable(tree.paths, lambda: abstract_leaves_of(tree, plugins))))
    if not kept:
        names = [format_path(path) for path in tree.paths]
        raise TreeMismatchError(
            f"nothing is selected by {selection!r}, so there are no weights to publish. Correct the selection: the "
            f"leaves are {', '.join(names[:_NAMED])}{' and others' * (len(names) > _NAMED)}. Nothing was written",
            ["nothing is selected"],
        )
    numbers = {leaf: number for number, leaf in enumerate(kept)}
    first: dict[int, int] = {}  # by array of the tree: the first selected leaf that is this array
    for leaf in kept:
        first.setdefault(tree.aliases.get(leaf, leaf), leaf)
    stored = {array: numbers[leaf] for array, leaf in first.items()}
    part = TreeMetadata(
        pruned(tree.skeleton, numbers.keys()),
        tuple([tree.leaves[leaf] for leaf in kept]),
        {
            numbers[leaf]: stored[tree.aliases.get(leaf, leaf)]
            for leaf in kept
            if first[tree.aliases.get(leaf, leaf)] != leaf
        },
        {numbers[leaf]: ranks for leaf, ranks in tree.held_by.items() if leaf in numbers},
    )
    local, remote_leaves = description.holders
    positions = description.positions
    shares = description.shares
    return description._replace(
        tree=part,
        holders=BoxHolders(
            {stored[array]: shards for array, shards in local.items() if array in stored},
            frozenset([numbers[leaf] for leaf in remote_leaves if leaf in numbers]),
        ),
        # The array of an alias is in the flat tree at the place of the alias, too.
        positions={numbers[leaf]: leaf if positions is None else positions[leaf] for leaf in kept
                   if positions is None or leaf in positions},
        shares=None if shares is None else SplitTree(
            part,
            {stored[array]: split for array, split in shares.splits.items() if array in stored},
            {stored[array]: count for array, count in shares.replicas.items() if array in stored},
        ),
    )  # fmt: skip
