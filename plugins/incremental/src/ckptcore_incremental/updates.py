"""`Update`: a save strategy that writes the given arrays and refers to a base checkpoint for all others."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptcore.commit.location import AnyLocation, Location, LocationLike, absolute_location
from ckptcore.commit.names import refuse_other_spelling
from ckptcore.commit.root import Base, CompositeRoot, References, Root, stored_tree
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, InvalidLocationError
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.opening.bases import authority_of, base_location
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.planning.partition import SplitTree
from ckptcore.protocols import SaveCommit
from ckptcore.saving.descriptions import BoxHolders, TreeDescription, refuse_differences
from ckptcore.saving.requests import Save, SaveDraft
from ckptcore.saving.writing import PlainSave
from ckptcore_incremental.based_commits import BasedCommit, import_locks
from ckptcore_incremental.overlays import overlay

__all__ = ["Update"]


@dataclass(frozen=True, slots=True)
class _PlannedReferences:
    """References of an update to its bases.

    Attributes:
        tree: the whole tree.
        references: arrays of the tree that are stored in bases.
        bases: locations of the bases.
    """

    tree: TreeMetadata
    references: References
    bases: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Update(PlainSave):
    """Save a checkpoint that stores only the given arrays, and refers to a base for all others.

    The checkpoint can be loaded, sliced, transformed, verified and converted like any other, as
    long as its base exists and is unchanged. `copy` creates a checkpoint that needs no base. Other
    software that reads the layout sees only the arrays of the update. References are one level
    deep: an update of an update refers to the first base.

    Keys that a mapping lacks, and values replaced by a `PLACEHOLDER`, come from the base; new keys
    are added. Pass other containers, such as lists, completely or with placeholders. The layout may
    differ from that of the base.

    `save` also raises:
        TreeMismatchError: if the state does not fit the base. Nothing was written.
        InvalidLocationError: if a base is not allowed at its location, or is the target itself.
        SaveLostError: if the base was deleted or replaced during the save.
        The errors of `load`, if the base cannot be opened.

    Attributes:
        base: checkpoint of one tree, in the same directory as the update. With
            ``Context(io=IOOptions(bases="anywhere"))`` it can be anywhere in the same storage.
    """

    takes_placeholders: ClassVar[bool] = True
    merges_keys: ClassVar[bool] = False

    base: LocationLike

    def __post_init__(self) -> None:
        absolute_location(self.base)  # raises an error for an invalid location

    def prepare(self, draft: SaveDraft) -> Save:
        """Overlay the given tree on the tree of the base. See `SaveStrategy`."""
        planned, written = _plan_update(draft, self.base)
        import_locks(planned.bases)
        return PlainSave.prepare(_PlannedUpdate(self.base, planned), draft._replace(descriptions=[written]))


@dataclass(frozen=True, slots=True)
class _PlannedUpdate(Update):
    """An update with the references to its base."""

    planned: _PlannedReferences

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the update."""
        return _UpdateCommit(save, self.planned)


class _UpdateCommit(BasedCommit):
    """Commit of an update. Its root has the whole tree."""

    def __init__(self, save: Save, planned: _PlannedReferences) -> None:
        super().__init__(save, planned.references.bases, planned.bases)
        self._planned = planned

    def _completed(self, root: Root | CompositeRoot) -> Root | CompositeRoot:
        """Return the root with the whole tree. See `BasedCommit`."""
        root = super()._completed(root)
        assert isinstance(root, Root)  # an update is one tree
        return replace(root, tree=self._planned.tree, references=self._planned.references)


def _plan_update(draft: SaveDraft, base: AnyLocation) -> tuple[_PlannedReferences, TreeDescription]:
    """Open the base and overlay the given tree on it. Every rank must call this. Writes nothing.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError,
            CompositeCheckpointError: if the base cannot be opened.
        TreeMismatchError: if the given tree does not fit the base.
        InvalidLocationError: if the base is the target itself, or the Context does not allow a base
            at its location.
        CheckpointError: if the base was not written by ckptcore, or was replaced while the ranks
            opened it, or if the layout of the update stores differences.
    """
    agreement, context = draft.save.agreement, draft.save.context
    (description,) = draft.descriptions
    assert isinstance(description, TreeDescription)  # an update is one tree

    def compare() -> None:
        saves: Sequence[Any] = stage.payloads
        if len(set(saves)) > 1:
            raise CheckpointError(
                f"the base {origin.location.display} was replaced while the ranks opened it: they found the save ids "
                f"{sorted(set(saves))}; save again. Nothing was written"
            )

    with agreement.stage("base") as stage:
        stage.decide = compare
        refuse_differences(description.layout, "but an update stores whole arrays: save without Update")
        origin = open_checkpoint(base, context)
        root = _expect_root(origin)
        update = _plan_references(draft.save.target.location, origin, root, description, context)
        written = _renumber_leaves(description, stored_tree(update.tree, update.references))
        written.layout.check(written.tree, agreement.size)
        stage.payload = root.save_id
    return update, written


