"""Chains of deltas of slime's format: arrays that are computed from a full version and the frames of deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ckptcore.derivations import ChangedArray, Stored
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import format_path
from ckptcore.protocols import ChainedArrays, ChainLink, DerivedArray, Part
from ckptcore_versions.slime.delta_index import Delta, stored_tensors
from ckptcore_versions.slime.frames import apply, checksum, most_frame_bytes
from ckptcore_versions.tensor_names import tensor_names


class _Change(NamedTuple):
    """The change of an array in one version.

    Attributes:
        delta: the version.
        number: the number of the frame in it.
        link: the number of the version in the chain.
    """

    delta: Delta
    number: int
    link: int

    @property
    def stored(self) -> Stored:
        """The frame."""
        return Stored(ArraySpec((self.delta.nbytes[self.number],), "uint8"), self.number, self.link)


@dataclass(frozen=True, slots=True, eq=False)
class _ChangedTensor(ChangedArray):
    """An array after the changes of several versions.

    A read of any box computes the whole array, because a frame can only be decompressed from its start, and because
    checksums are those of whole arrays.

    Attributes:
        inputs: the array of the full version, and the frames.
        changes: the changes, oldest first.
    """

    inputs: tuple[DerivedArray, ...]
    changes: tuple[_Change, ...]

    @property
    def spec(self) -> ArraySpec:  # type: ignore[override]  # read-only
        """Shape and dtype of the array."""
        return self.inputs[0].spec

    def needed(self, box: Box) -> Sequence[Part]:
        """Return all inputs as a whole."""
        return [Part(number, Box.whole(array.spec.shape)) for number, array in enumerate(self.inputs)]

    def change(self, number: int, part: HostArray, elements: HostArray) -> None:
        """Apply a frame, and compare the checksum of the result.

        Raises:
            CorruptCheckpointError: the frame is damaged, or the elements were not those of its base.
            MissingDistributionError: the package of the checksum is not installed.
        """
        delta, frame, _ = self.changes[number - 1]
        what = f"the change of {delta.names[frame]!r} in version {delta.version}"
        changed = elements.reshape(-1).view(np.uint8)
        try:
            apply(part, changed, delta.encoding)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{what} is damaged: {error}. Load another version") from error
        found = checksum(delta.checksum_format, changed)
        if found != delta.checksums[frame]:
            raise CorruptCheckpointError(
                f"{what} does not give the expected elements: their {delta.checksum_format} is {found} instead of "
                f"{delta.checksums[frame]}. Its base differs from the one that it was made with, or one of both is "
                "damaged. Load another version"
            )


def derive_arrays(links: Sequence[ChainLink], base: TreeMetadata) -> ChainedArrays:
    """Return the arrays of a delta. See `Layout.derive`.

    Raises:
        CorruptCheckpointError: a delta does not fit its base.
    """
    deltas = list(_deltas(links))
    for newer, older in pairwise(deltas):
        if newer.base_version != older.version:
            raise CorruptCheckpointError(
                f"version {newer.version} is relative to version {newer.base_version}, and its base "
                f"{newer.reference.name} is version {older.version}: restore the directory, or load another version"
            )
    # A delta of other software has no tree. Its arrays are those of its base.
    tree = next((link.tree for link, delta in zip(links, deltas, strict=True) if delta.base is not None), base)
    leaves = {name: base.aliases.get(leaf, leaf) for leaf, name in tensor_names(base).items()}
    tied = _tied(base).union(*[_tied(link.tree) for link, delta in zip(links, deltas, strict=True) if delta.base])
    changes: dict[str, list[_Change]] = {}
    for link, delta in reversed([*enumerate(deltas)]):
        for number, name in enumerate(delta.names):
            record = base.leaves[leaves[name]] if name in leaves else None
            if not isinstance(record, ArrayRecord):
                raise CorruptCheckpointError(
                    f"version {delta.version} changes {name!r}, which its base does not have: the delta belongs to "
                    "another model, or one of both is damaged. Load another version"
                )
            most = most_frame_bytes(delta.encoding, record.spec.nbytes)
            if delta.nbytes[number] > most:
                raise CorruptCheckpointError(
                    f"version {delta.version} has a frame of {delta.nbytes[number]} bytes for {name!r} "
                    f"({record.spec}), which cannot need more than {most}: it is damaged. Load another version"
                )
            changes.setdefault(name, []).append(_Change(delta, number, link))
    arrays: dict[int, DerivedArray] = {}
    for leaf, name in tensor_names(tree).items():
        if leaf in tree.aliases:
            continue
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # only arrays have names
        stored = base.leaves[leaves[name]] if name in leaves else None
        if name in tied:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is tied to another array in an earlier version of its chain, whose "
                "files do not have it: load another version, and publish a full version when arrays are tied or untied"
            )
        if not isinstance(stored, ArrayRecord) or stored.spec != record.spec:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is {record.spec}, and the first version of its chain has "
                f"{stored.spec if isinstance(stored, ArrayRecord) else 'no such array'}: load another version"
            )
        arrays[leaf] = _array(Stored(record.spec, leaves[name], len(links)), changes.get(name, ()))
    return ChainedArrays(tree, [delta.tree for delta in deltas], arrays)


def _tied(tree: TreeMetadata) -> set[str]:
    """Return the names of arrays that are tied to others, whose files do not have them."""
    return set(tensor_names(tree).values()).difference(stored_tensors(tree)) if tree.aliases else set()


def _deltas(links: Sequence[ChainLink]) -> Iterator[Delta]:
    for link in links:
        delta = Delta.of_state(link.state)
        assert delta is not None  # links have a base
        yield delta


def _array(base: Stored, changes: Sequence[_Change]) -> DerivedArray:
    return _ChangedTensor((base, *[change.stored for change in changes]), tuple(changes)) if changes else base
