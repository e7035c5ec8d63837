"""Protocols of handlers, which take containers, checkpointables and leaves apart, copy them and rebuild them.

Also transforms, which change stored trees.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model.arrays import (
    WHOLE_SAMPLE_BYTES,
    ArraySpec,
    Box,
    HostArray,
    Shard,
    StridedMemory,
    sampled,
)
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import Pending, Ready
from ckptcore.model.tree import JSON, Key, NodeKind
from ckptcore.protocols.derived import DerivedArray

if TYPE_CHECKING:
    from pathlib import Path


class Priority:
    """The priority of a handler for a type. The highest priority wins. A tie is an error that names both plugins."""

    FALLBACK: Final = 0  #: types of a broad kind: dataclasses
    PROTOCOL: Final = 25  #: types with certain methods
    REGISTERED: Final = 50  #: types that are registered with a framework
    FRAMEWORK: Final = 75  #: types of a framework
    EXACT: Final = 100  #: exactly this type


class Flattened(NamedTuple):
    """A container taken apart by one level.

    Attributes:
        kind: the kind of container that a load without an abstract tree builds.
        keys: the key of each child; unique.
        children: the children, in the order of the keys.
        type: the qualified name of its type if `kind` does not determine it, else None.
        attributes: the attributes of an OrderedDict instance, as JSON. A load without an abstract tree restores them.
    """

    kind: NodeKind
    keys: Sequence[Key]
    children: Sequence[object]
    type: str | None = None
    attributes: Mapping[str, JSON] | None = None


class ContainerHandler(Protocol):
    """Takes containers of some types apart by one level and rebuilds them. Stateless, thread-safe, no I/O.

    A handler inherits from this class, which has defaults for all optional methods.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; may be a class attribute."""

    @abstractmethod
    def flatten(self, value: Any) -> Flattened:
        """Take `value` apart by one level."""

    @abstractmethod
    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Return a container with the exact type and the static content of `like`, and with the given children.

        `children` have the order of ``flatten(like)``.
        """

    @property
    def remedy(self) -> str:
        """Advice for errors about content that no plugin handles, as a clause; empty by default."""
        return ""

    def is_object(self, value: Any) -> bool:
        """Return True if programs refer to `value` as an object with an identity, like a module; by default False.

        ``load_checkpointables`` restores a tree in place if the tree is or contains such a container, or an object that
        a `CheckpointableHandler` handles. For any other tree, such as a dict of arrays, it builds a new value.
        """
        return False

    def keeps_identity(self, value: Any) -> bool:
        """Return True if a container that a tree has at several places must be one container in a loaded tree too.

        Used for variables that several modules share. By default False: each place gets a separate container.
        """
        return False

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the positions in `flatten` of the children that `replace` can replace; none by default.

        ``load_into`` uses it for children that cannot be filled in place. A container whose children cannot be replaced
        is replaced in its parent.
        """
        return ()

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Replace children in `target` itself, by position. Required if `replaceable` returns any."""
        raise PluginError(f"{type(self).__name__} has replaceable children and does not implement replace()")


