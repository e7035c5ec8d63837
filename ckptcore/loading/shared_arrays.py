"""Shared arrays: what ranks that load together call the arrays that they want, each of which may make others of what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.loading.opened import Opened
from ckptcore.loading.read_shares import Message, Round, SharedPlan
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import ReadItem, StoredTile
from ckptcore.model.tree import JSON

__all__ = ["SharedArray", "renumbered", "stored_below"]


@dataclass(frozen=True, slots=True)
class SharedArray:
    """An array that ranks may want parts of. Equal on two ranks exactly if it has the same elements.

    Attributes:
        leaf: its number in the tree that all have: the stored one, or what transforms make of it.
        change: what matching makes of it, in words; empty where nothing. Ranks need not ask for one array alike.
        spec: of what is made.
        axis, step: bands of so many elements along an axis, none of which reads what another one does; a step of 0: none are
            known but those of its elements in C order.
        is_stored: whether it is one of the stored arrays as it is.
    """

    leaf: int
    change: str
    spec: ArraySpec
    axis: int = 0
    step: int = 0
    is_stored: bool = False

    @classmethod
    def of(cls, opened: Opened, leaf: int) -> SharedArray:
        """What an array of a checkpoint, that is no alias, is called.

        Args:
            opened: the checkpoint as this rank makes it.
            leaf: its number there.
        """
        record = opened.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # who wants a box wants an array
        made = opened.derived
        if made is None:
            return cls(leaf, "", record.spec, is_stored=True)
        common, change = made.changes.get(leaf, (leaf, ""))
        if not made.told and not change:
            return cls(common, "", record.spec, is_stored=True)
        axis, step = made.bands(leaf, BLOCK_BYTES) or (0, 0)
        return cls(common, change, record.spec, axis, step)

    @property
    def order(self) -> tuple[int, str, str]:
        """In which order all ranks number arrays."""
        return self.leaf, self.change, str(self.spec)

    def to_json(self) -> JSON:
        """As ranks tell each other."""
        if self.is_stored:
            return self.leaf
        return [self.leaf, self.change, list(self.spec.shape), self.spec.dtype, self.axis, self.step]

    @classmethod
    def from_json(cls, told: Any, stored: Opened) -> SharedArray:
        """The inverse of `to_json`; `stored` is the checkpoint as it is stored."""
        if isinstance(told, int):
            record = stored.tree.leaves[told]
            assert isinstance(record, ArrayRecord)  # as where it was told
            return cls(told, "", record.spec, is_stored=True)
        leaf, change, shape, dtype, axis, step = told
        return cls(leaf, change, ArraySpec(tuple(shape), dtype), axis, step)

    def tiles(self) -> Iterable[StoredTile]:
        """Its bands, as if they were stored one after the other; each begins where a block does, so that messages end where one ends."""
        if not self.step:
            return ()
        bands = Box.whole(self.spec.shape).bands(self.axis, self.step)
        stride = -(-bands[0].size * self.spec.numpy_dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES
        key = f"{self.leaf:09} {self.change}"  # sorts as leaves do
        return [StoredTile(key, number * stride, band, is_plain=True) for number, band in enumerate(bands)]


def stored_below(opened: Opened) -> Opened:
    """A checkpoint as it is stored, of one that may be derived from it."""
    while opened.derived is not None:
        opened = opened.derived.below[0]
    return opened


def renumbered(plan: SharedPlan, own: Mapping[int, int]) -> SharedPlan:
    """A plan in which arrays have the numbers of leaves of one rank.

    Args:
        plan: of that rank.
        own: by number in the plan, the leaf; of those that the rank wants.
    """
    if all(number == leaf for number, leaf in own.items()):
        return plan

    def items(given: tuple[ReadItem, ...]) -> tuple[ReadItem, ...]:
        return tuple([ReadItem(own[item.leaf], item.box) for item in given])

    def messages(given: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple([replace(message, pieces=items(message.pieces)) for message in given])

    rounds = [
        Round(
            frozenset([own[leaf] for leaf in part.leaves if leaf in own]), items(part.direct), messages(part.messages)
        )
        for part in plan.rounds
    ]
    return replace(plan, rounds=tuple(rounds))
