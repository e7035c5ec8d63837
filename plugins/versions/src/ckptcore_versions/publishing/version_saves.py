"""The saves of versions: their base, the copy that becomes the next base, and their commit."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptcore_incremental.based_commits import BasedCommit, import_locks

from ckptcore.commit.location import Location
from ckptcore.commit.root import Base, CompositeRoot, Root
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import parse_root, root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TreeMismatchError,
    UnsupportedLeafError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.loading.reading import incomplete_read
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON, TreePath
from ckptcore.opening.bases import base_location
from ckptcore.opening.checkpoint import Checkpoint, naming_arrays
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.planning import plan_read
from ckptcore.protocols import SaveCommit, Snapshot
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import TreeDescription
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft, TreeCaptured
from ckptcore.saving.writing import PlainSave
from ckptcore.select import Selection
from ckptcore_versions.chains import Chain, ChainVersion
from ckptcore_versions.held_version import BaseVersion, VersionLayout
from ckptcore_versions.publishing.held_weights import HeldWeights
from ckptcore_versions.publishing.selecting import selected
from ckptcore_versions.tensor_names import tensor_names
from ckptcore_versions.version_directory import VersionDirectory
from ckptcore_versions.version_labels import labels_in, metadata_of

logger = logger_named("ckptcore.versions")


class VersionRequest(NamedTuple):
    """The arguments of one publish.

    Attributes:
        number: the number of the version.
        step: its training step; None if unknown.
        latest: the number of the newest committed version; None if there is none.
        full: True to write a full version.
    """

    number: int
    step: int | None
    latest: int | None
    full: bool


@dataclass(slots=True)
class Publications:
    """The publishes of one process: the options of all, and what one leaves for the next.

    Attributes:
        directory: the directory of the versions.
        layout: the layout of the versions.
        held: the copy of the newest version.
        full_every: the most versions of a chain.
        run: the name of the run; None: that of the newest version, or a new one.
        select: the leaves of each version; None: all.
        digests: True to label each array with a digest.
        chain: the newest chain. Used on the leader.
        request: the publish that begins now. Set on the thread that calls `Publisher.publish`.
    """

    directory: VersionDirectory
    layout: VersionLayout
    held: HeldWeights
    full_every: int
    run: str | None
    select: Selection | None
    digests: bool
    chain: Chain = field(default_factory=Chain)
    request: VersionRequest | None = None


@dataclass(frozen=True, slots=True)
class VersionSave(PlainSave):
    """Save a version: a delta against the newest version, or a full version. See `SaveStrategy`.

    Attributes:
        publications: the publishes of this process.
        request: the arguments of this one.
    """

    publications: Publications
    request: VersionRequest

    def prepare(self, draft: SaveDraft) -> Save:
        """Choose the base, plan the version, and hold the elements of the base.

        Raises:
            TreeMismatchError: nothing is selected, or there are no arrays.
            UnsupportedLeafError: an array needs a digest, and no process holds all of it.
            NameCollisionError: two arrays that need digests have the same name.
            InsufficientMemoryError, StorageFullError: there is no memory for the copy.
            CheckpointError: the storage failed.
        """
        agreement, publications = draft.save.agreement, self.publications
        if publications.select is not None:
            (description,) = draft.descriptions
            assert isinstance(description, TreeDescription)  # versions are saved as one tree
            plugins = runtime_of(draft.save.context).registry
            draft = draft._replace(descriptions=[selected(description, publications.select, plugins)])
        save = PlainSave.prepare(self, draft)
        plan = save.parts[0].plan
        if not any(isinstance(record, ArrayRecord) for record in plan.tree.leaves):
            raise TreeMismatchError(
                "the given tree has no arrays, so there are no weights to publish: pass those of a model. Nothing was "
                "written",
                ["there are no arrays"],
            )
        decided: Any = agreement.lead("base", lambda: self._choose_base(plan.tree))
        base = None if decided is None else BaseVersion(*decided)
        with agreement.stage("hold", meaning=NOTHING_COMMITTED) as stage:
            damage = self._hold(plan, base, draft.save.context)
            stage.payload = {"damage": damage, "whole": _whole_leaves(plan) if publications.digests else []}
        payloads: Sequence[Any] = stage.payloads
        if publications.digests:
            agreement.lead("digests", lambda: _refuse_divided(plan, [payload["whole"] for payload in payloads]))
        damages = agreement.lead("damage", lambda: [each["damage"] for each in payloads if each["damage"] is not None])
        if damages:
            assert base is not None  # a full version reads nothing
            if agreement.rank == 0:
                logger.warning(
                    "version %d cannot be read, so version %d is written as a full version: %s",
                    base.number, self.request.number, damages[0],
                )  # fmt: skip
            base = None
            with agreement.stage("hold all", meaning=NOTHING_COMMITTED):
                self._hold(plan, None, draft.save.context)
        layout = publications.layout.numbered(self.request.number)
        save.parts[0].layout = layout.against(None if base is None else publications.held)
        import_locks(_locations(save, base))
        return save._replace(strategy=_BasedVersion(publications, self.request, base))

    def _choose_base(self, tree: TreeMetadata) -> list[JSON] | None:
        """Return the fields of the base of a version with a tree; None for a full version. Called on the leader."""
        publications, latest, directory = self.publications, self.request.latest, self.publications.directory
        none = Chain(run=publications.chain.run)
        if latest is None:
            publications.chain = none
            return None
        data = root_bytes(directory.store_of(latest))
        try:
            if data is None:
                raise CheckpointNotFoundError("other software wrote it, or it was deleted meanwhile")
            known = publications.chain.versions
            if not known or (known[-1].number, known[-1].save_id) != (latest, summarize_root(data).save_id):
                publications.chain = _chain_of(directory, latest, data, publications.layout.name)
        except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError) as error:
            logger.warning(
                "version %d cannot be a base, so version %d is written as a full version: %s",
                latest, self.request.number, error,
            )  # fmt: skip
            publications.chain = none
            return None
        if self.request.full or publications.chain.needs_full(publications.full_every):
            return None
        layout, known_tree = publications.layout, publications.chain.tree
        assert data is not None and known_tree is not None  # the chain has the version
        if not (layout.accepts_base(latest, self.request.number) and layout.accepts_arrays(known_tree, tree)):
            return None
        save_id = publications.chain.versions[-1].save_id
        return list(BaseVersion(directory.name(latest), save_id, hashlib.sha256(data).hexdigest(), latest))

    def _hold(self, plan: WritePlan, base: BaseVersion | None, context: Context) -> str | None:
        """Hold the base. Return the reason if it cannot be read."""

        def read(boxes: Sequence[tuple[TreePath, ArraySpec, Box]], buffers: Sequence[HostArray]) -> list[bool]:
            assert base is not None  # a full version reads nothing
            location = self.publications.directory.location_of(base.number)
            return _read_base(open_checkpoint(location, context), base, boxes, buffers) if boxes else []

        try:
            self.publications.held.hold(plan, base, read)
        except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError) as error:
            return f"{type(error).__name__}: {error}"
        return None


@dataclass(frozen=True, slots=True)
class _BasedVersion(VersionSave):
    """A planned version.

    Attributes:
        base: its base; None for a full version.
    """

    base: BaseVersion | None

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the version."""
        return _VersionCommit(save, self.publications, self.request, self.base)