class CheckpointableHandler(Protocol):
    """Takes apart stateful objects, such as modules and optimizers. Stateless itself, thread-safe, no I/O.

    A handler inherits from this class, which has defaults for all optional methods.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; may be a class attribute."""

    @property
    def is_object(self) -> bool:
        """True, the default, if programs refer to the values as objects with an identity, like modules.

        False for values that have a state only because the state determines their form, such as sparse tensors and
        sets. For them, ``load`` builds a new value and ``abstract`` returns an abstract value.
        """
        return True

    @property
    def per_process(self) -> bool:
        """True if every process has its own state, as for iterators and random generators; by default False.

        If such an object has a separate name in ``save_checkpointables``, every process saves it.
        """
        return False

    @abstractmethod
    def flatten(self, value: Any) -> object:
        """Return the state of `value`: a tree of containers and leaves. Its arrays may be the object's own."""

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the state to request from a load, with abstract leaves for missing state; by default call `flatten`.

        Implement it for objects that create part of their state when they are used, such as optimizers.

        Args:
            value: the object to load into, or an object like it.
            stored: its stored state, in Python's containers, with `AbstractArray` for arrays.
        """
        return self.flatten(value)

    @abstractmethod
    def unflatten(self, like: Any, state: object) -> object:
        """Return the result of a load with the abstract object `like`; `state` is a tree like ``flatten(like)``."""

    @abstractmethod
    def restore(self, target: Any, state: object) -> None:
        """Restore `state` into `target`, in place. Arrays that could be filled in place are filled already.

        For an object inside the state, `state` contains the live object, which is restored already.
        """

    def has_memory(self, target: Any) -> bool:
        """Return True, the default, if `restore` can change `target`. Only called if `is_object` is False.

        If the result is False, ``load_into`` puts a new value, the result of `unflatten`, into the parent of `target`.
        """
        return True

    def may_refuse(self, target: Any, request: object) -> bool:
        """Return True, the default, if `restore` may raise an error for a loaded state.

        ``load_into`` restores objects that may refuse their state before it changes anything else.

        Args:
            target: the object to restore.
            request: the result of `flatten_to_load`.
        """
        return True

    def undo(self, target: Any) -> Callable[[], None] | None:
        """Return a function that restores the current state of `target`; None, the default, if this is not possible.

        Called before a load changes a `target` that may refuse its state. The function is called if an object refuses.
        """
        return None


Continuation: TypeAlias = Callable[[], None]
"""The rest of a save, which runs in the background."""


class FilesHandler(Protocol):
    """Saves objects that write their own files, in any format. Stateless.

    Attributes:
        priority: see `Priority`. At equal priority it is used before handlers of all other kinds.
    """

    @property
    def priority(self) -> int: ...

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Capture state that may change, and return a function that writes the rest; None if everything is written.

        Called on the thread that calls the save, which waits. The continuation is called on another thread.

        Args:
            value: the object.
            directory: an empty directory that only this process uses. Everything in it, including directories, is
                stored after the continuation has returned.
        """

    def load(self, like: Any, directory: Path) -> object:
        """Load the object that ``like`` requests, and return it: often ``like`` itself, restored in place.

        `directory` has a copy of the object's files. The caller removes it afterwards.
        """


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """The methods of an object that saves itself to files. Its class need not import ckptcore.

    Both methods are plain functions with one parameter ``directory``. Objects with other methods are supported too: see
    the guide on objects that save themselves.
    """

    def save(self, directory: Path) -> Continuation | None:
        """Save the object's files. See `FilesHandler.save`."""

    def load(self, directory: Path) -> None:
        """Load the state from the files in `directory`."""


class HostMemory(Protocol):
    """Host memory that belongs to one save, and is reused by the next save. Thread-safe."""

    def empty(self, spec: ArraySpec) -> HostArray:
        """Return a C-contiguous array to fill; not initialised."""

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Copy `source` into this memory on I/O threads. `source` must not change until the copy is complete."""


class HostBytes(NamedTuple):
    """Bytes of host memory that boxes of a leaf take in a save, in addition to the leaf itself.

    Attributes:
        viewed: bytes in a blocking save, for the result of `LeafHandler.view_on_host`; zero if it views the leaf's
            memory.
        copied: bytes in an asynchronous save, for the result of `LeafHandler.copy_to_host`.
    """

    viewed: int
    copied: int


AbstractLeaves: TypeAlias = Callable[[Sequence[ArrayRecord]], Sequence[object]]
"""Returns the abstract leaf of a framework for each stored array, such as a tensor on the meta device.

