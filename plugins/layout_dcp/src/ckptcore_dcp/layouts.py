"""The layout `dcp`: checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from ckptcore.errors import PluginError
from ckptcore.model import JSON, ArrayRecord, LeafRecord, Receipt, TreeMetadata
from ckptcore.protocols import (
    ChunkIndex,
    InspectedComposite,
    Inspection,
    Layout,
    LayoutCapabilities,
    ReadStore,
    Snapshot,
    WriteStore,
)
from ckptcore_dcp.chunk_index import dcp_index
from ckptcore_dcp.directories import dcp_files, inspect_step_directory
from ckptcore_dcp.inspecting import inspect_dcp, inspect_entries
from ckptcore_dcp.metadata import DcpMetadata, DcpTensors, DcpValue, TensorHead, ranges_of, write_metadata
from ckptcore_dcp.names import EntryCache, TreeEntries
from ckptcore_dcp.stored_tensors import physical_spec, torch_dtype
from ckptcore_dcp.writing import MergedItems, data_file_name, write_items, write_values

_METADATA = ".metadata"
_MANY_PROCESSES: Final = 1024
"""Default of `spread_from`. Object stores accept a few thousand requests a second per key prefix."""


@dataclass(frozen=True, slots=True)
class DcpLayout(Layout):
    """One file per process, ``__0_0.distcp``, and ``.metadata``, which lists where every tensor is stored.

    ``torch.distributed.checkpoint.load`` reads it with any number of processes. An array whose
    dtype torch lacks is stored as uint8, with the bytes of an element as an extra last axis. Times
    are stored as int64. The original dtype is in the checkpoint root. Tied arrays are stored once
    and listed under each of their names.

    Attributes:
        spread_from: number of processes from which the files are spread over directories named by a
            hash. Object stores limit the request rate per key prefix; spreading avoids that limit.
            1: always; None: never.
        checkpoint_id, save_id: ids in ``.metadata``, where ``torch.distributed.checkpoint.save``
            stores the location and a random id. None for no id.
        items: names of values whose bytes are a file of ``torch.save``. The file is stored as it
            is, so that torch loads the object in it. ``ckptcore.load`` returns the bytes.
    """

    capabilities = LayoutCapabilities(any_replica_writes=True, sessions=True)

    spread_from: int | None = _MANY_PROCESSES
    checkpoint_id: str | None = None
    save_id: str | None = None
    items: frozenset[str] = frozenset()
    _tag: str = field(default="", repr=False, kw_only=True)
    _names: EntryCache = field(default_factory=EntryCache, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[], DcpLayout], tuple[()]]:
        """Pickle the options only. The cache of names is not copied."""
        options = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return functools.partial(type(self), **options), ()

    name = "dcp"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Reject trees whose names collide.

        Raises:
            NameCollisionError: two entries would have the same name. See `tree_entries`.
            ValueError: a value in `items` is missing, or is not bytes.
        """
        names = self._names.of(tree)
        missing = self.items - {entry.name for entry in names.values if isinstance(entry.value, bytes)}
        if missing:
            raise ValueError(f"DcpLayout(items=...): the state has no bytes named {sorted(missing)[:20]}")

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the file of this process. The leader also writes the values, except in a session."""
        plan = snapshot.plan
        # In a session no process knows all values, so `finish` writes them.
        values = self._names.of(plan.tree).values if plan.rank == 0 and plan.session is None else ()
        spread = self.spread_from is not None and plan.size >= self.spread_from
        file = data_file_name(plan.rank, spread=spread, tag=self._tag)
        state: dict[str, JSON] = (
            {"spread": spread} if plan.session is None else {"spread": spread, "session": plan.session}
        )
        return {
            **state,
            **write_items(snapshot, values, store, file, self.items).to_json(),
        }

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Write ``.metadata`` and return the table of elements. After a session, also write the values.

        ckptcore loads with this table alone, without reading ``.metadata`` or zip headers.
        """
        names = self._names.of(tree)
        parts = [(self._file_of(receipt), receipt.state) for receipt in receipts]
        if names.values and any("session" in state for _, state in parts):  # type: ignore[operator]  # see `write`
            file = data_file_name(max(receipt.rank for receipt in receipts) + 1, spread=False)
            parts.append((file, write_values(names.values, store, file, self.items).to_json()))
        written = MergedItems(tree, parts)
        if len(written.values) != len(names.values):
            raise PluginError(f"the leader reported {len(written.values)} stored values; expected {len(names.values)}")
        values = {stored.name: value for stored, value in zip(names.values, written.values, strict=True)}
        metadata = _build_metadata(tree, names, written, values)
        ids = replace(metadata, save_id=self.save_id, checkpoint_id=self.checkpoint_id)
        store.put(_METADATA, write_metadata(ids))
        return written.to_json()

    def _file_of(self, receipt: Receipt) -> str:
        state: Any = receipt.state
        return data_file_name(receipt.rank, spread=state["spread"], tag=self._tag)

    def with_own_names(self, tag: str) -> Layout:
        """Return a layout for files such as ``__0_0.<tag>.distcp``."""
        return replace(self, _tag=tag)

    @property
    def index_name(self) -> str | None:
        """``.metadata``, which torch reads first, if the names of data files contain a tag; else None."""
        return _METADATA if self._tag else None

    def renumbered(self, state: JSON, leaves: Sequence[int]) -> JSON:
        """Replace the leaf numbers in the column ``leaf``."""
        columns: Any = state  # the caller handles the errors of a hostile state
        return {**columns, "leaf": [leaves[leaf] for leaf in columns["leaf"]]}

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the chunk table: byte ranges of elements, or items written by other software."""
        return dcp_index(tree, state)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a directory with ``.metadata``, or safetensors shards written by torch.distributed.checkpoint."""
        return inspect_dcp(store, entry)

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Recognise a directory of a training program that contains torch.distributed.checkpoint directories."""
        return inspect_step_directory(store)

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files that torch.distributed.checkpoint writes. Excludes files such as weights and tokenizers."""
        return dcp_files(keys, members)


