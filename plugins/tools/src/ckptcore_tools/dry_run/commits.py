"""What the leader adds to a checkpoint in a rehearsal: the layouts' own code, with receipts that nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.commit.commit import Claim
from ckptcore.commit.location import subdirectory
from ckptcore.commit.root import Composite, Root, this_writer
from ckptcore.commit.root_json import encode_composite, encode_root
from ckptcore.context import Context
from ckptcore.model.transfer import Receipt
from ckptcore.protocols import About, Layout, MarksCheckpoints
from ckptcore.saving.persisting import Described, finish_part, put_root
from ckptcore_tools.dry_run.sizes import SizeRecorder

__all__ = ["rehearse_commit"]


def rehearse_commit(
    described: Described, claim: Claim, receipts: Sequence[Sequence[Receipt]], context: Context
) -> None:
    """Commit a checkpoint on the leader.

    Args:
        described: the checkpoint.
        claim: of the leader.
        receipts: by rank, of each part that the processes write together.
        context: options.
    """
    parts = [part for part in described.parts if not part.own]
    whole: Root | None = None
    for number, part in enumerate(parts):
        inside = subdirectory(claim.store, part.directory)
        recorder = SizeRecorder(inside, checksums=context.checksums)
        root = finish_part(described, part, [of_rank[number] for of_rank in receipts], recorder)
        if described.members is None:
            whole = root
        else:
            put_root(inside, root)
    if whole is not None:
        _mark(parts[0].layout, described.about, claim, context)
        data, tables = encode_root(replace(whole, custom=described.custom))
    else:
        layouts = {part.layout.name: part.layout for part in described.parts if part.layout.name != FilesLayout.name}
        for layout in layouts.values():
            _mark(layout, described.about, claim, context)
        composite = Composite(
            save_id=described.save_id,
            created=described.created,
            writer=this_writer(),
            members=described.members or {},
            custom=described.custom,
        )
        data, tables = encode_composite(composite)
    claim.commit(data, tables)


def _mark(layout: Layout, about: About, claim: Claim, context: Context) -> None:
    if isinstance(layout, MarksCheckpoints):
        layout.mark(about, SizeRecorder(claim.store, checksums=context.checksums))
