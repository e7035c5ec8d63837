"""The layouts `zarr`, `zarr3` and `ocdbt`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from ckptcore.model import JSON, ArrayRecord, Receipt, TreeMetadata, WritePlan
from ckptcore.protocols import (
    CheckpointInfo,
    ChunkIndex,
    InspectedComposite,
    Inspection,
    Layout,
    LayoutCapabilities,
    ReadStore,
    Snapshot,
    WriteStore,
)
from ckptcore_orbax.orbax.finishing import finish_arrays
from ckptcore_orbax.orbax.inspecting import inspect_composite, inspect_file, inspect_tree
from ckptcore_orbax.orbax.markers import write_marker_files
from ckptcore_orbax.zarr.chunk_index import ZarrIndex
from ckptcore_orbax.zarr.chunk_locations import DatabaseCache
from ckptcore_orbax.zarr.state import ArraysState
from ckptcore_orbax.zarr.stored_arrays import (
    ArrayOptions,
    ArrayRule,
    LayoutOptions,
    array_names,
    check_chunk_bytes,
    orbax_files,
    parse_compression,
    stored_format,
)
from ckptcore_orbax.zarr.writing import Forecast, forecast_arrays, write_arrays

_CHUNK_BYTES: Final = 64 << 20
"""Default target size of a read chunk, in bytes. Readers that decode whole chunks need this much memory."""

_DATA_FILE_BYTES: Final = 2 << 30
"""Default target size of a data file, in bytes, as in Orbax."""


@dataclass(frozen=True, slots=True)
class _OrbaxLayout(Layout):
    """Common part of the three layouts. Thread-safe.

    Attributes:
        chunk_bytes: target size of a read chunk, in bytes. A larger part of an array that one
            process writes is divided into several read chunks. With None, no part is divided.
        compression: compression of every read chunk: ``zstd``, ``gzip`` or ``blosc``, also with a level
            as in ``zstd:3``, or None.
        rules: other options for arrays selected by patterns, applied in order.
        item: name of the Orbax item, and of its directory, in a checkpoint of one tree. Version 1 of Orbax and its
            `training.Checkpointer` look for ``state``, `CheckpointManager` of version 0 looks for ``default``. Empty:
            no directory, as in the `StandardCheckpointer` and the `PyTreeCheckpointer` of version 0.
        handlers: class names of Orbax's handlers, by name of a checkpointable. Needed for checkpointables
            that Orbax does not load with its tree handler. They are written as text and never imported.
    """

    capabilities = LayoutCapabilities(any_replica_writes=True, sessions=True)

    chunk_bytes: int | None = _CHUNK_BYTES
    compression: str | None = None
    rules: Sequence[ArrayRule] = ()
    item: str = "state"
    handlers: Mapping[str, str] = field(default_factory=dict)
    _databases: DatabaseCache = field(default_factory=WeakKeyDictionary, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ValueError: an option is invalid.
        """
        check_chunk_bytes(self.chunk_bytes)
        parse_compression(self.compression)
        if self.item and not self.item.isidentifier():
            raise ValueError(f"item={self.item!r}: expected the name of a directory, such as 'state', or ''")

    def __reduce__(self) -> tuple[Callable[[], _OrbaxLayout], tuple[()]]:
        """Pickle the options only. Cached databases are not copied."""
        options = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return functools.partial(type(self), **options), ()

    def _layout_options(self) -> LayoutOptions:
        raise NotImplementedError

    def _make_options(
        self, zarr_format: Literal[2, 3], storage: Literal["ocdbt", "objects"], checksum: bool
    ) -> LayoutOptions:
        default = ArrayOptions(
            chunk_bytes=self.chunk_bytes or None,
            compression=parse_compression(self.compression),
            checksum=checksum,
        )
        return LayoutOptions(
            zarr_format=zarr_format,
            storage=storage,
            default=default,
            rules=tuple(self.rules),
            data_file_bytes=_DATA_FILE_BYTES,
            item=self.item,
            separate_nodes=False,
        )

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Reject names that collide, and arrays that cannot be stored.

        Raises:
            NameCollisionError: two leaves would have the same name.
            UnsupportedKeyError: a name is too long for a database.
            UnsupportedLeafError: an array cannot be stored with these options.
        """
        options = self._layout_options()
        names = array_names(tree, options)
        for leaf, record in enumerate(tree.leaves):
            if isinstance(record, ArrayRecord):
                stored_format(record, names[leaf], options, size)

    def names_in_keys(self, plan: WritePlan) -> Collection[str]:
        """Return the directories of arrays. Empty for a database, whose keys are not files."""
        prefix = "" if plan.name or not self.item else f"{self.item}/"
        return [prefix + name for name in self.names_written(plan.tree).values()]

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the chunks of this process.

        Raises:
            AtomicityError: this process has only some of the elements of a chunk.
        """
        return write_arrays(snapshot, self._layout_options(), store)

    def forecast(self, snapshot: Snapshot, store: WriteStore) -> Forecast:
        """Return the objects that `write` would store. Compressed chunks count with their maximum size.

        Raises:
            AtomicityError: see `write`.
        """
        return forecast_arrays(snapshot, self._layout_options(), store)

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Write the metadata of all arrays: keys, formats, and the files that Orbax reads."""
        return finish_arrays(tree, receipts, self._layout_options(), store)

    @property
    def session_options(self) -> str:
        """All options that determine how arrays are stored."""
        return self._layout_options().description

    def names_written(self, tree: TreeMetadata) -> Mapping[int, str]:
        """Return the array names if chunks are separate objects. Empty for a database, which `finish` writes."""
        options = self._layout_options()
        return {} if options.storage == "ocdbt" else array_names(tree, options)

    def renumbered(self, state: JSON, leaves: Sequence[int]) -> JSON:
        """Replace the columns of leaf numbers."""
        columns: Any = state  # the caller handles the errors of a hostile state
        return {**columns, **{name: [leaves[leaf] for leaf in columns[name]] for name in ("leaf", "digested_leaf")}}

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the files by which Orbax and zarr readers recognise a checkpoint."""
        write_marker_files(info, self._layout_options(), self.handlers, store)

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of the read chunks of each array."""
        return ZarrIndex(tree, ArraysState.from_json(state, tree), self._databases)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a checkpoint of Orbax or AXLearn whose arrays have this layout.

        Raises:
            CompositeCheckpointError: it has several checkpointables, and none is the default tree.
        """
        return inspect_tree(store, self.name, self._databases) if entry is None else None

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Recognise an Orbax checkpoint of several checkpointables, in any layout."""
        return inspect_composite(store)

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files that Orbax writes, without other files and directories next to them."""
        return orbax_files(keys, members)


