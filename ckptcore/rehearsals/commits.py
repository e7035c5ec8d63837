"""What the leader adds to a checkpoint in a rehearsal: the layouts' own code, with receipts that nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.commit import Claim
from ckptcore.context import Context
from ckptcore.locations import subdirectory
from ckptcore.model.transfer import Receipt
from ckptcore.parts import Part
from ckptcore.persisting import Described
from ckptcore.planning import check_coverage
from ckptcore.protocols import About, Layout, MarksCheckpoints, StorageBackend
from ckptcore.rehearsals.sizes import SizeRecorder
from ckptcore.root import ROOT_KEY, Composite, Root, this_writer
from ckptcore.root_json import encode_composite, encode_root

__all__ = ["finish_part", "put_root", "rehearse_commit"]


def finish_part(
    described: Described, part: Part, receipts: Sequence[Receipt], store: StorageBackend, context: Context
) -> Root:
    """Make what processes wrote of a part one whole; its root.

    Raises:
        CorruptCheckpointError: if what the processes would write does not make up the arrays.
    """
    tree = part.plan.tree
    check_coverage(tree, receipts)
    recorder = SizeRecorder(store, checksums=context.checksums)
    state = part.layout.finish(tree, receipts, recorder)
    records = [*(record for receipt in receipts for record in receipt.objects), *recorder.objects]
    return Root(
        save_id=described.save_id,
        created=described.created,
        writer=this_writer(),
        layout=part.layout.name,
        state=state,
        tree=tree,
        objects={record.key: record for record in records},
        custom={} if described.members is not None else described.custom,
        member=described.members is not None,
    )


def put_root(store: StorageBackend, root: Root) -> None:
    """Put the root of a part that is one of several checkpointables."""
    data, tables = encode_root(root)
    for key, table in tables.items():
        store.put(key, table)
    store.put(ROOT_KEY, data)


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
        inside = subdirectory(claim.store, part.directory) if part.directory else claim.store
        root = finish_part(described, part, [of_rank[number] for of_rank in receipts], inside, context)
        if described.members is None:
            whole = root
        else:
            put_root(inside, root)
    if whole is not None:
        _mark(parts[0].layout, described.about, claim, context)
        data, tables = encode_root(whole)
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