def _renumber_leaves(description: TreeDescription, tree: TreeMetadata) -> TreeDescription:
    """Return the same leaves with their numbers in `tree`, which contains all of them and may contain others."""
    numbers = {path: number for number, path in enumerate(tree.paths)}
    own = [numbers[path] for path in description.tree.paths]
    stored = [tree.aliases.get(number, number) for number in own]
    positions = description.positions if description.positions is not None else {leaf: leaf for leaf in range(len(own))}
    local, remote_leaves = description.holders
    holders = BoxHolders(
        {stored[leaf]: shards for leaf, shards in local.items()},
        frozenset([own[leaf] for leaf in remote_leaves]),
    )
    shares = description.shares
    if shares is not None:
        splits = {stored[leaf]: split for leaf, split in shares.splits.items()}
        shares = SplitTree(tree, splits, {stored[leaf]: count for leaf, count in shares.replicas.items()})
    return description._replace(
        tree=tree,
        holders=holders,
        positions={own[leaf]: position for leaf, position in positions.items()},
        shares=shares,
    )


def _expect_root(checkpoint: Checkpoint) -> Root:
    if checkpoint.root is None:
        raise CheckpointError(
            f"{checkpoint.location.display} was not written by ckptcore, so an update cannot refer to it: copy it with "
            "ckptcore.copy(..., layout=...), and use the copy as the base. Nothing was written"
        )
    return checkpoint.root


def _plan_references(
    location: Location, checkpoint: Checkpoint, root: Root, description: TreeDescription, context: Context
) -> _PlannedReferences:
    """Return the references of an update to its base, and to the bases of that base.

    Raises:
        InvalidLocationError: the update cannot refer to one of the bases, or would replace it.
        TreeMismatchError: the given tree does not fit the tree of the base.
    """
    if checkpoint.location.identity == location.identity:
        raise InvalidLocationError(
            f"{location.display} cannot refer to itself: save the update to another location. Nothing was written"
        )
    refuse_other_spelling(checkpoint.location, "refer to")
    direct = Base(_base_path(location, checkpoint.location), root.save_id)
    further = [
        Base(_base_path(location, base_location(checkpoint.location, first, context)), first.save_id)
        for first in root.references.bases
    ]
    overlaid = overlay(root.tree, description.tree, *description.placeholders)
    known = {
        leaf: (base, stored)
        for leaf, base, stored in zip(root.references.leaf, root.references.base, root.references.stored, strict=True)
    }
    bases: dict[Base, int] = {}
    columns: list[tuple[int, int, int]] = []
    for leaf, base_leaf in overlaid.from_base.items():
        if not isinstance(overlaid.tree.leaves[leaf], ArrayRecord) or leaf in overlaid.tree.aliases:
            continue
        target = root.tree.aliases.get(base_leaf, base_leaf)
        base, stored = direct, target
        if target in known:  # the base only refers to this array: refer to its own base, so that references do not nest
            number, stored = known[target]
            base = further[number]
        columns.append((leaf, bases.setdefault(base, len(bases)), stored))
    leaves, numbers, stored_leaves = zip(*columns, strict=True) if columns else ((), (), ())
    references = References(tuple(bases), leaves, numbers, stored_leaves)
    base_locations = tuple([base_location(location, base, context) for base in bases])
    for at in base_locations:
        if at.is_within(location):
            raise InvalidLocationError(
                f"arrays of {checkpoint.location.display} are stored in {at.display}, which the update to "
                f"{location.display} would replace: save the update to another location. Nothing was written"
            )
    return _PlannedReferences(overlaid.tree, references, base_locations)


def _base_path(location: Location, base: Location) -> str:
    """Return the relative path by which a checkpoint refers to a base.

    Raises:
        InvalidLocationError: the base is in another storage, is hidden, or is a parent directory of the checkpoint.
    """
    here, there = location.address, base.address
    authority = authority_of(here.parent)
    if here.scheme != there.scheme or authority != authority_of(there.parent):
        raise InvalidLocationError(
            f"{location.display} cannot refer to {base.display}, which is in another storage: save to the same "
            "storage, or save the whole state with ckptcore.save"
        )
    begin = len(authority)
    path = posixpath.relpath(f"/{there.parent[begin:]}/{there.name}", f"/{here.parent[begin:]}")
    if there.name.startswith(".") or set(path.split("/")) <= {".", ".."}:
        why = "has a hidden name" if there.name.startswith(".") else "contains it"
        raise InvalidLocationError(
            f"{location.display} cannot refer to {base.display}, which {why}: save the update to another location, "
            "or rename the base. Nothing was written"
        )
    return path
