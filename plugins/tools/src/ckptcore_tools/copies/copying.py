"""Copying a checkpoint byte for byte between any two storages; an interrupted copy resumes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import xxhash

from ckptcore.commit.location import Location, Place, resolve_location
from ckptcore.commit.root import ROOT_KEY, Claimed, Root
from ckptcore.commit.root_json import (
    bases_of_root,
    decode_root,
    encode_root,
    is_claim,
    is_partial,
    read_head,
    summarize_root,
)
from ckptcore.commit.target import Overwrite, is_claimed_by, read_root, root_bytes, root_mark
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
)
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import run_each
from ckptcore.loading.foreign import foreign_checkpoints
from ckptcore.loading.opening import ATTEMPTS, replaced_too_often
from ckptcore.loading.verify import ProgressCallback, verify_checkpoint
from ckptcore.model.objects import ObjectRecord
from ckptcore.protocols import StorageBackend, Transaction
from ckptcore.runtime import runtime_of
from ckptcore.saving.preparing import save_created
from ckptcore_tools.copies.conversion import SourceReplaced, convert_checkpoint
from ckptcore_tools.copies.destinations import refuse_destination
from ckptcore_tools.copies.manifests import Manifest, StoredRoot, read_manifest
from ckptcore_tools.copies.transfers import Transfer

__all__ = ["CopyReport", "CopyVerification", "copy_checkpoint", "copy_whole"]

logger = logging.getLogger("ckptcore.copying")

CopyVerification: TypeAlias = Literal["passing", "read-back"]
"""How a copy is verified: bytes are compared with their checksums as they pass; all is read at the destination, too."""

_VERIFICATIONS: Final = ("passing", "read-back")
"""The values of `CopyVerification`."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did.

    Attributes:
        objects: how many objects the checkpoint has, its root included.
        nbytes: bytes of all of them.
        sent_bytes: bytes that were written at the destination.
        kept_bytes: bytes that were there already, of a copy that died, or of one that was complete.
        read_back_bytes: bytes that were read at the destination.
        requests: ranges read, pieces written, objects begun and completed; without those that look around.
        unverified: keys of objects of which no checksums are kept: they were copied as they were read.
    """

    objects: int
    nbytes: int
    sent_bytes: int
    kept_bytes: int
    read_back_bytes: int
    requests: int
    unverified: tuple[str, ...]


def copy_checkpoint(
    source: Place,
    destination: Place,
    context: Context,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    before_commit: Callable[[], None] = lambda: None,
    copy_referring: Callable[[StoredRoot], CopyReport | None] | None = None,
) -> CopyReport:
    """See `ckptcore.copy`.

    Args:
        source, destination, context, overwrite, verify, progress: as there.
        is_stopped: asked before each piece; who says True gets a `CancelledError`, and what was copied stays for the
            next copy.
        before_commit: called when all but the root is there; what it raises is raised, and what was copied stays.
        copy_referring: copies a checkpoint whose root refers to others, and returns None if it was replaced meanwhile.
            None: such checkpoints are copied as they are.
    """
    if verify not in _VERIFICATIONS:
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(map(repr, _VERIFICATIONS))}")
    durable = context.durability == "full"
    to = resolve_location(destination, runtime_of(context).registry, durable=durable, config=context.storage)
    refuse_destination(
        resolve_location(source, runtime_of(context).registry, durable=False, config=context.storage), to
    )
    for _ in range(ATTEMPTS):
        manifest = read_manifest(source, context, without=to)
        if copy_referring is not None and manifest.root is not None and bases_of_root(manifest.root.data):
            report = copy_referring(manifest.root)
            if report is None:
                continue
            return report
        copy = _Copy(manifest, to, verify, progress, is_stopped, before_commit, context)
        if not overwrite and copy.is_there():
            to.commits.sweep(to)
            return copy.report_of_complete()
        _refuse_alien_composite(manifest, to)
        try:
            if copy.attempt(overwrite):
                return copy.report()
        except (CheckpointExistsError, SaveLostError) as error:
            # Another copy of the same save may have been faster, or have taken over from this one.
            if error is copy.refused or (not copy.is_there() and not copy.is_claimed()):
                raise
        except StorageError as error:
            # ... or have committed, and given up the uploads of this one.
            if error is copy.refused or overwrite or not copy.is_known_to_be_there():
                raise
    raise replaced_too_often(source)


def _refuse_alien_composite(manifest: Manifest, destination: Location) -> None:
    """Refuse to place one of several checkpointables in a checkpoint that it does not belong to: it would not count there.

    Raises:
        InvalidLocationError: before anything is written.
    """
    head = None if manifest.root is None else read_head(manifest.root.data)
    if head is not None and head.role == "member" and root_bytes(destination.parent):
        raise InvalidLocationError(
            f"{destination.display} is inside another checkpoint, and {manifest.location.display} is one of several "
            "checkpointables, which count only in the one that they were saved with; copy it to a location of its own"
        )


class _Copy:
    """An attempt to copy what a manifest says."""

    def __init__(
        self,
        manifest: Manifest,
        destination: Location,
        verify: CopyVerification,
        progress: ProgressCallback | None,
        is_stopped: Callable[[], bool],
        before_commit: Callable[[], None],
        context: Context,
    ) -> None:
        self.refused: BaseException | None = None  # what `before_commit` raised
        self._before_commit = before_commit
        self._manifest = manifest
        self._destination = destination
        self._verify = verify
        self._progress = progress
        self._is_stopped = is_stopped
        self._context = context
        self._records = (*manifest.objects, *manifest.marks)
        self._total = manifest.nbytes
        self._done = 0
        self._kept = 0
        self._roots_bytes = 0
        self._lock = threading.Lock()
        self._transfer: Transfer = self._begin(destination.store)

    def _begin(self, store: StorageBackend) -> Transfer:
        self._transfer = Transfer(
            self._manifest.location.store,
            store,
            runtime_of(self._context).io_threads,
            sent=self._moved,
            is_stopped=self._is_stopped,
        )
        return self._transfer

    def _moved(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def is_there(self) -> bool:
        """Whether this very checkpoint stands at the destination already."""
        root = self._manifest.root
        return root is not None and root_mark(self._destination.store) == root.data

    def is_known_to_be_there(self) -> bool:
        """Whether it stands there; False where that cannot be read."""
        try:
            return self.is_there()
        except StorageError:
            return False

    def report_of_complete(self) -> CopyReport:
        """The report of a copy that was complete before.

        Raises:
            CorruptCheckpointError: what is there is damaged, as far as it was asked for.
        """
        self._kept = self._total
        self._moved(self._total)
        if self._verify == "read-back":
            self._expect_sound(self._records)
        return self.report()

    def is_claimed(self) -> bool:
        """Whether a copy of this very checkpoint to the destination is under way or died, where such copies cannot be told apart."""
        return is_claimed_by(root_bytes(self._destination.store), self._manifest.copy_id)

    def attempt(self, overwrite: Overwrite) -> bool:
        """Copy and commit; False if the source was replaced meanwhile. What was written of that is removed, and stays after an error.

        Raises:
            What `copy_checkpoint` does.
        """
        claim = self._destination.commits.begin(
            self._destination,
            Claimed(self._manifest.copy_id, save_created()),
            overwrite,
            runtime_of(self._context).conditions,
            foreign_checkpoints(self._context),
            resume=True,
        )
        try:
            if self._commit(claim):
                return True
        except BaseException:
            claim.leave()
            raise
        claim.abort()
        return False

    def _commit(self, claim: Transaction) -> bool:
        try:
            self._send(claim.store)
        except CheckpointError:
            if self._is_unchanged():
                raise
            return False
        if not self._is_unchanged():
            return False
        try:
            self._before_commit()
        except BaseException as error:
            self.refused = error
            raise
        root = self._manifest.root
        if root is None:
            claim.commit(None, {})
        else:
            claim.commit(root.data, root.parts)
            self._count_root(root.nbytes)
        self._abort_uploads()
        return True

    def _abort_uploads(self) -> None:
        """Give up what copies before this one had begun to upload: where it is kept, it is paid for, and nobody finishes it."""
        try:
            self._destination.store.abort_uploads()
        except StorageError as error:
            # The copy is committed; who may write need not be allowed to look at uploads.
            logger.warning(
                "%s is copied, but unfinished uploads to it cannot be looked for: %s", self._destination.display, error
            )

    def _is_unchanged(self) -> bool:
        return self._manifest.mark.is_part_of(self._manifest.location)

    def _send(self, store: StorageBackend) -> None:
        """Write all but the root, and check what is to be checked."""
        transfer = self._begin(store)
        kept = self._keep(store)
        checked = [record for record in self._records if record.key in kept]
        for some in (self._manifest.objects, self._manifest.marks):
            checked.extend(transfer.send([record for record in some if record.key not in kept]))
        if self._verify == "read-back":
            self._expect_sound([record for record in checked if record.key not in kept])
        for member in self._manifest.members:
            # Its root last: it is what makes a checkpointable count, once all is committed.
            for key, data in (*member.parts.items(), (ROOT_KEY, member.data)):
                store.put(f"{member.directory}/{key}", data)
            self._count_root(member.nbytes)

    def _count_root(self, nbytes: int) -> None:
        self._roots_bytes += nbytes
        self._moved(nbytes)

    def _keep(self, store: StorageBackend) -> frozenset[str]:
        """The keys of objects that a copy before this one completed; what else it left is removed.

        An object is kept if it has its size and its bytes. Those are read: files have a size before they have their
        bytes, a source without checksums may have been written anew, and where lists are old, or a save that lost its
        claim is not dead yet, an object may be another save's of the same shapes.
        """
        found = [key for key in store.list() if key != ROOT_KEY]
        sizes: dict[str, int] = {}
        look = partial(_add_size, store, sizes)
        run_each(runtime_of(self._context).io_threads, found, look, parallelism=requests_of(store).concurrency)
        there = [record for record in self._records if sizes.get(record.key) == record.size]
        wrong = self._transfer.read_back(there)
        kept = [record for record in there if record.key not in wrong]
        keys = frozenset([record.key for record in kept])
        # Not the roots, which are written anyway: a copy of the same may be about to commit them.
        roots = {f"{member.directory}/{key}" for member in self._manifest.members for key in (*member.parts, ROOT_KEY)}
        if self._manifest.root is not None:
            roots.update(self._manifest.root.parts)
        if useless := [key for key in found if key not in keys and key not in roots]:
            store.delete(useless)
        if kept:
            store.sync([record.key for record in kept])  # who wrote them may have died before they were durable
            self._kept = sum(record.size for record in kept)
            self._moved(self._kept)
        return keys

    def _expect_sound(self, records: Sequence[ObjectRecord]) -> None:
        """Read objects at the destination.

        Raises:
            CorruptCheckpointError: they are not what was sent.
        """
        wrong = self._transfer.read_back(records)
        for key, error in wrong.items():
            raise CorruptCheckpointError(
                f"{self._destination.display} is not what was copied ({len(wrong)} of {len(records)} objects, the "
                f"first is {key}): {error}",
                key=key,
            ) from error

    def report(self) -> CopyReport:
        """What was done."""
        counts = self._transfer.counts
        return CopyReport(
            objects=self._manifest.count,
            nbytes=self._total,
            sent_bytes=counts.sent_bytes + self._roots_bytes,
            kept_bytes=self._kept,
            read_back_bytes=counts.read_back_bytes,
            requests=counts.requests,
            unverified=tuple([record.key for record in self._records if record.size and not record.checksums]),
        )


def _add_size(store: StorageBackend, sizes: dict[str, int], key: str) -> None:
    try:
        sizes[key] = store.size(key)
    except ObjectNotFoundError:
        return  # removed meanwhile, or not there in spite of a list


def copy_whole(
    source: Place,
    destination: Place,
    context: Context,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    before_commit: Callable[[], None] = lambda: None,
) -> CopyReport:
    """See `ckptcore.copy`: as it is, or where it refers to others, with what these have.

    Such a copy is another save, whose id every copy of the same checkpoint has: what is at the destination already is
    known by it. One that is stopped begins anew the next time.

    Args:
        source, destination, context, overwrite, verify, progress, is_stopped, before_commit: as of `copy_checkpoint`.
    """

    def copy_referring(root: StoredRoot) -> CopyReport | None:
        def tell(done: int, total: int) -> None:
            if is_stopped():
                raise CancelledError
            if progress is not None:
                progress(done, total)

        there = resolve_location(destination, runtime_of(context).registry, durable=False, config=context.storage)
        kept = not overwrite and _save_id(there.store) == _save_id_of(summarize_root(root.data).save_id)
        if not kept:
            found = decode_root(root.data, lambda key, size: root.parts[key])
            assert isinstance(found, Root)  # nothing else has bases
            try:
                convert_checkpoint(
                    source,
                    destination,
                    found.layout,
                    overwrite,
                    tell,
                    context,
                    save_id_of=_save_id_of,
                    before_commit=before_commit,
                    only=root.data,
                )
            except SourceReplaced:
                return None
        return _report(destination, context, kept=kept, verify=verify)

    return copy_checkpoint(
        source,
        destination,
        context,
        overwrite=overwrite,
        verify=verify,
        progress=progress,
        is_stopped=is_stopped,
        before_commit=before_commit,
        copy_referring=copy_referring,
    )


def _save_id(store: StorageBackend) -> str | None:
    """Of the checkpoint that is there; None where none is that is committed."""
    data = root_bytes(store)
    if data is None or is_claim(data) or is_partial(data):
        return None
    return summarize_root(data).save_id


def _save_id_of(source: str) -> str:
    """The save id of a whole copy of a save."""
    return xxhash.xxh3_64_hexdigest(f"whole copy of {source}".encode())


def _report(destination: Place, context: Context, *, kept: bool, verify: CopyVerification) -> CopyReport:
    there = resolve_location(destination, runtime_of(context).registry, durable=False, config=context.storage)
    root = read_root(there.store)
    if not isinstance(root, Root):
        raise SaveLostError(f"{there.display} was replaced or deleted right after it was copied; copy again")
    read_back = 0
    if verify == "read-back":
        report = verify_checkpoint(destination, context, None)
        for problem in report.problems:
            raise CorruptCheckpointError(f"{there.display} is not what was copied: {problem.message}", key=problem.key)
        read_back = report.nbytes
    encoded, parts = encode_root(root)
    nbytes = sum([record.size for record in root.objects.values()]) + len(encoded) + sum(map(len, parts.values()))
    return CopyReport(
        objects=len(root.objects) + 1 + len(parts),
        nbytes=nbytes,
        sent_bytes=0 if kept else nbytes,
        kept_bytes=nbytes if kept else 0,
        read_back_bytes=read_back,
        requests=0,
        unverified=tuple([record.key for record in root.objects.values() if record.size and not record.checksums]),
    )
