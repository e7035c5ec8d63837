"""Protocols of layouts, which store the arrays of a tree in objects, and of the stores that layouts use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import PluginError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import Chunk, ChunkLocations, ChunkRead, Pending, ReadItem, Receipt, Segment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols.derived import DerivedArray
from ckptcore.protocols.storage import StorageAddress


class Snapshot(Protocol):
    """The arrays of one save, in host memory or being copied to it. Thread-safe."""

    @property
    def plan(self) -> WritePlan:
        """The boxes that this process writes."""

    def take(self, item: int) -> Sequence[HostArray]:
        """Wait for the elements of each box of ``plan.items[item]``, and return them.

        The arrays may have any strides and byte order.
        """

    def release(self, item: int) -> None:
        """Release the memory of an item after it was written. The item is not taken again."""


class WriteStore(Protocol):
    """The objects of a checkpoint that is being written: a storage that records sizes and checksums. Thread-safe."""

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Write a small object."""

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object that consists of these segments, in this order, on the core's I/O threads.

        Segments are opened one after the other while the object is written, and closed once their bytes are written.
        The threads that write the bytes also compute inline checksums.

        Raises:
            PluginError: the arrays of a segment do not make up its box, or an inline checksum covers another checksum.
        """

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """Write objects, concurrently if that suits the storage. Return when all are complete. See `write`.

        One thread at a time advances the iterator. It may be another thread than the caller's. Objects are started in
        the order of the iterator, and may be completed in any order. After the first error, no further object is
        started.
        """


class ReadStore(Protocol):
    """The objects of a checkpoint that is being read: a storage that verifies checksums. Thread-safe."""

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends earlier.

        Raises:
            ObjectNotFoundError, ChecksumError
        """

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """Return the result of `get` for each (key, start, stop), in order; None if there is no such object.

        Close ranges share a request, and requests run concurrently if that is faster. Use it for many small ranges that
        are not adjacent. All results are in memory at the same time.

        Raises:
            ChecksumError
        """

    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectNotFoundError
        """

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``."""

    def start(self, work: Callable[[], None]) -> None:
        """Call a function later on one of the core's I/O threads, or now on this thread if none can be started.

        All threads may be busy with work that waits for the caller. So the caller must not wait for a call that has not
        begun, but do its work itself.

        Args:
            work: must not raise.
        """

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        """Fill targets on the core's I/O threads. Yields the number of a target once its chunks in `reads` are read.

        A store that verifies has by then compared the chunks with the checksums recorded for their objects, or with
        their inline checksums. To do this, it may read a whole chunk although only a part is requested.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: an object ends too early, or different chunks with inline checksums overlap.
        """

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``items[i]``; yields `i` once it is complete and verified.

        Args:
            index: locates the arrays.
            items: the boxes to read.
            buffers: C-contiguous and writable, of the box's shape and the stored dtype.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
            UnsupportedLeafError: an array is stored in a way that cannot be read.
        """


_EMPTY: Final[Mapping[str, Any]] = {}

MemberKind: TypeAlias = Literal["tree", "files"]
"""The kind of a checkpointable: a tree of arrays and values, or files that its object wrote."""


class Inspection(NamedTuple):
    """A checkpoint that other software wrote.

    Attributes:
        tree: its content.
        state: JSON for `Layout.index`: the positions of arrays.
        writer: the software that wrote it, as far as known.
        custom: metadata of the user.
        metrics: measurements.
        created: the time at which it was written, ISO 8601 in UTC; None if unknown.
        unused: by object, the names of stored arrays that are not leaves of the tree, because the index of the
            checkpoint names another copy of the array, or does not name the array. Shown to the user.
        files: the objects of the checkpoint. Objects with arrays, and objects in `unused`, may be left out.
    """

    tree: TreeMetadata
    state: JSON
    writer: str
    custom: Mapping[str, JSON] = _EMPTY
    metrics: Mapping[str, float] = _EMPTY
    created: str | None = None
    unused: Mapping[str, Sequence[str]] = _EMPTY
    files: Collection[str] = ()


class InspectedComposite(NamedTuple):
    """A checkpoint of several checkpointables that other software wrote.

    Attributes:
        members: the kind of each checkpointable by name, in order. A checkpointable is a directory with this name, or a
            file with this name that contains a tree. A tree may have any installed layout. Other directories, such as
            metadata, are left out. The directory or file of a checkpointable may be missing.
        writer, custom, metrics, created: properties of the checkpoint as a whole. See `Inspection`.
        default: the checkpointable that `inspect` finds, and that a load of one tree uses; None if it finds none.
    """

    members: Mapping[str, MemberKind]
    writer: str
    custom: Mapping[str, JSON] = _EMPTY
    metrics: Mapping[str, float] = _EMPTY
    created: str | None = None
    default: str | None = None


class CheckpointInfo(NamedTuple):
    """Information about a checkpoint as a whole, for metadata files of a layout.

    Attributes:
        created: the time at which the save began, ISO 8601 in UTC.
        custom: metadata of the user.
        metrics: measurements of the user; numbers may be non-finite.
        members: the kind of each checkpointable, by its directory. A checkpointable that every process saved
            separately has a directory for each process (``data.rank_0``). Empty if the checkpoint is one tree.
    """

    created: str
    custom: Mapping[str, JSON] = _EMPTY
    metrics: Mapping[str, float] = _EMPTY
    members: Mapping[str, MemberKind] = _EMPTY


class BaseReference(NamedTuple):
    """A checkpoint that another one needs, because the other stores only its differences from it.

    Attributes:
        name: the name of its directory, which is in the same directory as that of the other checkpoint. May be hostile.
        save_id: its save id; empty: not compared, for a checkpoint that other software wrote.
        digest: the SHA-256 of its root, in hex digits; empty: not compared.
        remedy: a sentence for the error if it cannot be read; empty for none.
    """

    name: str
    save_id: str = ""
    digest: str = ""
    remedy: str = ""


class ChainLink(NamedTuple):
    """A checkpoint of a chain, in the terms of its layout.

    Attributes:
        tree: its tree, as in the root or as `Layout.inspect` returned it.
        state: the state of the layout; may be hostile.
    """

    tree: TreeMetadata
    state: JSON


class ChainedArrays(NamedTuple):
    """The arrays of a checkpoint, computed from what the checkpoints of its chain store.

    Attributes:
        tree: the tree of the checkpoint.
        stored: for each link of the chain, the tree of the arrays in its objects. `Layout.index` gets this tree. It may
            have arrays of encoded bytes, such as uint8, in place of those of the checkpoint.
        arrays: by leaf number in `tree`, how to compute each array that is not an alias. A
            `ckptcore.derivations.Stored` refers to a tree of `stored` by number; the number after the last link is that
            of the base.
    """

    tree: TreeMetadata
    stored: Sequence[TreeMetadata]
    arrays: Mapping[int, DerivedArray]


class ChunkIndex(Protocol):
    """Locates the chunks of the arrays of a checkpoint. Thread-safe.

    The core reads arrays through an index: it requests the chunks of a box, locates the chunks whose positions are not
    exact, and reads their bytes. A leaf is the number of an array in the tree, never of an alias. An index may be built
    from hostile metadata.

    The defaults suit layouts with raw chunks at exact positions.
    """

    @abstractmethod
    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """Return the chunks that contain elements of a box. Reads nothing. The result is equal on every process.

        Chunks do not overlap. Processes divide reads by the positions of chunks. An inexact position may cause larger
        reads, but no wrong elements.

        Raises:
            CorruptCheckpointError: the array is not stored completely.
            UnsupportedLeafError: the array is stored in a way that cannot be read.
        """

    @property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """Stored shape and dtype by leaf, for arrays whose records state another shape or dtype. Chunks use them.

        The bytes are the same. The stored shape may have one additional axis, for the bytes of an element.
        """
        return {}

    @abstractmethod
    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        """Return the byte ranges (object, start, stop) of an array, as far as the metadata states them.

        Error messages use the ranges to name arrays, and loads use them to limit the memory that they allocate.
        Elements outside of plain ranges are left out.
        """

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """Return the objects in which a damaged byte of an array may go undetected, because they have no checksum.

        Called for checkpoints of other software, after the whole array was read. Compares the checksums of the format
        that the read did not compare. By default return all objects of `extents`.

        Raises:
            CorruptCheckpointError: a checksum differs.
        """
        return frozenset([key for key, _, _ in self.extents(leaf)])

    def check(self, leaves: Collection[int]) -> None:
        """Refuse arrays that their chunks do not cover exactly. Called before memory is allocated; reads nothing.

        The check must not take longer than reading the state, because a hostile state of a few bytes may describe an
        array of any shape.

        Raises:
            CorruptCheckpointError, UnsupportedLeafError: see `boxes`; for the first such array.
        """
        return

    def chunk_rows(self, leaf: int) -> int | None:
        """Return the extent of a chunk along the first axis, for arrays in a regular grid; else None.

        Verification reads arrays in bands whose bounds are multiples of this extent, so that no chunk is read twice.
        """
        return None

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkLocations:
        """Find the bytes of chunks of one array. May read indexes, tree nodes, or headers.

        Called for chunks without `Chunk.is_exact`, on the process that reads their bytes.

        Raises:
            CorruptCheckpointError: a chunk without a fill value is missing, or metadata is damaged.
        """
        return ChunkLocations([chunk.key for chunk in chunks], [chunk.offset for chunk in chunks])

    def decode(self, chunk: Chunk, data: bytes) -> Pending[HostArray]:
        """Decode the bytes of an encoded chunk to the elements of its box. The box may reach beyond the array.

        Raises:
            CorruptCheckpointError: also from `Pending.result`.
        """
        name = type(self).__name__
        raise PluginError(f"{name} locates encoded chunks and does not implement decode()")


@runtime_checkable
class NativeReader(Protocol):
    """A chunk index that reads some arrays itself, with the I/O library of its format."""

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """Return True if this index reads an array from a store natively."""

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``items[i]``; yields `i` once it is complete and verified.

        Buffers are C-contiguous and writable, of the box's shape and the stored dtype. Boxes are not empty.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
        """