class _VersionCommit(BasedCommit):
    """Commit of a version. Pins the base until the version is committed, and then holds the version."""

    def __init__(
        self, save: Save, publications: Publications, request: VersionRequest, base: BaseVersion | None
    ) -> None:
        super().__init__(save, _bases(base), _locations(save, base))
        self._publications = publications
        self._request = request
        self._is_full = base is None
        self._digests: dict[str, str] = {}
        self._run = ""
        self._nbytes = 0

    def claim(self) -> None:
        """Claim the location, and let the written elements replace those of the base. See `SaveCommit`."""
        super().claim()
        part = self._save.parts[0]
        assert isinstance(part.captured, TreeCaptured)  # no workers hold boxes: `Publisher` refuses them
        digests = self._digests if self._publications.digests else None
        snapshot = _ReplacingSnapshot(part.captured.snapshot, self._publications.held, digests)
        part.captured = part.captured._replace(snapshot=snapshot)

    def commit(self, payloads: Sequence[object]) -> None:
        """Collect the digests of all processes, then commit. See `SaveCommit`."""
        if self._publications.digests:
            with self._save.agreement.part("digests").stage("digests", meaning=NOTHING_COMMITTED) as stage:
                stage.payload = dict(self._digests)
            collected: Sequence[Any] = stage.payloads
            for digests in collected:
                self._digests.update(digests)
            tree = self._save.parts[0].plan.tree
            names = tensor_names(tree)
            self._digests.update({names[alias]: self._digests[names[leaf]] for alias, leaf in tree.aliases.items()})
        super().commit(payloads)

    def _completed(self, root: Root | CompositeRoot) -> Root | CompositeRoot:
        """Return the root with the labels of the version."""
        root = super()._completed(root)
        assert isinstance(root, Root)  # a version is one tree
        publications, request = self._publications, self._request
        self._run = publications.run or publications.chain.run or uuid.uuid4().hex
        self._nbytes = sum([record.size for record in root.objects.values()])
        labels = metadata_of(self._run, request.number, request.step, self._digests)
        return replace(root, custom={**root.custom, **labels})

    def settle(self, error: Exception | None) -> None:
        """Settle the save. If the version is committed, hold it."""
        super().settle(error)
        publications, number, save_id = self._publications, self._request.number, self._save.info.save_id
        publications.held.committed(number, save_id)
        version, tree = ChainVersion(number, save_id, self._nbytes), self._save.parts[0].plan.tree
        publications.chain.add(version, tree, is_full=self._is_full)
        publications.chain.run = self._run


