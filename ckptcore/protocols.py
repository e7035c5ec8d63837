"""The protocols: what a leaf handler, container, checkpointable, layout, storage and coordinator is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import Pending, ReadPlan, Receipt, Segment, TileRead, WritePlan
from ckptcore.model.tree import JSON, Key, NodeKind

__all__ = [
    "IF_ABSENT",
    "AtomicDirectories",
    "Buffer",
    "CheckpointableHandler",
    "ContainerHandler",
    "Coordinator",
    "Flattened",
    "HostMemory",
    "IfAbsent",
    "IfTag",
    "Inspection",
    "Layout",
    "LayoutFactory",
    "LazyCheckpointableHandler",
    "LeafHandler",
    "ObjectWriter",
    "OpensObjects",
    "Priority",
    "PutCondition",
    "RangeReader",
    "ReadStore",
    "Snapshot",
    "StorageAddress",
    "StorageBackend",
    "StorageOpener",
    "StorageOptions",
    "WriteStore",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A `memoryview` is one-dimensional with format ``B``."""


class Priority:
    """What a handler says of how sure it is of a type; the highest wins and a tie is an error naming both plugins."""

    FALLBACK: Final = 0  #: any type of a broad sort: a dataclass
    PROTOCOL: Final = 25  #: types that have certain methods
    REGISTERED: Final = 50  #: types that were registered with a framework
    FRAMEWORK: Final = 75  #: a framework's own types
    EXACT: Final = 100  #: exactly this type


# --- values: containers, checkpointables and leaves -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flattened:
    """A container taken apart by one level.

    Attributes:
        kind: how it comes back where no abstract tree is given.
        keys: the key of each child; unique.
        children: the children, in the order of the keys.
        type: the qualified name of its type where `kind` does not tell, else None.
    """

    kind: NodeKind
    keys: Sequence[Key]
    children: Sequence[object]
    type: str | None = None


class ContainerHandler(Protocol):
    """Takes containers of some types apart by one level and puts them together. Stateless, thread-safe, no I/O.

    Attributes:
        priority: see `Priority`.
    """

    @property
    def priority(self) -> int: ...

    def flatten(self, value: Any) -> Flattened:
        """Take `value` apart by one level."""
        ...

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """A container of exactly the type and the static content of `like`, with other children.

        `children` are in the order in which `flatten(like)` gives them.
        """
        ...


class CheckpointableHandler(Protocol):
    """Takes objects apart that are more than a container: a module, an optimizer. Stateless, thread-safe, no I/O.

    Attributes:
        priority: see `Priority`.
    """

    @property
    def priority(self) -> int: ...

    def flatten(self, value: Any) -> object:
        """The state of `value`: a tree of containers and leaves. Arrays in it may be those of the object itself."""
        ...

    def unflatten(self, like: Any, state: object) -> object:
        """What a load with the abstract object `like` returns; `state` is a loaded tree like ``flatten(like)``."""
        ...

    def restore(self, target: Any, state: object) -> None:
        """Make `target` have this state, in place. Arrays that could be filled in place already were."""
        ...


@runtime_checkable
class LazyCheckpointableHandler(CheckpointableHandler, Protocol):
    """A `CheckpointableHandler` of objects that have part of their state only once they were used: an optimizer."""

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """As `flatten`, where a state is about to be loaded: also with abstract leaves for what `value` lacks so far.

        Args:
            value: what is loaded into, or like.
            stored: the state that is stored for it, in Python's own containers: `AbstractArray` for arrays, and values.
        """
        ...


class HostMemory(Protocol):
    """Host memory that belongs to one save, reused by the next. Any thread."""

    def empty(self, spec: ArraySpec) -> HostArray:
        """A C-contiguous array to fill; not initialised."""
        ...

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Copy `source` into memory of the save, on the core's threads; `source` must stay as it is until then."""
        ...


