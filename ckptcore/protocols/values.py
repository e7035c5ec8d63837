"""Handlers, which take containers, checkpointables and leaves apart, copy them and build them again.

Transforms change stored trees, and derived arrays are computed from stored ones while they are read.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

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


class Priority:
    """The priority of a handler for a type. The highest one is used; a tie is an error that names both plugins."""

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
        attributes: the attributes of an instance of OrderedDict, as JSON. A load without an abstract tree sets them.
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
        """Return a container with exactly the type and the static content of `like`, and with other children.

        `children` are in the order of ``flatten(like)``.
        """

    @property
    def remedy(self) -> str:
        """Advice about content that no plugin handles, as a clause for errors; by default empty."""
        return ""

    def is_object(self, value: Any) -> bool:
        """Return True if programs refer to `value` as an object with an identity, like a module; by default False.

        ``load_checkpointables`` restores a tree in place if it is or contains such a container, or an object of a
        `CheckpointableHandler`. It builds a new value for any other tree, such as a dict of arrays.
        """
        return False

    def keeps_identity(self, value: Any) -> bool:
        """Return True if a container at several places of a tree is one container in a loaded tree too.

        For variables that several modules share. False, the default: each place gets a container of its own.
        """
        return False

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the children that `replace` can replace, by their positions in `flatten`; by default none.

        ``load_into`` replaces children that cannot be filled in place. Other containers are replaced in their parent.
        """
        return ()

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Replace children in `target` itself, by position. Required if `replaceable` returns any."""
        raise PluginError(f"{type(self).__name__} has replaceable children and does not implement replace()")


class CheckpointableHandler(Protocol):
    """Takes objects apart that are more than a container: a module, an optimizer. Stateless, thread-safe, no I/O.

    A handler inherits from this class, which has defaults for all optional methods.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; may be a class attribute."""

    @property
    def is_object(self) -> bool:
        """True, the default, if programs refer to `value` as an object with an identity, like a module.

        False for values that have a state only because it decides about their form, such as sparse tensors and sets:
        ``load`` builds a new value and ``abstract`` returns an abstract one.
        """
        return True

    @property
    def per_process(self) -> bool:
        """True if every process has its own state, as for iterators and random generators; by default False.

        As a separate name in ``save_checkpointables``, such an object is saved by every process.
        """
        return False

    @abstractmethod
    def flatten(self, value: Any) -> object:
        """Return the state of `value`: a tree of containers and leaves. Its arrays may be the object's own."""

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the state of `value` to load, with abstract leaves for missing state; by default equal to `flatten`.

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
        """Restore this state into `target`, in place. Arrays that could be filled in place are filled already.

        In place of an object inside `state`, it has the live object, which is restored already.
        """

    def has_memory(self, target: Any) -> bool:
        """Return True, the default, if `restore` can change `target`. Only asked about values that are no objects.

        If it returns False, ``load_into`` puts a new value, the result of `unflatten`, into the container of `target`.
        """
        return True

    def may_refuse(self, target: Any, request: object) -> bool:
        """Return True, the default, if `restore` may raise an error for a loaded state.

        ``load_into`` restores these objects first. Only then does it change anything else.

        Args:
            target: the object to restore.
            request: the result of `flatten_to_load`.
        """
        return True

    def undo(self, target: Any) -> Callable[[], None] | None:
        """Return a function that puts the present state of `target` back; None, the default, if there is none.

        Called before a load changes `target`, if it may refuse its state. The function is called if an object refuses.
        """
        return None


Continuation: TypeAlias = Callable[[], None]
"""The rest of a save, which runs in the background."""