def _bases(base: BaseVersion | None) -> Sequence[Base]:
    return [] if base is None else [Base(base.name, base.save_id)]


def _locations(save: Save, base: BaseVersion | None) -> Sequence[Location]:
    return [base_location(save.target.location, each, save.context) for each in _bases(base)]


class _ReplacingSnapshot:
    """Snapshot that replaces the elements of the base by those of the version, once they are written. See `Snapshot`.

    A layout reads the held elements of an item before it releases the item.
    """

    def __init__(self, snapshot: Snapshot, held: HeldWeights, digests: dict[str, str] | None) -> None:
        """`digests` gets the digest of each array that this process writes as a whole; None: compute none."""
        self.plan = snapshot.plan
        self._snapshot = snapshot
        self._held = held
        self._digests = digests
        self._names = {} if digests is None else tensor_names(self.plan.tree)
        self._taken: dict[int, Sequence[HostArray]] = {}

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        arrays = self._taken[item] = self._snapshot.take(item)
        return arrays

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        arrays = self._taken.pop(item, None)
        if arrays is not None:  # otherwise the writer failed before it took the item
            leaf = self.plan.items[item].leaf
            path = self.plan.tree.paths[leaf]
            self._held.replace(path, arrays)
            if self._digests is not None and (pieces := self._held.pieces(path)) is not None:
                digest = hashlib.sha256()
                for piece in pieces:
                    digest.update(piece)
                self._digests[self._names[leaf]] = digest.hexdigest()
        self._snapshot.release(item)


def _whole_leaves(plan: WritePlan) -> list[JSON]:
    """Return the arrays that this process writes as a whole."""
    return [item.leaf for item in plan.items if sum([box.size for box in item.boxes]) == item.spec.size]


