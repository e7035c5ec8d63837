"""The names of arrays: in files, in labels, and in what a follower lists as changed."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.builtin.safetensors_files import METADATA
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.planning import leaf_names


def tensor_names(tree: TreeMetadata) -> Mapping[int, str]:
    """Return the names of arrays, by leaf: the keys of the path, joined by dots. Tied arrays have a name each.

    Raises:
        NameCollisionError: two arrays would have the same name.
    """
    arrays = {leaf: tree.paths[leaf] for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    return leaf_names(arrays, reserved=(METADATA,))
