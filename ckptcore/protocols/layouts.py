"""Layouts: how the arrays of a tree are stored in objects, and the stores that layouts write and read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import PluginError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import Chunk, ChunkPlaces, ChunkRead, Pending, ReadItem, Receipt, Segment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols.storage import StorageAddress

__all__ = [
    "CheckpointInfo",
    "ChunkIndex",
    "InspectedComposite",
    "Inspection",
    "Layout",
    "LayoutCapabilities",
    "LayoutFactory",
    "MemberKind",
    "NativeReader",
    "ReadStore",
    "Snapshot",
    "WriteForecast",
    "WriteStore",
]


class Snapshot(Protocol):
    """The arrays of one save, in host memory or on their way there. Any thread."""

    @property
    def plan(self) -> WritePlan:
        """What this process writes."""
        ...

    def take(self, item: int) -> Sequence[HostArray]:
        """The elements of each box of ``plan.items[item]``; waits until they are there. Any strides and byte order."""
        ...

    def release(self, item: int) -> None:
        """Say that the arrays of an item are written and their memory can be given back; it is not taken again."""
        ...


class WriteStore(Protocol):
    """The objects of a checkpoint while it is written: a storage that counts and checksums what goes in. Any thread."""

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write a small object whole."""
        ...

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object made of these segments, in this order, over the core's I/O threads.

        Segments are opened one after the other as writing proceeds, and closed as their bytes are written. Checksums
        inside the object are computed by the threads that write the bytes they cover.

        Raises:
            PluginError: the arrays of a segment do not make up its box, or a checksum is of another one.
        """
        ...

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """Write objects as `write` does, several at once if that suits the storage. Returns when all are complete.

        They are asked for one by one, by one thread at a time, which need not be this one, and begun in that order;
        which is complete first is not told. After the first error no other is asked for.
        """
        ...


class ReadStore(Protocol):
    """The objects of a checkpoint while it is read: a storage that verifies checksums. Any thread."""

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before.

        Raises:
            ObjectNotFoundError, ChecksumError
        """
        ...

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """What `get` gives of each (key, start, stop), in order; None where there is no such object.

        Ranges that are near each other are asked for together, and many at once where the storage gains by it: the way
        to read what is small and in many places. All of it is in memory at once.

        Raises:
            ChecksumError
        """
        ...

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError
        """
        ...

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        ...

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        """Fill targets over the core's I/O threads; yields the number of a target once all its chunks here are read.

        A store that verifies has compared a chunk by then: with the checksums recorded for its object, or with the
        checksum behind the chunk. It may read all of a chunk for this if only a part is requested.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: an object ends too early, or chunks that have checksums overlap without being equal.
        """
        ...

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``items[i]``; yields `i` once it is complete and verified.

        Args:
            index: where the arrays are.
            items: boxes to read.
            buffers: C-contiguous and writable, of the box's shape and the stored dtype.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
            UnsupportedLeafError: an array is stored in a way that cannot be read.
        """
        ...


MemberKind: TypeAlias = Literal["tree", "files"]
"""What one of several checkpointables is: a tree of arrays and values, or files that its object wrote itself."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that other software wrote.

    Attributes:
        tree: what is in it.
        state: JSON for `Layout.index`: where arrays are.
        writer: who wrote it, as far as can be told.
        custom: metadata of the user's that it carries.
        metrics: measurements that it carries.
        created: when it was written, ISO 8601 in UTC; None where it does not say.
    """

    tree: TreeMetadata
    state: JSON
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None