The leaf is None if the framework does not have the dtype or kind of the array. A load without an abstract tree then
returns a NumPy array.
"""


class LeafHandler(Protocol):
    """Describes, copies and builds leaves of some types. Stateless, thread-safe, no I/O.

    Arrays are passed as (`Box`, NumPy array with a dtype of NumPy or ml_dtypes, in native byte order). A handler
    inherits from this class, which has defaults for all optional methods.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; may be a class attribute."""

    @abstractmethod
    def describe(self, leaf: Any) -> LeafRecord:
        """Return the record of a leaf: shape, dtype, kind. Also for abstract leaves. Never waits for a device.

        Raises:
            UnsupportedLeafError: the leaf cannot be stored; with the reason and a remedy.
        """

    @abstractmethod
    def abstract(self, leaf: Any) -> object:
        """Return the abstract leaf, which requests a leaf of this type, shape, dtype, kind and placement from a load.

        An abstract leaf has no elements: `shards` refuses it, `destination` returns no memory for it and `fill` cannot
        change it. This method neither reads nor copies elements, and does not wait. Therefore it also accepts deleted
        leaves, and leaves that are still being computed. It returns abstract leaves, and small immutable leaves such as
        numbers and strings, unchanged.

        Raises:
            UnsupportedLeafError: see `describe`; also if no abstract leaf can request a leaf like this.
        """

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """Return the handler that takes apart a leaf that is not one array; None, the default, for an array.

        Reads no elements. The other methods are never called for a leaf that is not one array.
        """
        return None

    def identity(self, leaf: Any) -> Hashable | None:
        """Return a value that is equal only for tied leaves, which share memory; None, the default, if unknown."""
        return None

    def built_type(self, leaf: Any) -> object:
        """Return the type that a load builds for this leaf, with what belongs to it, such as `requires_grad`; hashable.

        The default is the type of the leaf. Tied leaves are stored once, but a load builds one leaf for each type.
        """
        return type(leaf)

    @abstractmethod
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of the array that this process, one of `size`, holds; None if only other processes hold it.

        An example for None is an array of another pipeline stage. The method is then called again in the processes that
        hold the array. In this second call, `size` is the number of processes that hold the array, and `rank` is the
        position of this process among them. A process that takes part in an array without holding elements of it,
        because the array has fewer rows than processes, returns an empty sequence instead of None.
        """

    def replicas(self, leaf: Any, size: int) -> int | None:
        """Return how many of `size` processes hold each box of the array; None, the default, if unknown.

        The core divides the writes of a box among these processes. If the number is unknown, the core estimates it from
        the cuts of the array. Return 1 if the number differs between boxes. The result must be equal on every process
        that has the array in its tree, even if the process holds no elements. See `shards` for `size`.
        """
        return None

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes that a process of a job would hold: the result of `shards` in that process. For dry runs.

        Reads no elements and does not wait. The default supports only this process, and no abstract leaves.

        Args:
            leaf: an array, which may be abstract or deleted.
            process: the rank of the process; None: this process. The job need not be running.
            rank, size: the position of that process among the processes that share the leaf. See `shards`.

        Raises:
            UnsupportedLeafError: the boxes are unknown; with a remedy.
        """
        if process is None:
            return self.shards(leaf, rank, size)
        raise UnsupportedLeafError(
            f"{type(self).__name__} cannot tell which shards of a {type(leaf).__name__} another process holds; call "
            "plan in the processes of the job"
        )

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the host memory that the boxes would take; by default the memory of a copy of all elements."""
        record = self.describe(leaf)
        assert isinstance(record, ArrayRecord)  # values have no boxes
        nbytes = sum([box.size for box in boxes]) * record.spec.numpy_dtype.itemsize
        return HostBytes(nbytes, nbytes)

    @abstractmethod
    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy the elements of each box to memory that no other code changes or frees, for asynchronous saves.

        Start the copies without waiting for them. Memory that cannot change needs no copy. The memory of an immutable
        array may change nevertheless, because another object may share it.
        """

    @abstractmethod
    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return the elements of each box, for blocking saves. The arrays may alias the leaf and have any strides."""

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """Return the elements of a box that a save compares between processes; None to compare nothing.

        Only called for arrays that are assumed to be equal in several processes, if only some of the processes write
        the boxes: see `shards`. Return the elements that `ckptcore.model.sampled` returns, in the same order. The
        default returns None for a large box that `view_on_host` would transfer from a device. Implement this method if
        the device can sample.
        """
        nbytes = box.size * stored.spec.numpy_dtype.itemsize
        if nbytes > WHOLE_SAMPLE_BYTES and self.host_bytes(leaf, [box]).viewed:
            return None
        (view,) = self.view_on_host(leaf, [box])
        return [Ready(part) for part in sampled(view.result())]

    @abstractmethod
    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes of the stored array that this process needs to build `abstract`, without duplicates."""

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return memory of `abstract` for a box, to read into: of the stored dtype, C-contiguous, writable.

        Only called by ``load_into``. Return None, the default, if there is no such memory. `build` then receives the
        elements.
        """
        return None

    @abstractmethod
    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build the leaf that `abstract` requests. The leaf may keep and alias the arrays.

        `boxes` is empty for a `ValueRecord`.
        """

    def keeps_memory(self, abstract: Any) -> bool:
        """Return True, the default, if a result of `build` may keep the arrays that were passed to `build`.

        If the result is False, the arrays are freed after `build`. A handler that returns False implements no
        `destination`.
        """
        return True

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy the elements into `target`, in place. Return False, the default, if `target` cannot be changed.

        Only called by ``load_into``. If `destination` returned memory for a box, `boxes` has that memory, filled.
        """
        return False

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of this process that `fill` changes, or None, the default, if `fill` returns False.

        Only called by ``load_into``, before anything is read. The memory of two targets must not overlap. The result is
        empty if this process holds no element of `target`.
        """
        return None


class TransformSource(Protocol):
    """Resources for a transform besides the tree that it changes."""

    def open(self, location: str | os.PathLike[str]) -> DerivedTree:
        """Open another checkpoint. Its arrays can be combined with the arrays of the tree.

        Raises:
            CheckpointError: it cannot be opened.
        """

    def read_json(self, name: str) -> Mapping[str, JSON] | None:
        """Read a JSON file of other software next to the arrays, such as ``config.json``; None if it does not exist.

        Raises:
            CorruptCheckpointError: the file is not a JSON object.
        """

    def leaf_handler(self, value: object) -> LeafHandler | None:
        """Return the handler of a leaf; None if no installed plugin handles its type."""


class DerivedTree(NamedTuple):
    """A tree whose arrays are derived from stored arrays.

    Attributes:
        tree: paths and records. The record of an array has the shape and dtype of the derived array.
        arrays: the derived arrays, by leaf number. Has no aliases.
        values: for the leaf number of each value, its leaf number in the loaded checkpoint.
        source: further checkpoints, files and handlers.
    """

    tree: TreeMetadata
    arrays: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    source: TransformSource

    def finish(self) -> DerivedTree:
        """Return this tree, which is complete."""
        return self


class TransformedTree(Protocol):
    """A tree between transforms: `DerivedTree`, or a mutable object that transforms of one package share."""

    @property
    def source(self) -> TransformSource:
        """Further checkpoints, files and handlers."""

    def finish(self) -> DerivedTree:
        """Return the tree as it is now.

        Raises:
            TransformError: the result is not a tree, because there are leaves below a leaf.
        """


class Transform(Protocol):
    """A change of a stored tree while it is loaded. Immutable; reads no elements."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Return the changed tree: a new tree, or the given tree if it can be changed in place.

        Raises:
            TransformError, ValueError: the tree lacks the leaves to change, or they do not fit.
        """

    def describe(self) -> str:
        """Describe the transform in one line. Equal on every process of a job."""


Transforms: TypeAlias = Sequence[Transform]
"""Transforms in the order in which a load applies them."""
