"""Whole copies: what a checkpoint that refers to others is copied to has all of its arrays itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

import xxhash

from ckptcore.commit.location import Place, resolve_location
from ckptcore.commit.occupants import Overwrite, read_root, root_bytes
from ckptcore.commit.root import Root
from ckptcore.commit.root_json import decode_root, encode_root, is_claim, is_partial, summarize_root
from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError, SaveLostError
from ckptcore.loading.manifests import StoredRoot
from ckptcore.loading.verify import ProgressCallback, verify_checkpoint
from ckptcore.protocols import StorageBackend
from ckptcore_tools.copies.conversion import SourceReplaced, convert_checkpoint
from ckptcore_tools.copies.copying import CopyReport, CopyVerification, copy_checkpoint

__all__ = ["copy_whole"]


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

    Such a copy is another save, whose id every copy of the same checkpoint has: what is at the destination already is known by it. One that
    is stopped begins anew the next time.

    Args:
        source, destination, context, overwrite, verify, progress, is_stopped, before_commit: as of `copy_checkpoint`.
    """

    def copy_referring(root: StoredRoot) -> CopyReport | None:
        def tell(done: int, total: int) -> None:
            if is_stopped():
                raise CancelledError
            if progress is not None:
                progress(done, total)

        there = resolve_location(destination, context.registry, durable=False, config=context.storage)
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
    there = resolve_location(destination, context.registry, durable=False, config=context.storage)
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