@dataclass(frozen=True, slots=True)
class InspectedComposite:
    """A checkpoint of several checkpointables that other software wrote.

    Attributes:
        members: what each is, by name, in order. Each is a directory of that name, or a file of it that holds a tree. A
            tree may be of any layout that is installed.
            What is no checkpointable (a directory of metadata) is left out; what was saved and is not there may be
            listed.
        writer, custom, metrics, created: as of an `Inspection`, of the checkpoint as a whole.
    """

    members: Mapping[str, MemberKind]
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a save says about a checkpoint as a whole.

    Attributes:
        created: when the save began, ISO 8601 in UTC.
        custom: metadata of the user.
        metrics: measurements of the user; may be non-finite numbers.
        members: the kind of each checkpointable, by its directory. A checkpointable that every process saved for itself
            has several (``data.rank_0``). Empty if the checkpoint is one tree.
    """

    created: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    members: Mapping[str, MemberKind] = field(default_factory=dict)


class ChunkIndex(Protocol):
    """Where the chunks of the arrays of a checkpoint are. Any thread.

    The core reads arrays with it: it asks for the chunks of a box, locates those whose place is not exact, and moves
    their bytes. Leaves are numbers of arrays in the tree, never of aliases. What an index was made of may be hostile.

    Subclasses inherit the answers of a layout whose chunks are raw and at exact places.
    """

    @abstractmethod
    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """Return the chunks that hold elements of a box of an array. Reads nothing; equal on every process.

        Chunks do not overlap. Processes divide reads by these places. If a place is inexact, more bytes are read, but
        elements are right.

        Raises:
            CorruptCheckpointError: the array is not stored whole.
            UnsupportedLeafError: the array is stored in a way that cannot be read.
        """
        ...

    @property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """By leaf, the stored shape and dtype of an array, if they differ from its own; chunks are boxes of these.

        Bytes are the same. The shape may have one more axis, of the bytes of an element.
        """
        return {}

    @abstractmethod
    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        """Return the ranges of bytes (object, start, stop) that hold an array, as far as the metadata describes them.

        Errors name arrays by it, and memory is bounded by it. Nothing for elements that are in no plain range.
        """
        ...

    def check(self, leaves: Collection[int]) -> None:
        """Refuse arrays whose chunks do not cover them exactly. Called before memory is allocated; reads nothing.

        A hostile state of a few bytes may describe an array of any shape: the check must take no longer than reading
        the state.

        Raises:
            CorruptCheckpointError, UnsupportedLeafError: as `boxes`, for the first such array.
        """
        return

    def chunk_rows(self, leaf: int) -> int | None:
        """Return the extent of a chunk along the first axis, for arrays in a regular grid; else None.

        Conversions cut arrays between chunks that are read whole.
        """
        return None

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkPlaces:
        """Find the bytes of chunks of one array. May read indexes, nodes of a tree, or headers.

        Called for chunks that are not `Chunk.is_exact`, where their bytes are read.

        Raises:
            CorruptCheckpointError: a chunk is missing that has no fill value, or metadata is damaged.
        """
        return ChunkPlaces([chunk.key for chunk in chunks], [chunk.offset for chunk in chunks])

    def decode(self, chunk: Chunk, data: bytes) -> Pending[HostArray]:
        """Decode the bytes of an encoded chunk to the elements of its box, which may end with the array.

        Raises:
            CorruptCheckpointError: also from `Pending.result`.
        """
        name = type(self).__name__
        raise PluginError(f"{name} locates encoded chunks and does not implement decode()")


@runtime_checkable
class NativeReader(Protocol):
    """A chunk index that reads some arrays by itself, with the I/O library of its format."""

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """Return whether this reads an array natively from a store."""
        ...

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``items[i]``; yields `i` once it is complete and verified.

        Buffers are C-contiguous and writable, of the box's shape and the stored dtype. Boxes have elements.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
        """
        ...


class LayoutCapabilities(NamedTuple):
    """What saves a layout supports, with the options that it has.

    Attributes:
        any_replica_writes: True if any of the processes that hold the same elements may write them, each a part. Boxes
            of one array then come from several processes, between the cuts of its record. If False, replica 0 writes
            all of them, as needed by software that reads whole arrays.
        sessions: True if several saves can fill one checkpoint, one after the other. See `Layout.renumbered`.
    """

    any_replica_writes: bool = False
    sessions: bool = False


class WriteForecast(NamedTuple):
    """What a layout would write.

    Attributes:
        state: as `Layout.write` returns it, as large as it can become.
        at_most: keys of the objects that may be smaller than forecast, or are perhaps not written.
        buffer_bytes: the most host memory that the write takes besides the arrays of its snapshot, in bytes.
    """

    state: JSON
    at_most: frozenset[str] = frozenset()
    buffer_bytes: int = 0