@dataclass(frozen=True, slots=True)
class DcpEntries(DcpLayout):
    """Reads checkpoints of ``torch.distributed.checkpoint`` as their ``.metadata`` lists them. Writes nothing.

    The tree is a flat dict of entries by name. A value is the bytes of its item, which is a file of
    ``torch.save``. ``custom`` has the keys that lead to each entry (``paths``), and the ids of the
    save (``checkpoint_id``, ``save_id``). Software that decodes the values itself can register this
    class as a layout with ``PluginOptions(extra=[...])``. Its name precedes ``dcp`` in the alphabet,
    so that it inspects a directory first.
    """

    name = "0-dcp-entries"

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Refuse to write.

        Raises:
            PluginError: always.
        """
        raise PluginError('the layout "0-dcp-entries" only reads; save with layout="dcp"')

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a directory with ``.metadata``."""
        return inspect_entries(store, entry)

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Return None: the layout `dcp` recognises directories of a training program."""
        return None


def _build_metadata(
    tree: TreeMetadata, names: TreeEntries, written: MergedItems, values: Mapping[str, DcpValue]
) -> DcpMetadata:
    columns, bounds = written.chunks()
    arrays = [stored.leaf for stored in names.arrays]
    leaves = np.array([tree.aliases.get(leaf, leaf) for leaf in arrays] if tree.aliases else arrays, np.int64)
    counts = np.diff(bounds)[leaves]
    columns = columns.take(ranges_of(bounds[leaves], counts))
    records = [tree.leaves[leaf] for leaf in arrays]
    kinds = {id(record): _tensor_head(record) for record in {id(record): record for record in records}.values()}
    heads = {stored.name: kinds[id(record)] for stored, record in zip(names.arrays, records, strict=True)}
    return DcpMetadata(DcpTensors.of_columns(heads, columns, counts), values, names.paths)


def _tensor_head(record: LeafRecord) -> TensorHead:
    assert isinstance(record, ArrayRecord)  # an `ArrayEntry` is an array
    physical = physical_spec(record.spec)
    return torch_dtype(physical.dtype, record.kind), physical.shape, False