class LeafHandler(Protocol):
    """Describes, copies and builds leaves of some types. Stateless, thread-safe, no I/O.

    Arrays come and go as (`Box`, NumPy array with dtypes of NumPy or ml_dtypes, native byte order).

    Attributes:
        priority: see `Priority`.
    """

    @property
    def priority(self) -> int: ...

    def describe(self, leaf: Any) -> LeafRecord:
        """What the leaf is: shape, dtype, kind. Also of an abstract leaf. Never waits for a device.

        Raises:
            UnsupportedLeafError: if a leaf like this cannot be stored; says why and what to do.
        """
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """Equal for two leaves exactly if they are the same elements in memory (tied); None if not known."""
        ...

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """The boxes of the array that this process holds, of `size` processes."""
        ...

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """For asynchronous saves: the elements of each box, in memory that nobody can change or free.

        An array that is immutable needs no copy. Starts the copies and does not wait for them.
        """
        ...

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """For blocking saves: the elements of each box; may alias the leaf and have any strides."""
        ...

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes of the stored array that this process needs to build `abstract`; without duplicates."""
        ...

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Memory of `abstract` itself that holds `box`, to be read into: of the stored dtype, C-contiguous, writable.

        Only asked by ``load_into``. None where there is none: then `build` gets the elements.
        """
        ...

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """The leaf that `abstract` asks for. May keep and alias the arrays: they are nobody else's.

        Of a `ValueRecord`, `boxes` is empty.
        """
        ...

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Make `target` itself hold the elements, in place; False where it cannot be changed.

        Only asked by ``load_into``. A box that `destination` gave memory for comes with that memory, filled.
        """
        ...


# --- layouts ----------------------------------------------------------------------------------------------------------


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
        """Say that the arrays of an item are written and their memory can be given back."""
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

        Segments are opened one after the other as writing proceeds, and closed as their bytes are written.
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

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError
        """
        ...

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        ...

    def read_tiles(self, reads: Sequence[TileRead]) -> Iterator[int]:
        """Fill targets over the core's I/O threads; yields the number of a target once all its tiles here are read.

        Raises:
            ObjectNotFoundError, ChecksumError, CorruptCheckpointError: where an object ends too early
        """
        ...


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that other software wrote.

    Attributes:
        tree: what is in it.
        state: JSON for `Layout.read`: where things are.
        writer: who wrote it, as far as can be told.
        custom: metadata of the user's that it carries.
    """

    tree: TreeMetadata
    state: JSON
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)


class Layout(Protocol):
    """How the arrays of a tree lie in objects. Knows no framework; keeps no state between calls; thread-safe."""

    @property
    def name(self) -> str:
        """The name under which the hook offers it."""
        ...

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse what cannot be written, before anything is.

        Raises:
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError
        """
        ...

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write this process's boxes; waits for no other process. The result becomes `Receipt.state`."""
        ...

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """On the leader: make the parts one whole, also for foreign readers. The result is kept in the root."""
        ...

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``plan.items[i]``; yields `i` once it is there and verified.

        Buffers are C-contiguous and writable, of the box's shape and the stored dtype. Everything in ``plan.state``
        may be hostile.

        Raises:
            CorruptCheckpointError: where bytes are missing or wrong.
        """
        ...

    def extents(self, tree: TreeMetadata, state: JSON) -> Iterator[tuple[int, str, int, int]]:
        """Where leaves lie, so that an error can name the array: (leaf, key, start, stop), in bytes.

        Nothing where elements lie in no plain range of bytes; `state` may be hostile.
        """
        ...

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Look whether other software wrote a checkpoint of this layout here; None if not.

        Args:
            store: where to look; everything in it may be hostile.
            entry: the one file that the user named as the location, or None for a directory.
        """
        ...


LayoutFactory: TypeAlias = Callable[[], Layout]
"""Makes a layout with its default options."""