@dataclass(frozen=True, slots=True)
class ZarrLayout(_OrbaxLayout):
    """zarr v2 arrays with a file per chunk, as Orbax v0 writes with ``use_ocdbt=False``. Reads files of Flax.

    Zarr v2 has no checksums; loading verifies those in the checkpoint root. Tied arrays are stored
    once per name.
    """

    name = "zarr"

    def _layout_options(self) -> LayoutOptions:
        return self._make_options(2, "objects", False)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a checkpoint of Orbax or AXLearn with zarr v2 arrays, or a file of Flax.

        Raises:
            CompositeCheckpointError: it has several checkpointables, and none is the default tree.
        """
        return _OrbaxLayout.inspect(self, store, None) if entry is None else inspect_file(store, entry, self._databases)


@dataclass(frozen=True, slots=True)
class Zarr3Layout(_OrbaxLayout):
    """zarr v3 arrays with a file per shard. Tied arrays are stored once per name.

    Attributes:
        checksum: store the CRC32C of each read chunk, which every zarr v3 reader verifies.
    """

    checksum: bool = True

    name = "zarr3"

    def _layout_options(self) -> LayoutOptions:
        return self._make_options(3, "objects", self.checksum)


@dataclass(frozen=True, slots=True)
class OcdbtLayout(_OrbaxLayout):
    """All arrays in one OCDBT database with few large files, the default format of Orbax.

    Attributes:
        checksum: store the CRC32C of each read chunk, which every zarr v3 reader verifies. Not used
            with zarr v2, which has no checksums.
        zarr_format: 3, or 2 as in Orbax v0.
        data_file_bytes: target size of a data file, in bytes.
        separate_nodes: store the nodes of the database in ``ocdbt_meta``, and values in ``ocdbt_data``, as Orbax does
            with ``store_ocdbt_metadata_and_values_separately``.
    """

    checksum: bool = True
    zarr_format: Literal[2, 3] = 3
    data_file_bytes: int = _DATA_FILE_BYTES
    separate_nodes: bool = False

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ValueError: an option is invalid.
        """
        _OrbaxLayout.__post_init__(self)
        if self.zarr_format not in (2, 3):
            raise ValueError(f"zarr_format={self.zarr_format!r}: expected 2 or 3")
        if type(self.data_file_bytes) is not int or self.data_file_bytes < 1:
            raise ValueError(f"data_file_bytes={self.data_file_bytes!r}: expected a number of bytes")

    name = "ocdbt"

    def _layout_options(self) -> LayoutOptions:
        options = self._make_options(self.zarr_format, "ocdbt", self.checksum)
        return replace(options, data_file_bytes=self.data_file_bytes, separate_nodes=self.separate_nodes)
