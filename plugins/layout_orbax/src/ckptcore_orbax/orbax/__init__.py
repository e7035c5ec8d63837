"""Checkpoints of Orbax, but for the arrays: what is there, which tree it is, and the files that say so."""

from __future__ import annotations

from ckptcore_orbax.orbax.composites import Composite, find_composite, find_root_metadata
from ckptcore_orbax.orbax.item_files import item_files
from ckptcore_orbax.orbax.items import Item, ItemKind, find_item
from ckptcore_orbax.orbax.markers import PYTREE_HANDLER, encode_metrics, marker_files
from ckptcore_orbax.orbax.tree_file import TREE_FILE, TreeFile, encode_tree, orbax_name, parse_tree
from ckptcore_orbax.orbax.trees import StoredTree, TreeLeaf, plain_tree, tree_of_names
from ckptcore_orbax.orbax.values import scalar_record, value_array, value_record, value_text, value_type

__all__ = [
    "PYTREE_HANDLER",
    "TREE_FILE",
    "Composite",
    "Item",
    "ItemKind",
    "StoredTree",
    "TreeFile",
    "TreeLeaf",
    "encode_metrics",
    "encode_tree",
    "find_composite",
    "find_item",
    "find_root_metadata",
    "item_files",
    "marker_files",
    "orbax_name",
    "parse_tree",
    "plain_tree",
    "scalar_record",
    "tree_of_names",
    "value_array",
    "value_record",
    "value_text",
    "value_type",
]