def _refuse_divided(plan: WritePlan, whole: Sequence[Sequence[int]]) -> None:
    """Refuse digests of arrays that no process writes as a whole. Called on the leader.

    Args:
        plan: the plan of any process.
        whole: for each process, the arrays that it writes as a whole.

    Raises:
        UnsupportedLeafError
        NameCollisionError: two arrays would have the same name in the labels.
    """
    tree, names, covered = plan.tree, tensor_names(plan.tree), {leaf for leaves in whole for leaf in leaves}
    divided = [
        names[leaf]
        for leaf, record in enumerate(tree.leaves)
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases and leaf not in covered
    ]
    if divided:
        raise UnsupportedLeafError(
            f"{', '.join(divided[:20])}: no process holds all of the array, and its digest needs all of its elements. "
            f"Use a Publisher without digests=True. {NOTHING_COMMITTED.capitalize()}"
        )


def _chain_of(directory: VersionDirectory, number: int, data: bytes, layout: str) -> Chain:
    """Return the chain of a version; without versions if no delta can follow it. Reads the root of each version.

    Args:
        directory: the directory of the versions.
        number: the number of the version.
        data: its root.
        layout: the layout of the next version. All deltas of a chain have one layout.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError: a version cannot be read.
    """
    versions: list[ChainVersion] = []
    run, tree = "", None
    while True:
        root = parse_root(directory.store_of(number), data, directory.name(number))
        if not versions and isinstance(root, Root):
            tree, stored = root.tree, labels_in(root.custom)
            run = "" if stored is None else stored[0]
        if not isinstance(root, Root) or (root.references.bases and root.layout != layout):
            return Chain(run=run)
        versions.insert(0, ChainVersion(number, root.save_id, sum([record.size for record in root.objects.values()])))
        base = directory.base_of(number)
        if base is None:
            return Chain(versions, run, tree)
        if base >= number:
            raise CorruptCheckpointError(f"version {number} names the later version {base} as its base")
        stored_root = root_bytes(directory.store_of(base))
        if stored_root is None:
            raise CheckpointNotFoundError(f"version {base}, which version {number} needs, was deleted")
        number, data = base, stored_root


def _read_base(
    checkpoint: Checkpoint,
    base: BaseVersion,
    boxes: Sequence[tuple[TreePath, ArraySpec, Box]],
    buffers: Sequence[HostArray],
) -> list[bool]:
    """Read boxes of a base. See `ReadBase`.

    Raises:
        CorruptCheckpointError: it is damaged, or another checkpoint than expected.
    """
    data = checkpoint.version.root
    if not isinstance(data, bytes) or hashlib.sha256(data).hexdigest() != base.digest:
        raise CorruptCheckpointError(f"{checkpoint.location.display} is not the version that this run published last")
    tree = checkpoint.tree
    leaves = {path: leaf for leaf, path in enumerate(tree.paths)}

    def leaf_of(path: TreePath, spec: ArraySpec) -> int | None:
        leaf = leaves.get(path)
        if leaf is None:
            return None
        record, stored = tree.leaves[leaf], tree.aliases.get(leaf, leaf)
        return stored if isinstance(record, ArrayRecord) and record.spec == spec else None

    numbers = [leaf_of(path, spec) for path, spec, _ in boxes]
    stored = [
        (leaf, box, buffer)
        for leaf, (_, _, box), buffer in zip(numbers, boxes, buffers, strict=True)
        if leaf is not None
    ]
    with naming_arrays(checkpoint):
        plan = plan_read(tree, [(leaf, (box,)) for leaf, box, _ in stored])
        missing = set(range(len(stored))).difference(checkpoint.read(plan, [buffer for _, _, buffer in stored]))
    if missing:
        raise incomplete_read(checkpoint, stored[min(missing)][0])
    return [leaf is not None for leaf in numbers]