class Layout(Protocol):
    """How the arrays of a tree are stored in objects. Knows no framework; keeps no state between calls; thread-safe.

    A layout inherits from this class, which has defaults for all that is optional. It can be pickled, with its options,
    because the workers of a single controller write with it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the hook offers it; a class attribute will do."""
        ...

    @property
    def capabilities(self) -> LayoutCapabilities:
        """What saves it supports; a class attribute will do."""
        return LayoutCapabilities()

    # --- write

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse a tree that cannot be stored, before anything is written. By default every tree can be.

        Raises:
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError
        """
        return

    @abstractmethod
    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write this process's boxes; waits for no other process. The result becomes `Receipt.state`."""
        ...

    @abstractmethod
    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """On the leader: complete what all processes wrote, also for foreign readers. The root keeps the result."""
        ...

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the files that foreign readers need besides the arrays. By default none.

        Called on the leader, after `finish` and right before the commit: once for a checkpoint that is one tree, and
        once for one of several checkpointables, with a store at the directory that contains them. It may not write an
        object again, nor into the directory of a checkpointable, and no name may begin with ``checkpoint.``, which is
        reserved for the core.
        """
        return

    # --- read

    @abstractmethod
    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return where the chunks of a checkpoint are. Reads nothing; everything in `state` may be hostile.

        The core keeps the index for as long as the checkpoint is open.

        Args:
            tree: the tree that was saved.
            state: the JSON that `finish` or `inspect` returned.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        ...

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Find a checkpoint of this layout that other software wrote; None, the default, if there is none.

        Args:
            store: where to look; everything in it may be hostile.
            entry: the one file that the user named as the location, or None for a directory.

        Raises:
            CompositeCheckpointError: if it holds several checkpointables, and its software's plain load returns none of
                them.
            CorruptCheckpointError: if it cannot be read.
        """
        return None

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Find a checkpoint of several checkpointables that other software wrote; None, the default, if there is none.

        Also None if it is one tree. One tree that its software also knows by a name may be returned as the only member.
        If `inspect` finds a tree there too, the members are for loads by name only.

        Args:
            store: where to look; everything in it may be hostile, and it may be empty.

        Raises:
            UncommittedCheckpointError: if its writer never finished it.
            CorruptCheckpointError: if it cannot be read.
        """
        return None

    # --- arrays in pieces

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]] | None:
        """Return the leaves in each object, without aliases, in the order in which `write` takes them.

        None, the default, if `write` takes whole arrays only. Otherwise several items of a plan may be of one array, so
        that it need not be in memory whole: each is one box, whose elements are one run in C order, and the runs
        follow each other without gaps. What is written does not depend on how arrays were cut.

        Depends on the tree alone, so that processes agree without communication. One process writes all of an object,
        and different ones different objects. The leader writes an object without arrays.
        """
        return None

    # --- sessions: needed if `capabilities.sessions`
    #
    # In a session the plan has ``session``, a tree with the leaves of the session only, and a rank that no other
    # process of any session has: names of objects may depend on that rank, on the session, and on names of arrays. A
    # session writes nothing that describes the whole checkpoint. `finish` receives the tree with its values, and the
    # receipts of the processes of all sessions, by rank; ranks may be missing.

    @property
    def session_options(self) -> str:
        """The options that all sessions must have in common, in words, for a person to compare; by default none."""
        return ""

    def names_written(self, tree: TreeMetadata) -> Mapping[int, str]:
        """Return, by leaf, the names of arrays that a session stores in objects or keys; none by default.

        An array must have the same name in the tree of its session and in the whole tree. Names that only `finish`
        writes are left out.

        Raises:
            NameCollisionError
        """
        return {}

    def renumbered(self, state: JSON, leaves: Sequence[int]) -> JSON:
        """Return the state of a receipt with other numbers of leaves. Required if `capabilities.sessions`.

        Args:
            state: what `write` returned in a session; it comes from a storage and may be hostile.
            leaves: by number in the tree of the session, the number in the whole tree. Of a tied array, the leaf under
                which it is stored.

        Raises:
            KeyError, IndexError, TypeError, ValueError: if it is no such state.
        """
        raise PluginError(f"the layout {self.name} has the capability 'sessions' and does not implement renumbered()")

    # --- plans

    def forecast(self, snapshot: Snapshot, store: WriteStore) -> WriteForecast | None:
        """Write what `write` would to a store that only counts, with the largest sizes, without asking for elements.

        None, the default, if `write` itself can be called for that: segments have a length before they are opened. A
        layout that encodes elements before it passes objects to the store implements it.

        Args:
            snapshot: has a plan. Taking elements from it fails.
            store: takes lengths. It opens segments, which fail because there are no elements, and closes them.
        """
        return None


LayoutFactory: TypeAlias = Callable[[], Layout]
"""Makes a layout with its default options."""
