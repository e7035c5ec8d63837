"""Changes between two versions of a chain, which a follower applies to its local copy of the older one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from ckptcore.derivations import Stored
from ckptcore.io.memory import allocate
from ckptcore.loading.reading import check_sizes, incomplete_read
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.planning import plan_read
from ckptcore_versions.chunks import ArrayChunks
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.patched_arrays import ChangedBox, EncodedRun, PatchedArray, apply_runs, runs_of

_READ_BYTES: Final = 32 << 20
"""Encoded bytes that are in memory together, unless one run has more."""


class Changes:
    """The changes from a held version to a later version of its chain. Thread-safe.

    Leaves are those of the later version. Boxes and elements are those that this process holds, so a process with a
    shard reads only the encoded bytes of the chunks of its shard.
    """

    def __init__(self, checkpoint: Checkpoint, links: int) -> None:
        """Use `between`.

        Args:
            checkpoint: the later version.
            links: the number of deltas to apply.
        """
        assert checkpoint.derived is not None  # it has a base
        self._sources = checkpoint.derived.sources[:links]
        self._arrays = checkpoint.derived.derivations
        self._tree = checkpoint.tree

    @classmethod
    def between(cls, held: BaseVersion, checkpoint: Checkpoint) -> Changes | None:
        """Return the changes from a held version; None if the later version is not a delta of its chain.

        Args:
            held: the version whose elements this process holds.
            checkpoint: the later version, opened, without transforms.
        """
        derived = checkpoint.derived
        if derived is None or not derived.is_builtin or checkpoint.root is None or checkpoint.root.references.leaf:
            return None
        known = (Stored, PatchedArray)
        if not all(isinstance(array, known) for array in derived.derivations.values()):
            return None  # another layout
        for number, source in enumerate(derived.sources):
            if number and _is_version(source, held):
                return cls(checkpoint, number)
        return None

    def deltas(self, leaf: int) -> Sequence[tuple[Checkpoint, int, ArrayChunks]] | None:
        """Return the deltas that change an array, from the oldest: checkpoint, number of the encoded array, and chunks.

        Returns None if the held version does not have the array.
        """
        array = self._arrays[self._tree.aliases.get(leaf, leaf)]
        if not isinstance(array, PatchedArray):
            return ()
        deltas = [(encoded, chunks) for encoded, chunks in array.deltas if encoded.checkpoint < len(self._sources)]
        if array.base is None and len(deltas) == len(array.deltas):
            return None
        return [(self._sources[encoded.checkpoint], encoded.leaf, chunks) for encoded, chunks in deltas]

    def boxes(self, leaf: int, box: Box) -> Sequence[Box]:
        """Return the parts of a box that may have changed, in whole chunks: all of it if the held version lacks it."""
        deltas = self.deltas(leaf)
        if deltas is None:
            return [box] if box.size else []
        chunks = [chunk.box.intersect(box) for _, _, of_array in deltas for chunk in of_array.within(box)]
        return list(dict.fromkeys([common for common in chunks if common is not None]))

    def apply(self, targets: Sequence[tuple[int, Box, HostArray]]) -> None:
        """Change elements of the held version in place to those of the later version. Reads the encoded bytes.

        Args:
            targets: leaf, box, and elements of the held version in this box, writable and of any strides. The held
                version must have the array: see `deltas`.

        Raises:
            CorruptCheckpointError: bytes are damaged, or elements differ from those of the held version. The elements
                are then undefined.
            StorageError
        """
        for source in reversed(self._sources):
            for batch in _batches(self._runs(source, targets)):
                reads = [(leaf, run.range) for _, leaf, run in batch]
                encoded = [allocate(ArraySpec(run.shape, "uint8")) for _, run in reads]
                plan = plan_read(source.tree, [(leaf, (run,)) for leaf, run in reads])
                missing = dict.fromkeys(range(len(reads)))
                for number in source.read(plan, encoded):
                    missing.pop(number, None)
                for number in missing:
                    raise incomplete_read(source, reads[number][0])
                apply_runs([(changed, run, part) for (changed, _, run), part in zip(batch, encoded, strict=True)])

    def _runs(
        self, source: Checkpoint, targets: Sequence[tuple[int, Box, HostArray]]
    ) -> Iterator[tuple[ChangedBox, int, EncodedRun]]:
        """Yield the runs of one delta that change targets, each with the number of its encoded array."""
        for leaf, box, elements in targets:
            record = self._tree.leaves[leaf]
            deltas = self.deltas(leaf)
            assert isinstance(record, ArrayRecord)
            assert deltas is not None, "the held version does not have the array"
            for delta, encoded, chunks in deltas:
                if delta is source and box.size:
                    check_sizes(delta, [encoded])
                    for run in runs_of(chunks.within(box)):
                        yield ChangedBox(record.spec, box, elements), encoded, run


def _batches(
    runs: Iterator[tuple[ChangedBox, int, EncodedRun]],
) -> Iterator[list[tuple[ChangedBox, int, EncodedRun]]]:
    """Group runs that are read together."""
    batch: list[tuple[ChangedBox, int, EncodedRun]] = []
    nbytes = 0
    for changed, encoded, run in runs:
        if batch and nbytes + run.range.size > _READ_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((changed, encoded, run))
        nbytes += run.range.size
    if batch:
        yield batch


def _is_version(checkpoint: Checkpoint, version: BaseVersion) -> bool:
    """Return True if an open checkpoint is a version, by name, save id and digest of the root."""
    root, data = checkpoint.root, checkpoint.version.root
    if root is None or not isinstance(data, bytes):
        return not version.save_id and checkpoint.location.name == version.name
    same = (checkpoint.location.name, root.save_id) == (version.name, version.save_id)
    return same and version.digest in ("", hashlib.sha256(data).hexdigest())
