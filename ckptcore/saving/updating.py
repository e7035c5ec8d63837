"""Updating: a save of a whole tree that writes what was given, and refers to a base for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ckptcore.commit.bases import pinned_bases
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.location import Location, Place
from ckptcore.commit.references import overlay, stored_tree
from ckptcore.commit.root import Base, References, Root
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    SaveLostError,
    UnsupportedVersionError,
)
from ckptcore.job.agreement import Agreement
from ckptcore.loading.bases import base_location, base_path, read_base
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.consistent_read import open_checkpoint
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.saving.parts import PartDescription
from ckptcore.saving.tree_descriptions import TreeDescription

__all__ = ["PlannedUpdate", "plan_update"]


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """An update that can go ahead.

    Attributes:
        location: where it goes.
        tree: the whole tree.
        references: what of it is in bases.
        bases: where these are.
    """

    location: Location
    tree: TreeMetadata
    references: References
    bases: tuple[Location, ...]

    def pinned(self, conditions: Conditions) -> AbstractContextManager[None]:
        """On the leader: keep the bases from being deleted. See `pinned_bases`."""
        return pinned_bases(self.bases, conditions)

    def expect_bases(self) -> None:
        """On the leader, right before the commit: make sure that the bases are those that were opened.

        Raises:
            SaveLostError: one was deleted or replaced.
            StorageError: the storage failed, so it cannot be known.
        """
        for at, base in zip(self.bases, self.references.bases, strict=True):
            try:
                read_base(self.location.display, at, base.save_id)
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                raise SaveLostError(
                    f"the base {at.display} of the update to {self.location.display} was deleted or replaced while that was saved; save with "
                    f"another base, or everything: {error}"
                ) from error


def plan_update(
    agreement: Agreement, location: Location, descriptions: Sequence[PartDescription], base: Place, context: Context
) -> tuple[PlannedUpdate, TreeDescription]:
    """Look at the base, and put what was given over it. On every rank; writes nothing.

    Args:
        agreement: with the other processes.
        location: where the update goes.
        descriptions: of what was given, united over the processes.
        base: where the base is.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError, CompositeCheckpointError: the base cannot be opened.
        TreeMismatchError: what was given does not go over it.
        InvalidLocationError: it is the location itself, or where the Context allows no base.
        CheckpointError: other software wrote it.
    """
    (description,) = descriptions
    assert isinstance(description, TreeDescription)  # an update is one tree
    with agreement.stage("base") as stage:
        opened = open_checkpoint(base, context)
        root = _expect_own(opened)
        update = _planned(location, opened, root, description, context)
        written = description.placed_in(stored_tree(update.tree, update.references))
        written.layout.check(written.tree, agreement.size + len(written.at_workers))
        stage.payload = root.save_id
    saves: Sequence[Any] = stage.payloads

    def compare() -> None:
        if len(set(saves)) > 1:
            raise CheckpointError(
                f"the base {opened.location.display} was replaced while the ranks opened it: found the saves {sorted(set(saves))}; save again. "
                "Nothing was written"
            )

    agreement.lead("bases", compare)
    return update, written


def _expect_own(opened: Checkpoint) -> Root:
    if opened.root is None:
        raise CheckpointError(
            f"{opened.location.display} was not written by ckptcore, and nothing can refer to it: copy it with ckptcore.copy(..., layout=...), and give "
            "that as the base. Nothing was written"
        )
    return opened.root


def _planned(
    location: Location, opened: Checkpoint, root: Root, description: TreeDescription, context: Context
) -> PlannedUpdate:
    if opened.location.identity == location.identity:
        raise InvalidLocationError(
            f"{location.display} cannot refer to itself: save the update to another location. Nothing was written"
        )
    direct = Base(base_path(location, opened.location), root.save_id)
    further = [
        Base(base_path(location, base_location(opened.location, first, context)), first.save_id)
        for first in root.references.bases
    ]
    over = overlay(root.tree, description.tree, description.left, description.cut)
    known = {
        leaf: (base, stored)
        for leaf, base, stored in zip(root.references.leaf, root.references.base, root.references.stored, strict=True)
    }
    bases: dict[Base, int] = {}
    columns: list[tuple[int, int, int]] = []
    for leaf, below in over.from_below.items():
        if not isinstance(over.tree.leaves[leaf], ArrayRecord) or leaf in over.tree.aliases:
            continue
        target = root.tree.aliases.get(below, below)
        base, stored = direct, target
        if target in known:  # what the base refers to is referred to where it is: references are one deep
            number, stored = known[target]
            base = further[number]
        columns.append((leaf, bases.setdefault(base, len(bases)), stored))
    leaves, numbers, stored_leaves = zip(*columns, strict=True) if columns else ((), (), ())
    references = References(tuple(bases), leaves, numbers, stored_leaves)
    places = tuple([base_location(location, base, context) for base in bases])
    for at in places:
        if at.lies_in(location):
            raise InvalidLocationError(
                f"arrays of {opened.location.display} are in {at.display}, which the update to {location.display} would replace: save it to "
                "another location. Nothing was written"
            )
    return PlannedUpdate(location, over.tree, references, places)
