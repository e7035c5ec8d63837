"""Whole copies: what a checkpoint that refers to others is copied to has all of its arrays itself."""

from __future__ import annotations

import xxhash

from ckptcore.context import Context
from ckptcore.conversion import convert_checkpoint
from ckptcore.copying import VERIFICATIONS, CopyReport, CopyVerification, copy_checkpoint
from ckptcore.errors import CorruptCheckpointError
from ckptcore.locations import Place, resolve_location
from ckptcore.occupants import Overwrite, read_root, root_bytes
from ckptcore.root import Root
from ckptcore.root_json import encode_root, is_claim, is_partial, summarize_root
from ckptcore.verification import ProgressCallback, verify_checkpoint

__all__ = ["copy_whole"]


def copy_whole(
    source: Place,
    destination: Place,
    context: Context,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
) -> CopyReport:
    """See `ckptcore.copy`: as it is, or where it refers to others, with what these have.

    Such a copy is another save, whose id every copy of the same checkpoint has: what is at the destination already is known by it.
    """
    here = resolve_location(source, context.registry, durable=False, config=context.storage)
    data = None if here.is_object else root_bytes(here.store)
    if data is None or is_claim(data) or is_partial(data) or not summarize_root(data).bases:
        return copy_checkpoint(source, destination, context, overwrite=overwrite, verify=verify, progress=progress)
    if verify not in VERIFICATIONS:
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(map(repr, VERIFICATIONS))}")
    save_id = _save_id_of(summarize_root(data).save_id)
    there = resolve_location(destination, context.registry, durable=False, config=context.storage)
    before = root_bytes(there.store)
    kept = (
        before is not None
        and not is_claim(before)
        and not is_partial(before)
        and summarize_root(before).save_id == save_id
    )
    if not kept or overwrite:
        kept = False
        found = read_root(here.store)
        assert isinstance(found, Root)  # nothing else has bases
        convert_checkpoint(source, destination, found.layout, overwrite, progress, context, save_id_of=_save_id_of)
    return _report(destination, context, kept=kept, verify=verify)


def _save_id_of(source: str) -> str:
    """The save id of a whole copy of a save."""
    return xxhash.xxh3_64_hexdigest(f"whole copy of {source}".encode())


def _report(destination: Place, context: Context, *, kept: bool, verify: CopyVerification) -> CopyReport:
    there = resolve_location(destination, context.registry, durable=False, config=context.storage)
    root = read_root(there.store)
    assert isinstance(root, Root)
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
