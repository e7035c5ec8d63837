"""Update: the save strategy that writes the given arrays, and refers to a base for all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ckptcore.commit.conditions import Conditions
from ckptcore.commit.delete import base_locks, pin_name
from ckptcore.commit.leases import SYSTEM_CLOCK
from ckptcore.commit.location import Location, LocationLike, Place, absolute_location
from ckptcore.commit.references import Base, References, stored_tree
from ckptcore.commit.root import Composite, Root
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    SaveLostError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.loading.bases import base_location, base_path, read_base
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.opening import open_checkpoint
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.protocols import SaveCommit
from ckptcore.saving.requests import Save, SaveDraft
from ckptcore.saving.tree_descriptions import HeldBoxes, TreeDescription
from ckptcore.saving.writing import PlainCommit, PlainSave
from ckptcore_incremental.overlays import overlay

__all__ = ["Update"]

_CHANGE_SECONDS: Final = 180.0
"""Seconds that an update waits for a save or a deletion that changes its base."""

_FIRST_POLL_SECONDS: Final = 0.01
_LAST_POLL_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class _References:
    """The references of an update.

    Attributes:
        tree: the whole tree.
        references: the arrays of the tree that are in bases.
        bases: the locations of the bases.
    """

    tree: TreeMetadata
    references: References
    bases: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Update(PlainSave):
    """Save a checkpoint that writes only what is given, and refers to a base for all other arrays.

    The checkpoint is loaded, sliced, transformed, verified and converted as any other, as long as its base exists
    unchanged; `copy` makes one that needs no base. Software that reads the layout sees only what was written.
    References are one deep: an update of an update refers to the first base.

    Keys of mappings that are left out of the state, and what a `PLACEHOLDER` stands for, are those of the base; other
    keys are added. A container that is no mapping is given whole, or with placeholders. The layout may differ from that
    of the base.

    `save` raises also:
        TreeMismatchError: if the state does not fit the base. Nothing was written.
        InvalidLocationError: if the base is at a location where none may be, or is none.
        SaveLostError: if the base was deleted or replaced meanwhile.
        What `load` raises, for the base.

    Attributes:
        base: the checkpoint that has the rest, of one tree, in the same directory; elsewhere in the same storage with
            ``Context(io=IOOptions(bases="anywhere"))``.
    """

    takes_placeholders: ClassVar[bool] = True

    base: LocationLike

    def __post_init__(self) -> None:
        absolute_location(self.base)  # raises for what is no location

    def prepare(self, draft: SaveDraft) -> Save:
        """Put the given tree over the tree of the base. See `SaveStrategy`."""
        planned, written = _plan_update(draft, self.base)
        return PlainSave.prepare(_PlannedStrategy(self.base, planned), replace(draft, descriptions=[written]))


@dataclass(frozen=True, slots=True)
class _PlannedStrategy(Update):
    """An update whose base was opened."""

    planned: _References

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the update."""
        return _UpdateCommit(save, self.planned)


class _UpdateCommit(PlainCommit):
    """The commit of an update. It keeps the bases from being deleted until it has committed."""

    def __init__(self, save: Save, planned: _References) -> None:
        """Pin nothing yet."""
        super().__init__(save)
        self._planned = planned
        self._pins = ExitStack()

    def _take_claim(self) -> None:
        self._pins.enter_context(_pinned_bases(self._planned.bases, self._conditions))
        super()._take_claim()

    def _completed(self, root: Root | Composite) -> Root | Composite:
        """Return the root with the whole tree, if the bases are still those that were opened.

        Raises:
            SaveLostError: one was deleted or replaced.
            StorageError: the storage failed, so it cannot be known.
        """
        display = self._save.target.location.display
        for at, base in zip(self._planned.bases, self._planned.references.bases, strict=True):
            try:
                read_base(display, at, base.save_id)
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                raise SaveLostError(
                    f"the base {at.display} of the update to {display} was deleted or replaced while that was saved; "
                    f"save with another base, or everything: {error}"
                ) from error
        assert isinstance(root, Root)  # an update is one tree
        return replace(root, tree=self._planned.tree, references=self._planned.references)

    def settle(self, error: Exception | None) -> None:
        """Release the bases."""
        with self._pins:
            super().settle(error)

    def abort(self) -> None:
        """Release the bases, after the written objects are removed."""
        with self._pins:
            super().abort()