class FilesHandler(Protocol):
    """Saves objects that write their own files, in any format. Stateless.

    Attributes:
        priority: see `Priority`. At equal priority it is used before a `CheckpointableHandler`.
    """

    @property
    def priority(self) -> int: ...

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Capture state that may change, and return a function that writes the rest; None if all is written.

        Called on the thread that calls the save, and blocks it. The continuation is called on another thread.

        Args:
            value: the object.
            directory: an empty directory that only this process uses. Everything in it, including directories, is
                stored after the continuation.
        """

    def load(self, like: Any, directory: Path) -> object:
        """Load the object that ``like`` requests from its files: often ``like`` itself, restored in place.

        `directory` is a copy of the files, which the caller removes afterwards.
        """


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """The methods of an object that saves itself to files. It does not depend on ckptcore.

    Both methods are plain functions with one parameter ``directory``. Objects with other methods are supported too: see
    the guide on objects that save themselves.
    """

    def save(self, directory: Path) -> Continuation | None:
        """Save the object's files. See `FilesHandler.save`."""

    def load(self, directory: Path) -> None:
        """Load the state from the files in `directory`."""


class HostMemory(Protocol):
    """Host memory that belongs to one save, reused by the next. Thread-safe."""

    def empty(self, spec: ArraySpec) -> HostArray:
        """Return a C-contiguous array to fill; not initialised."""

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Copy `source` into memory of the save, on the core's threads. `source` must not change before the result."""


class HostBytes(NamedTuple):
    """The host memory that boxes of a leaf take in a save, in addition to the leaf, in bytes.

    Attributes:
        viewed: in a blocking save, for the result of `LeafHandler.view_on_host`: zero for views of the leaf's memory.
        copied: in an asynchronous save, for the result of `LeafHandler.copy_to_host`.
    """

    viewed: int
    copied: int


AbstractLeaves: TypeAlias = Callable[[Sequence[ArrayRecord]], Sequence[object]]
"""Returns the abstract leaf of a framework for each stored array, such as a tensor on the meta device.

None for an array whose dtype or kind the framework does not have: a load without an abstract tree makes it a NumPy
array.
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

        It has no elements: `shards` refuses it, `destination` returns no memory for it and `fill` cannot change it.
        Reads and copies no elements and waits for nothing, so it also accepts deleted leaves, and leaves that are still
        being computed. Abstract leaves return themselves, and so do small immutable ones, such as numbers and strings.

        Raises:
            UnsupportedLeafError: see `describe`; also if no abstract leaf can request a leaf like this.
        """

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """Return the handler of a leaf that is not one array, which takes it apart; None, the default, for an array.

        Reads no elements. Other methods are never called for such a leaf.
        """
        return None

    def identity(self, leaf: Any) -> Hashable | None:
        """Return a value that is equal only for leaves that share memory (tied leaves). None, the default: unknown."""
        return None

    @abstractmethod
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of the array that this process holds, of `size` processes. None: it holds none at all.

        None is for arrays that only other processes hold, such as those of another pipeline stage. The method is
        then called again in the processes that hold the array: `size` is the number of these processes, and `rank` is
        the position of this process among them. If one of them has no elements, because there are fewer rows than
        processes, it returns an empty sequence instead of None.
        """

    def replicas(self, leaf: Any, size: int) -> int | None:
        """Return how many of `size` processes hold each box of the array; None, the default, if unknown.

        The core divides the writes of a box between this many processes. If unknown, the core estimates the number from
        the cuts of the array. Return 1 if it differs between boxes. The result must be equal on every process that has
        the array in its tree, also on a process that holds no elements. See `shards` for `size`.
        """
        return None

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes that a process of a job would hold: the result of `shards` in that process. For dry runs.

        Reads no elements and waits for nothing. The default supports only this process, and no abstract leaves.

        Args:
            leaf: an array, also an abstract or deleted one.
            process: the rank of the process; the job need not run. None: this process.
            rank, size: the position of that process among those that share the leaf. See `shards`.

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
        """Return the host memory that these boxes would take; by default that of a copy of all elements."""
        record = self.describe(leaf)
        assert isinstance(record, ArrayRecord)  # values have no boxes
        nbytes = sum([box.size for box in boxes]) * record.spec.numpy_dtype.itemsize
        return HostBytes(nbytes, nbytes)

    @abstractmethod
    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy the elements of each box to memory that no other code changes or frees, for asynchronous saves.

        Memory that cannot change needs no copy. An immutable array is not sufficient, because other objects may share
        its memory and change it. Starts the copies and does not wait for them.
        """

    @abstractmethod
    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return the elements of each box, for blocking saves. They may alias the leaf and have any strides."""

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """Return the elements of a box that a save compares with those of other processes. None: do not compare.

        Only called for arrays that are assumed to be equal in several processes, whose boxes are written by some of
        these: see `shards`. The elements are those of `ckptcore.model.sampled`, in the same order. The default returns
        None for a large box that `view_on_host` would transfer from a device. Implement it if the device can sample.
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

        Only called by ``load_into``. None, the default, if there is no such memory: `build` then receives the elements.
        """
        return None

    @abstractmethod
    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build the leaf that `abstract` requests. It may keep and alias the arrays.

        `boxes` is empty for a `ValueRecord`.
        """

    def keeps_memory(self, abstract: Any) -> bool:
        """Return False if the results of `build` do not use the arrays that were passed to it, which are then freed.

        True, the default, if they may. A handler that returns False implements no `destination`.
        """
        return True

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy the elements into `target`, in place; False, the default, if it cannot be changed.

        Only called by ``load_into``. If `destination` returned memory for a box, `boxes` has that memory, filled.
        """
        return False

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of this process that `fill` changes, or None, the default, if `fill` returns False.

        Only called by ``load_into``, before anything is read. The memory of two targets must not overlap. Empty if this
        process holds no element of `target`.
        """
        return None