# --- storage ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Where native I/O finds the same objects.

    Attributes:
        url: the directory, ending in ``/``.
        options: neutral options: endpoint, region, ...
    """

    url: str
    options: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How a storage is opened.

    Attributes:
        durable: whether what `finish`, `put` and `sync` return from survives a loss of power.
        config: options of this storage by name, from the Context.
    """

    durable: bool = True
    config: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Put only where there is no such object."""


@dataclass(frozen=True, slots=True)
class IfTag:
    """Put only where the object still has this tag."""

    tag: str


IF_ABSENT: Final = IfAbsent()
"""Put only where there is no such object."""

PutCondition: TypeAlias = IfAbsent | IfTag
"""What must be true of an object for a put to replace it."""


class ObjectWriter(Protocol):
    """An object that is being written in pieces; it is not there before `finish`, or is not relied on before."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset, in any order and from any thread; every byte is written once.

        The memory can be reused when this returns.
        """
        ...

    def finish(self) -> None:
        """Complete the object; durable where the storage was opened so."""
        ...

    def abort(self) -> None:
        """Give up and remove what was written. Never raises; may follow a failed `finish`."""
        ...


class StorageBackend(Protocol):
    """Objects by key. No arrays, no retries of the caller's, no state that matters. Any thread.

    A key is relative, with ``/`` between directories; it has no empty, ``.`` or ``..`` part.
    """

    @property
    def request_bytes(self) -> int:
        """Bytes that one read should ask for to be efficient; a class attribute will do."""
        ...

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before.

        Raises:
            ObjectNotFoundError
        """
        ...

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """A small object whole, and the tag that a conditional put can name.

        Raises:
            ObjectNotFoundError
        """
        ...

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: where the object ends before a buffer is full.
        """
        ...

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError: also where the key is that of a directory.
        """
        ...

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object whole or not at all, replacing what is there; returns its new tag.

        Raises:
            ConditionFailedError: nothing was changed.
            StorageFullError
        """
        ...

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object that is written in pieces; `size` in bytes where it is known."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys of all objects below a directory, sorted; nothing where there is none."""
        ...

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``. Empty where there is none."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error. Directories that become empty vanish."""
        ...

    def sync(self, keys: Sequence[str]) -> None:
        """Make objects durable that something else wrote (native I/O), and the directories they are in."""
        ...


class RangeReader(Protocol):
    """An object that is open for reading. Any thread."""

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread; raises what `StorageBackend.get_into` does."""
        ...


@runtime_checkable
class OpensObjects(Protocol):
    """What a storage can do on top for which finding an object costs something: find it once for many reads."""

    def open_reader(self, key: str) -> RangeReader:
        """Open an object; what is read is of the object that was there then, or fails.

        Raises:
            ObjectNotFoundError
        """
        ...


@runtime_checkable
class AtomicDirectories(Protocol):
    """What a storage with real directories can do on top: the commit by rename. Keys as in `StorageBackend`."""

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        """Create a directory where there is none and hold it until closed or this process dies; None: another has it."""
        ...

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory; atomic, and durable where the storage was opened so.

        Raises:
            ConditionFailedError: something stands at the destination (an empty directory is replaced).
        """
        ...

    def exchange(self, first: str, second: str) -> None:
        """Let two directories change places; atomic, and durable where the storage was opened so.

        Raises:
            AtomicityError: this file system cannot; nothing was changed.
        """
        ...

    def sync_directory(self, key: str) -> None:
        """Make everything in a directory durable: the names of the objects, and of directories below it."""
        ...

    def delete_directory(self, key: str) -> None:
        """Delete a directory with all it holds; one that is not there is no error."""
        ...


class StorageOpener(Protocol):
    """Opens a directory of a storage; creates nothing."""

    def __call__(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open the directory that `url` names (with its scheme; a local one may be a plain path)."""
        ...


# --- several processes ------------------------------------------------------------------------------------------------


class Coordinator(Protocol):
    """The processes of a job agreeing. Safe off the main thread; keys are unique per exchange.

    Every wait has a deadline; past it `CoordinationTimeoutError` names the ranks that did not come.
    """

    @property
    def rank(self) -> int:
        """Which process this is; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Give a payload to the leader: there all of them in order of rank, elsewhere None."""
        ...

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Get the leader's payload; the others pass None."""
        ...
