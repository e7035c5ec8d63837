"""Version: a version that a follower yields, with its files, its arrays, and what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckptcore.builtin.sharded_arrays import ArrayShard, ShardedArray
from ckptcore.errors import CheckpointError
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore_versions.following.installing import Installer, LocalArrays
from ckptcore_versions.following.preparing import Prepared
from ckptcore_versions.version_labels import VersionLabels, labels_in


class Version:
    """A version in the cache of a follower, complete and verified. Thread-safe.

    Its arrays are named as in its files: the keys of the path, joined by dots.

    Attributes:
        number: its number.
        labels: its labels. If it is not of a `Publisher`, the run is empty; if other software wrote it, the digest too.
        directory: the path of its files, a directory of safetensors files that other software can load. It exists until
            the follower yields the second version after this one.
        changed: by name of an array, the boxes that differ from the version that the follower yielded before, in
            elements. They may contain elements that are equal. Arrays without a change are left out. All boxes if there
            was no version before.
        arrays: the arrays by name, mapped and read-only. An array of which the follower keeps some boxes is a
            `ckptcore.ShardedArray`. Valid as long as it is referenced; its file then takes disk space until it is
            released, even if the directory was removed.
        written_bytes: the bytes that the last `load_into` wrote.
    """

    def __init__(self, prepared: Prepared, checkpoint: Checkpoint, installer: Installer) -> None:
        """Describe a prepared version.

        Args:
            prepared: its files.
            checkpoint: the version; only its tree is used.
            installer: writes it into weights.
        """
        local = prepared.local
        self.number = local.cached.version.number
        run, _, step, tensors = labels_in(checkpoint.origin.custom) or ("", self.number, None, {})
        self.labels = VersionLabels(run, self.number, step, local.cached.version.digest, tensors)
        self.directory = local.cached.directory
        names = local.plan.names
        self.changed: Mapping[str, tuple[Box, ...]] = {
            name: prepared.changed[_original(checkpoint.tree, leaf)]
            for leaf, name in names.items()
            if _original(checkpoint.tree, leaf) in prepared.changed
        }
        parts: dict[int, list[tuple[Box, HostArray]]] = {}
        for part, elements in local.parts():
            parts.setdefault(part.leaf, []).append((part.box, elements))
        self.arrays: Mapping[str, HostArray | ShardedArray] = {
            name: _read_only(checkpoint.tree, leaf, parts[_original(checkpoint.tree, leaf)])
            for leaf, name in names.items()
        }
        self.written_bytes = 0
        # Matching needs the tree and the root. Nothing may read the storage.
        self._local = LocalArrays(dataclasses.replace(checkpoint, derived=None, read_instead=None), names, parts)
        self._installer = installer

    def __repr__(self) -> str:
        return f"<Version {self.number}: {self.directory}>"

    @CheckpointError.offering()
    def load_into(self, weights: Any) -> Any:
        """Write this version into weights, and return them. Writes only what changed since the last such write.

        Pass the same object each time: a module, or a dict with the same arrays. Nothing else may write into them. An
        array that is not known to have an earlier version is written whole. An array that cannot be written, such as
        one of JAX, is replaced in its container if it changed. If its container cannot be changed either, the result
        is a new value with the same structure.

        Args:
            weights: a tree of arrays of any framework, or an object with a state, such as a module.

        Raises:
            TreeMismatchError: the weights do not fit the version. Nothing was changed.
            TargetUndefinedError: the write failed, and the weights are a mixture of two versions. The next `load_into`
                writes everything.
        """
        return self._installer.install(self, self._local, weights)


def _original(tree: TreeMetadata, leaf: int) -> int:
    return tree.aliases.get(leaf, leaf)


def _read_only(tree: TreeMetadata, leaf: int, parts: list[tuple[Box, HostArray]]) -> HostArray | ShardedArray:
    spec = tree.leaves[leaf].spec  # type: ignore[union-attr]  # only arrays have names
    views = []
    for box, elements in parts:
        view = elements.view()
        view.flags.writeable = False
        views.append((box, view))
    if [box for box, _ in views] == [Box.whole(spec.shape)]:
        return views[0][1]
    return ShardedArray(spec.shape, spec.numpy_dtype, [ArrayShard(box, view) for box, view in views])