class Part(NamedTuple):
    """A box of an input from which a box of a derived array is computed.

    Attributes:
        number: the number of the input.
        box: the box of the input, in elements; never empty.
    """

    number: int
    box: Box


class DerivedArray(Protocol):
    """An array that is computed from other arrays. Immutable, hashable, picklable if its attributes are. Thread-safe.

    No method is called for a box without elements.
    """

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the array."""

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The arrays from which it is computed."""

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the boxes of inputs from which a box of the array is computed: as few elements as possible."""

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return the views of `out` into which the parts are copied unchanged, so that they are read in place.

        One view for each part of `needed`, of its shape; together they cover `out`. None if the elements are computed,
        or if there are no such views of this memory.

        Args:
            box: the box of the array that `out` is for.
            out: memory of the box's shape; of any strides.
        """

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Fill `out` with a box of the array.

        Args:
            box: the box.
            parts: the elements of the parts of `needed`, in its order; read-only.
            out: memory of the box's shape and the dtype of the array; of any strides.

        Raises:
            ValueError: an element cannot be computed; the load names the array.
        """


class TransformSource(Protocol):
    """Resources for a transform besides the tree that it changes."""

    def open(self, location: str | os.PathLike[str]) -> DerivedTree:
        """Open another checkpoint. Its arrays can be combined with those of the tree.

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
    """A tree, and how each of its arrays is derived from stored ones.

    Attributes:
        tree: paths and records; shape and dtype of each array are those of its derived array.
        arrays: by leaf number, the derived array. Has no aliases.
        values: by leaf number, the leaf number of each value in the loaded checkpoint.
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
            TransformError: it is not a tree, because there are leaves below a leaf.
        """


class Transform(Protocol):
    """A change of a stored tree while it is loaded. Immutable; reads no elements."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Return the changed tree: a new one, or the given one if that can be changed in place.

        Raises:
            TransformError, ValueError: the tree lacks the leaves to change, or they do not fit.
        """

    def describe(self) -> str:
        """Describe the transform in one line. Equal on every process of a job."""


Transforms: TypeAlias = Sequence[Transform]
"""Transforms in the order in which a load applies them."""