@contextmanager
def _pinned_bases(bases: Sequence[Location], conditions: Conditions) -> Iterator[None]:
    """Keep the bases of an update from being deleted. A base in a directory that cannot be written is not kept.

    Args:
        bases: the locations; whether each base exists is to be checked inside the block.
        conditions: of the Context.

    Raises:
        CheckpointNotFoundError, SaveLostError: one is being deleted or replaced.
    """
    with ExitStack() as held:
        for base in bases:
            locks = base_locks(base, conditions)
            try:
                for name in (base.name, pin_name(base)):
                    held.enter_context(locks.pin(name))
                _await_change(base)
            except StorageError:
                continue  # only the check before the commit protects it
        yield


def _await_change(base: Location) -> None:
    """Wait while a save to a base or a deletion of it is running."""
    deadline = SYSTEM_CLOCK.now() + _CHANGE_SECONDS
    pause = _FIRST_POLL_SECONDS
    while base.commits.is_changing(base):
        if SYSTEM_CLOCK.now() >= deadline:
            raise SaveLostError(
                f"the base {base.display} is being deleted or replaced (waited {_CHANGE_SECONDS:.0f} seconds); save "
                "with another base, or save all arrays. Nothing was written"
            )
        SYSTEM_CLOCK.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)


def _plan_update(draft: SaveDraft, base: Place) -> tuple[_References, TreeDescription]:
    """Open the base, and put the given tree over it. Every rank calls this; it writes nothing.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError, CompositeCheckpointError: the base
            cannot be opened.
        TreeMismatchError: the given tree does not fit the base.
        InvalidLocationError: it is the location itself, or where the Context allows no base.
        CheckpointError: other software wrote it.
    """
    agreement, context = draft.save.agreement, draft.save.context
    (description,) = draft.descriptions
    assert isinstance(description, TreeDescription)  # an update is one tree
    with agreement.stage("base") as stage:
        opened = open_checkpoint(base, context)
        root = _expect_own(opened)
        update = _planned(draft.save.target.location, opened, root, description, context)
        written = _placed_in(description, stored_tree(update.tree, update.references))
        written.layout.check(written.tree, agreement.size + len(written.held.at_workers))
        stage.payload = root.save_id
    saves: Sequence[Any] = stage.payloads

    def compare() -> None:
        if len(set(saves)) > 1:
            raise CheckpointError(
                f"the base {opened.location.display} was replaced while the ranks opened it: found the saves "
                f"{sorted(set(saves))}; save again. Nothing was written"
            )

    agreement.lead("bases", compare)
    return update, written


def _placed_in(description: TreeDescription, tree: TreeMetadata) -> TreeDescription:
    """Return the same leaves, with the numbers that they have in a tree that has all of them and perhaps others."""
    numbers = {path: number for number, path in enumerate(tree.paths)}
    own = [numbers[path] for path in description.tree.paths]
    stored = [tree.aliases.get(number, number) for number in own]
    places = description.places if description.places is not None else {leaf: leaf for leaf in range(len(own))}
    pieces = None if description.pieces is None else {stored[leaf]: of for leaf, of in description.pieces.items()}
    here, elsewhere, at_workers = description.held
    held = HeldBoxes(
        {stored[leaf]: of for leaf, of in here.items()},
        frozenset([own[leaf] for leaf in elsewhere]),
        tuple([{stored[leaf]: of for leaf, of in one.items()} for one in at_workers]),
    )
    return replace(
        description,
        tree=tree,
        held=held,
        places={own[leaf]: place for leaf, place in places.items()},
        pieces=pieces,
        replicas={stored[leaf]: count for leaf, count in description.replicas.items()},
    )


def _expect_own(opened: Checkpoint) -> Root:
    if opened.root is None:
        raise CheckpointError(
            f"{opened.location.display} was not written by ckptcore, and nothing can refer to it: copy it with "
            "ckptcore.copy(..., layout=...), and give that as the base. Nothing was written"
        )
    return opened.root


def _planned(
    location: Location, opened: Checkpoint, root: Root, description: TreeDescription, context: Context
) -> _References:
    if opened.location.identity == location.identity:
        raise InvalidLocationError(
            f"{location.display} cannot refer to itself: save the update to another location. Nothing was written"
        )
    direct = Base(base_path(location, opened.location), root.save_id)
    further = [
        Base(base_path(location, base_location(opened.location, first, context)), first.save_id)
        for first in root.references.bases
    ]
    over = overlay(root.tree, description.tree, *description.placeholders)
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
                f"arrays of {opened.location.display} are in {at.display}, which the update to {location.display} "
                "would replace: save it to another location. Nothing was written"
            )
    return _References(over.tree, references, places)