class LayoutCapabilities(NamedTuple):
    """The features of saves that a layout supports with its options.

    Attributes:
        any_replica_writes: True if the processes that hold the same box may each write a part of it. The parts end at
            the cuts of the array's record. If False, replica 0 writes the whole box: formats that store an array as a
            whole need this.
        sessions: True if several saves can fill one checkpoint, one after another. See `Layout.renumbered`.
        differences: the base from which it writes differences, see `Layout.base`; None if it stores all elements. Only
            a plain save and a copy of one tree store differences, next to the base. Others refuse the layout before
            they write: updates, saves of several objects or of a host, and saves into another directory.
    """

    any_replica_writes: bool = False
    sessions: bool = False
    differences: BaseReference | None = None


class Layout(Protocol):
    """Stores the arrays of a tree in objects. Knows no framework; keeps no state between calls; thread-safe.

    A layout inherits from this class, which has defaults for all optional methods. A layout and its options can be
    pickled, because the workers of a single controller write with it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the layout in the hook `ckpt_layouts`; may be a class attribute."""

    @property
    def capabilities(self) -> LayoutCapabilities:
        """The features of saves that the layout supports; may be a class attribute."""
        return LayoutCapabilities()

    # --- write

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse a tree that cannot be stored, before anything is written. By default accept every tree.

        Args:
            tree: the tree to save.
            size: the number of processes in the job, including the workers of a single controller.

        Raises:
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError
        """
        return

    def names_in_keys(self, plan: WritePlan) -> Collection[str]:
        """Return the keys, or the directories of keys, that contain names of arrays; none by default.

        A save is refused before it writes if its file system cannot distinguish two of them.
        """
        return ()

    @abstractmethod
    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the boxes of this process, without waiting for others. The result becomes `Receipt.state`."""

    @abstractmethod
    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Write objects that describe the objects of all processes, such as an index for other software.

        Called on the leader after all processes have written. The root stores the result, and `index` receives it.
        """

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the files that foreign readers need besides the arrays. By default none.

        Called on the leader, after `finish` and right before the commit: once for a checkpoint that is one tree, and
        once for a composite, with a store at its directory. The layout may not replace an object, or write into the
        directory of a checkpointable. Names that begin with ``checkpoint.`` are reserved for the core.
        """
        return

    # --- names of their own
    #
    # A save with overwrite="keep-other-files" moves its objects into the directory of the checkpoint that it replaces.
    # Therefore its objects need names that the old checkpoint does not use. One object with a fixed name refers to
    # them; it is replaced after the root.

    def with_own_names(self, tag: str) -> Layout | None:
        """Return a copy of this layout that adds ``.`` and `tag` to names; None, the default, if names are fixed.

        `finish` writes only the object `index_name` under a fixed name. The name of any other object is its usual name
        with ``.`` and the tag inserted.

        Args:
            tag: letters and digits that no other save uses.
        """
        return None

    @property
    def index_name(self) -> str | None:
        """The key of the object by which other software finds objects with names of their own; None for fixed names."""
        return None

    # --- read

    @abstractmethod
    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of the chunks of a checkpoint. Reads nothing; everything in `state` may be hostile.

        The core keeps the index while the checkpoint is open.

        Args:
            tree: the saved tree.
            state: the JSON that `finish` or `inspect` returned.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Find a checkpoint of this layout that other software wrote; None, the default, if there is none.

        Args:
            store: the store to search; everything in it may be hostile.
            entry: the file that the user named as the location, or None for a directory.

        Raises:
            CompositeCheckpointError: it contains several checkpointables, and a plain load in the other software
                returns none of them.
            CorruptCheckpointError: it cannot be read.
        """
        return None

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Find a checkpoint of several checkpointables that other software wrote; None, the default, if there is none.

        Also None for a checkpoint of one tree; but if the other software gives this tree a name, the tree may be
        returned as the only member. If `inspect` also finds a tree in the store, a load uses the members only if it
        requests them by name.

        Args:
            store: the store to search; everything in it may be hostile, and it may be empty.

        Raises:
            UncommittedCheckpointError: the save that wrote it did not complete.
            CorruptCheckpointError: it cannot be read.
        """
        return None

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files in the directory of a checkpoint of this layout that belong to the checkpoint.

        Called only for a checkpoint that other software wrote, before a save replaces it. Other files, such as a
        configuration or a tokenizer, belong to the user and stop the save. By default all files belong to the
        checkpoint.

        Args:
            keys: the keys of all files.
            members: the names of the checkpointables that `inspect_composite` finds.
        """
        return keys

    # --- a base: for layouts that store differences from another checkpoint

    def base(self, tree: TreeMetadata, state: JSON) -> BaseReference | None:
        """Return the checkpoint that is needed to compute arrays of a checkpoint; None, the default, if there is none.

        The root lists the base, so that it is not deleted. Bases can have bases. Together they are a *chain*, which the
        core follows to a checkpoint without a base.

        Args:
            tree: the tree of the checkpoint.
            state: the result of `finish` or `inspect`; may be hostile.

        Raises:
            CorruptCheckpointError: the state is damaged.
        """
        return None

    def derive(self, links: Sequence[ChainLink], base: TreeMetadata) -> ChainedArrays:
        """Return how to compute the arrays of a checkpoint that has a base. Reads nothing. Required with `base`.

        Args:
            links: the checkpoint, its base, the base of that, and so on, as far as they have a base. All have this
                layout.
            base: the tree of the last base, which has any layout and no base of its own.

        Raises:
            CorruptCheckpointError: a link does not fit its base. The caller adds the location.
        """
        raise PluginError(f"the layout {self.name} states a base and does not implement derive()")

    # --- arrays in pieces

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]] | None:
        """Return the leaves in each object, without aliases, in the order in which `write` takes them.

        None, the default, if `write` takes whole arrays only. Otherwise a plan may have several items of one array, so
        that the array need not be in memory as a whole. Each item has one box, whose elements are contiguous in C
        order and follow the elements of the item before. The written bytes do not depend on the division of arrays.

        The result must depend on the tree alone, so that processes agree without communication. One process writes an
        object; different processes may write different objects. The leader writes an object without arrays.
        """
        return None

    # --- sessions: needed if `capabilities.sessions`
    #
    # In a session the plan has ``session``, a tree with only the leaves of the session, and a rank that no other
    # process of any session has. Names of objects may depend on that rank, on the session, and on names of arrays. A
    # session writes nothing that describes the whole checkpoint. `finish` receives the whole tree with its values, and
    # the receipts of the processes of all sessions, by rank; ranks may be missing.

    @property
    def session_options(self) -> str:
        """The options that all sessions must share, as readable text; empty by default."""
        return ""

    def names_written(self, tree: TreeMetadata) -> Mapping[int, str]:
        """Return, by leaf, the names of arrays that a session writes into objects or their keys; none by default.

        An array must have the same name in the tree of its session and in the whole tree. Names that only `finish`
        writes are left out.

        Raises:
            NameCollisionError
        """
        return {}

    def renumbered(self, state: JSON, leaves: Sequence[int]) -> JSON:
        """Return the state of a receipt with other numbers of leaves. Required if `capabilities.sessions`.

        Args:
            state: the result of `write` in a session; it comes from a storage and may be hostile.
            leaves: for each leaf number of the session's tree, the number of the leaf in the whole tree. For a tied
                array, the leaf under which it is stored.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the state is invalid.
        """
        raise PluginError(f"the layout {self.name} has the capability 'sessions' and does not implement renumbered()")


LayoutFactory: TypeAlias = Callable[[], Layout]
"""Returns a layout with its default options."""
