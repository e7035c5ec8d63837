"""Copies of checkpoints byte for byte, between any two storages. An interrupted copy resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import xxhash

from ckptcore.commit.location import AnyLocation, Location, resolve_location
from ckptcore.commit.overwriting import fixed_names
from ckptcore.commit.root import ROOT_KEY, Claim, Root
from ckptcore.commit.root_json import (
    bases_of_root,
    decode_root,
    encode_root,
    is_claim,
    is_partial,
    read_head,
    summarize_root,
    with_order,
)
from ckptcore.commit.stored_root import Overwrite, is_claimed_by, read_root, root_bytes, root_version
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.inspection.verify import verify_checkpoint
from ckptcore.io.threads import for_each, requests_of
from ckptcore.model.metadata import ObjectRecord
from ckptcore.opening.open_checkpoints import ATTEMPTS, replaced_too_often
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.protocols import StorageBackend, Transaction
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import foreign_finder, save_created
from ckptcore_tools.copies.conversion import SourceReplacedError, convert_checkpoint
from ckptcore_tools.copies.manifests import Manifest, StoredRoot, read_manifest, refuse_destination
from ckptcore_tools.copies.transfers import Transfer

logger = logger_named("ckptcore.copying")

CopyVerification: TypeAlias = Literal["passing", "read-back"]
"""Time at which a copy is verified: while bytes are copied, or also afterwards, by reading the destination."""

_VERIFICATIONS: Final = ("passing", "read-back")
"""The values of `CopyVerification`."""

_COPY_OVER: Final = "Copy again with overwrite=True: without it, a committed copy counts as complete"
"""The remedy for a committed copy that is damaged."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Result of a copy.

    Attributes:
        objects: number of objects of the checkpoint, including its root.
        nbytes: bytes of all objects.
        sent_bytes: bytes that were written to the destination.
        kept_bytes: bytes that existed at the destination, from an interrupted or complete copy.
        read_back_bytes: bytes that were read at the destination.
        requests: number of ranges read, ranges written, and objects opened and completed. Listings and checks are not
            counted. Always 0 for a checkpoint with bases.
        unverified: keys of objects without checksums. They were copied without verification.
    """

    objects: int
    nbytes: int
    sent_bytes: int
    kept_bytes: int
    read_back_bytes: int
    requests: int
    unverified: tuple[str, ...]


def copy_checkpoint(
    source: AnyLocation,
    destination: AnyLocation,
    context: Context,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    before_commit: Callable[[], None] = lambda: None,
    copy_referring: Callable[[StoredRoot], CopyReport | None] | None = None,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> CopyReport:
    """See `ckptcore.copy`.

    Args:
        source, destination, context, overwrite, verify: see `ckptcore.copy`.
        progress: called with bytes done and total bytes, from any thread.
        is_stopped: called before each range. If it returns True, the copy raises `CancelledError`. Copied objects are
            kept for the next copy.
        before_commit: called when everything except the root is copied. Its error stops the copy, and copied objects
            are kept.
        copy_referring: copies a checkpoint that has bases. Returns None if the checkpoint was replaced during the copy.
            Without this function, such checkpoints are copied byte for byte, with their references.
        check: called with the objects to copy before anything is written. Its error stops the copy.
    """
    if verify not in _VERIFICATIONS:
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(map(repr, _VERIFICATIONS))}")
    to = resolve_location(destination, runtime_of(context).storages, to_write=True)
    refuse_destination(resolve_location(source, runtime_of(context).storages), to)
    counted = ByteProgress(progress)
    for _ in range(ATTEMPTS):
        manifest = read_manifest(source, context, without=to)
        check(manifest)
        if copy_referring is not None and manifest.root is not None and bases_of_root(manifest.root.data):
            report = copy_referring(manifest.root)
            if report is None:
                continue
            return report
        if overwrite:
            manifest = _above_replaced(manifest, to)
        counted.plan(manifest.nbytes)
        copy = _CopyAttempt(manifest, to, verify, counted, is_stopped, before_commit, context)
        if not overwrite and copy.is_there():
            to.commit_method.sweep(to)
            report = copy.report_of_complete()
            counted.end()
            return report
        _refuse_other_composite(manifest, to)
        try:
            if copy.attempt(overwrite):
                counted.end()
                return copy.report()
        except (CheckpointExistsError, SaveLostError) as error:
            # Another copy of the same save may have committed first, or may have taken over the claim of this copy.
            # With `overwrite`, CheckpointExistsError is raised only for other files at the destination.
            is_refused = error is copy.refused or (bool(overwrite) and isinstance(error, CheckpointExistsError))
            if is_refused or (not copy.is_there() and not copy.is_claimed()):
                raise
        except StorageError as error:
            # Another copy may have committed, and may have aborted the uploads of this copy.
            if error is copy.refused or overwrite or not copy.is_known_to_be_there():
                raise
    raise replaced_too_often(source)


def _above_replaced(manifest: Manifest, destination: Location) -> Manifest:
    """Return the manifest with a `SaveOrder` that is not earlier than that of the checkpoint that the copy replaces.

    With an earlier order, a run that keeps each step in two directories would replace the copy by the old checkpoint.
    """
    root = root_bytes(destination.store)
    if manifest.root is None or root is None:
        return manifest
    try:
        replaced = summarize_root(root)
    except (CorruptCheckpointError, UnsupportedVersionError):
        return manifest
    own = summarize_root(manifest.root.data)
    order = replaced.order if replaced.save_id == own.save_id else replaced.order.next
    if not replaced.committed or order <= own.order:
        return manifest
    return replace(manifest, root=replace(manifest.root, data=with_order(manifest.root.data, order)))


def _is_same_save(stored: bytes, root: bytes) -> bool:
    """Return True if two roots are equal, apart from their save orders."""
    if stored == root:
        return True
    try:
        return not is_claim(stored) and with_order(stored, summarize_root(root).order) == root
    except (CorruptCheckpointError, UnsupportedVersionError):
        return False


def _refuse_other_composite(manifest: Manifest, destination: Location) -> None:
    """Refuse to copy one of several checkpointables into another checkpoint, which would not list it as a member.

    Raises:
        InvalidLocationError: before anything is written.
    """
    head = None if manifest.root is None else read_head(manifest.root.data)
    if head is not None and head.role == "member" and root_bytes(destination.parent):
        raise InvalidLocationError(
            f"{destination.display} is inside another checkpoint. {manifest.location.display} is one of several "
            "checkpointables and can be loaded only from the checkpoint that it was saved with, or alone. Give another "
            "destination"
        )


def _refuse_names_of_others(manifest: Manifest, destination: Location) -> None:
    """Refuse to overwrite existing files at a destination whose other files are kept.

    Storages that do not replace atomically are not checked.

    Raises:
        CheckpointExistsError: before anything is written.
    """
    names = {*[record.key for record in (*manifest.objects, *manifest.markers)]}
    names.update([f"{member.directory}/{ROOT_KEY}" for member in manifest.members])
    if manifest.root is not None:
        names.discard(_index_of(manifest.root))  # the commit replaces it
    taken = sorted(names.intersection(destination.store.list()))
    if taken and destination.commit_method.replaces_atomically:
        raise fixed_names(destination.display, taken)


def _index_of(root: StoredRoot) -> str:
    """Return the key of the index that other software reads; empty if there is none."""
    decoded = decode_root(root.data, lambda key, size: root.parts[key])
    return decoded.index if isinstance(decoded, Root) else ""


class _CopyAttempt:
    """An attempt to copy the objects of a manifest."""

    def __init__(
        self,
        manifest: Manifest,
        destination: Location,
        verify: CopyVerification,
        progress: ByteProgress,
        is_stopped: Callable[[], bool],
        before_commit: Callable[[], None],
        context: Context,
    ) -> None:
        self.refused: BaseException | None = None  # the error of `before_commit`
        self._before_commit = before_commit
        self._manifest = manifest
        self._destination = destination
        self._verify = verify
        self._progress = progress
        self._is_stopped = is_stopped
        self._context = context
        self._records = (*manifest.objects, *manifest.markers)
        self._total = manifest.nbytes
        self._kept = 0
        self._roots_bytes = 0
        self._transfer: Transfer = self._begin(destination.store)

    def _begin(self, store: StorageBackend) -> Transfer:
        self._transfer = Transfer(
            self._manifest.location.store,
            store,
            runtime_of(self._context).io_threads,
            sent=self._progress.complete,
            is_stopped=self._is_stopped,
        )
        return self._transfer

    def is_there(self) -> bool:
        """Return True if the destination already has this save."""
        root, stored = self._manifest.root, root_version(self._destination.store)
        return root is not None and isinstance(stored, bytes) and _is_same_save(stored, root.data)

    def is_known_to_be_there(self) -> bool:
        """Return `is_there`, or False if the destination cannot be read."""
        try:
            return self.is_there()
        except StorageError:
            return False

    def report_of_complete(self) -> CopyReport:
        """Return the report for a copy that an earlier call completed.

        Raises:
            CorruptCheckpointError: if verification is requested and the destination is damaged.
        """
        self._kept = self._total
        if self._verify == "read-back":
            self._verify_copied(self._records, _COPY_OVER)
        return self.report()

    def is_claimed(self) -> bool:
        """Return True if another copy of this save holds the claim of the destination."""
        return is_claimed_by(root_bytes(self._destination.store), self._manifest.copy_id)

    def attempt(self, overwrite: Overwrite) -> bool:
        """Copy and commit. Return False if the source was replaced during the copy.

        Copied objects are removed if the source was replaced, and are kept after an error.

        Raises:
            CheckpointError: see `copy_checkpoint`.
        """
        claim = self._destination.commit_method.begin(
            self._destination,
            Claim(self._manifest.copy_id, save_created()),
            overwrite,
            foreign_finder(self._context),
            resume=True,
        )
        try:
            claim.expect_distinct(self._manifest.keys)
            if overwrite == "keep-other-files":
                _refuse_names_of_others(self._manifest, self._destination)
        except BaseException:
            if claim.store.list_names():
                claim.leave()  # keep the objects, so that the next copy resumes once the destination is free
            else:
                claim.abort()
            raise
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
        """Abort unfinished uploads of earlier copies. Object stores bill for them and do not delete them."""
        try:
            self._destination.store.abort_uploads()
        except StorageError as error:
            # The copy is committed. Listing uploads can need a permission that writing does not.
            logger.warning(
                "%s is copied, but unfinished uploads to it cannot be listed: %s", self._destination.display, error
            )

    def _is_unchanged(self) -> bool:
        return self._manifest.version.still_exists(self._manifest.location)

    def _send(self, store: StorageBackend) -> None:
        """Write everything but the root, and read it back if requested."""
        transfer = self._begin(store)
        kept = self._keep_complete(store)
        checked = [record for record in self._records if record.key in kept]
        for records in (self._manifest.objects, self._manifest.markers):
            checked.extend(transfer.send([record for record in records if record.key not in kept]))
        if self._verify == "read-back":
            self._verify_copied([record for record in checked if record.key not in kept], "Copy again")
        for member in self._manifest.members:
            # Write the root of a member last, because it commits the member.
            for key, data in (*member.parts.items(), (ROOT_KEY, member.data)):
                store.put(f"{member.directory}/{key}", data)
            self._count_root(member.nbytes)

    def _count_root(self, nbytes: int) -> None:
        self._roots_bytes += nbytes
        self._progress.complete(nbytes)

    def _keep_complete(self, store: StorageBackend) -> frozenset[str]:
        """Return the keys of objects that an earlier copy completed, and remove its other objects.

        An object is kept if its size and its bytes are correct. The bytes are read, because an object of the right size
        can be wrong: a file can get its size before its bytes, and a source without checksums may have been rewritten.
        The object may also belong to another save of equal shapes, if listings are outdated or if a save that lost its
        claim still runs.
        """
        stored_keys = [key for key in store.list() if key != ROOT_KEY]
        sizes: dict[str, int] = {}
        add_size = partial(_add_size, store, sizes)
        for_each(
            runtime_of(self._context).io_threads, stored_keys, add_size, parallelism=requests_of(store).concurrency
        )
        candidates = [record for record in self._records if sizes.get(record.key) == record.size]
        wrong = self._transfer.read_back(candidates)
        kept = [record for record in candidates if record.key not in wrong]
        keys = frozenset([record.key for record in kept])
        # Roots are not deleted, because they are written again, and another copy may be about to commit them.
        roots = {f"{member.directory}/{key}" for member in self._manifest.members for key in (*member.parts, ROOT_KEY)}
        if self._manifest.root is not None:
            roots.update(self._manifest.root.parts)
        if useless := [key for key in stored_keys if key not in keys and key not in roots]:
            store.delete(useless)
        if kept:
            store.sync([record.key for record in kept])  # the earlier copy may have failed before it synced them
            self._kept = sum(record.size for record in kept)
            self._progress.complete(self._kept)
        return keys

    def _verify_copied(self, records: Sequence[ObjectRecord], remedy: str) -> None:
        """Read objects at the destination and compare them.

        Args:
            records: the objects.
            remedy: what the error says to do.

        Raises:
            CorruptCheckpointError: if an object differs.
        """
        wrong = self._transfer.read_back(records)
        for key, error in wrong.items():
            raise CorruptCheckpointError(
                f"{self._destination.display}: the copy differs from the source in {len(wrong)} of {len(records)} "
                f"objects; the first is {key}: {error}. {remedy}",
                key=key,
            ) from error

    def report(self) -> CopyReport:
        """Return the report."""
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
        return  # removed since it was listed, or an outdated listing


def copy_whole(
    source: AnyLocation,
    destination: AnyLocation,
    context: Context,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    before_commit: Callable[[], None] = lambda: None,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> CopyReport:
    """Copy a checkpoint byte for byte, or, if it has bases, as a new save that contains all arrays.

    All copies of a checkpoint with bases have the same save id, so that an existing copy is recognised. An interrupted
    copy of such a checkpoint does not resume.

    Args:
        source, destination, context, overwrite, verify, progress, is_stopped, before_commit, check: see
            `copy_checkpoint`.
    """

    def copy_referring(root: StoredRoot) -> CopyReport | None:
        def report_progress(done: int, total: int) -> None:
            if is_stopped():
                raise CancelledError
            if progress is not None:
                progress(done, total)

        location = resolve_location(destination, runtime_of(context).storages)
        kept = not overwrite and _committed_save_id(location.store) == _copy_id(summarize_root(root.data).save_id)
        if not kept:
            stored = decode_root(root.data, lambda key, size: root.parts[key])
            assert isinstance(stored, Root)  # only checkpoints of one tree have bases
            try:
                convert_checkpoint(
                    source,
                    destination,
                    stored.layout,
                    overwrite,
                    report_progress,
                    context,
                    copy_id=_copy_id,
                    before_commit=before_commit,
                    expected_root=root.data,
                )
            except SourceReplacedError:
                return None
        report = _report(destination, context, kept=kept, verify=verify)
        if kept and progress is not None:
            progress(report.nbytes, report.nbytes)
        return report

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
        check=check,
    )


def _committed_save_id(store: StorageBackend) -> str | None:
    """Return the save id of a committed checkpoint. None if there is none."""
    data = root_bytes(store)
    if data is None or is_claim(data) or is_partial(data):
        return None
    return summarize_root(data).save_id


def _copy_id(source: str) -> str:
    """Return the save id of all copies of a save that has bases."""
    return xxhash.xxh3_64_hexdigest(f"whole copy of {source}".encode())


def _report(destination: AnyLocation, context: Context, *, kept: bool, verify: CopyVerification) -> CopyReport:
    location = resolve_location(destination, runtime_of(context).storages)
    root = read_root(location.store)
    if not isinstance(root, Root):
        raise SaveLostError(f"{location.display} was replaced or deleted right after the copy. Copy again")
    read_back = 0
    if verify == "read-back":
        report = verify_checkpoint(destination, context)
        for problem in report.problems:
            raise CorruptCheckpointError(
                f"{location.display}: the copy is damaged: {problem.message}. {_COPY_OVER}", key=problem.key
            )
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
