"""Values: how containers, checkpointables and leaves are taken apart, copied and built again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard, StridedMemory
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.model.transfer import Pending
from ckptcore.model.tree import Key, NodeKind

__all__ = [
    "CheckpointableHandler",
    "ContainerHandler",
    "Continuation",
    "FilesHandler",
    "Flattened",
    "HostBytes",
    "HostMemory",
    "LeafHandler",
    "Priority",
    "StatefulCheckpointable",
]


class Priority:
    """What a handler says of how sure it is of a type; the highest wins and a tie is an error naming both plugins."""

    FALLBACK: Final = 0  #: any type of a broad sort: a dataclass
    PROTOCOL: Final = 25  #: types that have certain methods
    REGISTERED: Final = 50  #: types that were registered with a framework
    FRAMEWORK: Final = 75  #: a framework's own types
    EXACT: Final = 100  #: exactly this type


class Flattened(NamedTuple):
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

    A handler inherits from this class, which has defaults for all that is optional.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; a class attribute will do."""
        ...

    @abstractmethod
    def flatten(self, value: Any) -> Flattened:
        """Take `value` apart by one level."""
        ...

    @abstractmethod
    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """A container of exactly the type and the static content of `like`, with other children.

        `children` are in the order in which `flatten(like)` gives them.
        """
        ...

    def is_object(self, value: Any) -> bool:
        """Return whether programs hold `value` as an object with an identity, as they hold a module; by default False.

        ``load_checkpointables`` restores such a container in place. It builds others anew: dicts, and containers
        of abstract leaves.
        """
        return False

    def replaceable(self, target: Any) -> Collection[int]:
        """Return which children `replace` can replace, by their positions in what `flatten` gives; by default none.

        ``load_into`` replaces children that cannot be filled in place. Containers with other children are replaced in
        their parent.
        """
        return ()

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Replace children in `target` itself, by position. Required if `replaceable` returns any."""
        raise PluginError(f"{type(self).__name__} has replaceable children and does not implement replace()")


class CheckpointableHandler(Protocol):
    """Takes objects apart that are more than a container: a module, an optimizer. Stateless, thread-safe, no I/O.

    A handler inherits from this class, which has defaults for all that is optional.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; a class attribute will do."""
        ...

    @property
    def per_process(self) -> bool:
        """True if every process has a state of its own, as of iterators and random generators; by default False.

        Under a name of its own in ``save_checkpointables`` every process saves such an object for itself.
        """
        return False

    @abstractmethod
    def flatten(self, value: Any) -> object:
        """The state of `value`: a tree of containers and leaves. Arrays in it may be those of the object itself."""
        ...

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """The state of `value` to load, with abstract leaves for what it lacks so far; by default as `flatten`.

        An object that has part of its state only once it was used, such as an optimizer, implements it.

        Args:
            value: the object that is loaded into, or an object like it.
            stored: the state that is stored for it, in Python's own containers: `AbstractArray` for arrays, and values.
        """
        return self.flatten(value)

    @abstractmethod
    def unflatten(self, like: Any, state: object) -> object:
        """What a load with the abstract object `like` returns; `state` is a loaded tree like ``flatten(like)``."""
        ...

    @abstractmethod
    def restore(self, target: Any, state: object) -> None:
        """Make `target` have this state, in place. Arrays that could be filled in place already were."""
        ...


Continuation: TypeAlias = Callable[[], None]
"""The rest of a save, which runs in the background."""


class FilesHandler(Protocol):
    """Saves objects that write files of their own, in any format. Stateless.

    Attributes:
        priority: see `Priority`. At the same priority it comes before a `CheckpointableHandler`.
    """

    @property
    def priority(self) -> int: ...

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Capture what must not change and return what writes the rest; None if all is written.

        Called on the thread of the caller of a save, who is blocked by it; the continuation is called on another.

        Args:
            value: the object.
            directory: a directory of this process alone, there and empty. Everything in it, also in directories below
                it, is stored once the continuation is done.
        """
        ...

    def load(self, like: Any, directory: Path) -> object:
        """The object that ``like`` asks for, from files as they were written: often ``like`` itself, restored in place.

        `directory` is a copy that the caller removes afterwards.
        """
        ...


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """What an object has that saves itself to files: it needs nothing of ckptcore to have it.

    Both methods are plain functions with one parameter ``directory``. What other objects have instead is found too: see
    the guide on objects that save themselves.
    """

    def save(self, directory: Path) -> Continuation | None:
        """As `FilesHandler.save`."""
        ...

    def load(self, directory: Path) -> None:
        """Take the state that the files in `directory` hold."""
        ...


class HostMemory(Protocol):
    """Host memory that belongs to one save, reused by the next. Any thread."""

    def empty(self, spec: ArraySpec) -> HostArray:
        """A C-contiguous array to fill; not initialised."""
        ...

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Copy `source` into memory of the save, on the core's threads; `source` must stay as it is until then."""
        ...


class HostBytes(NamedTuple):
    """Host memory that boxes of a leaf take in a save, beside the leaf itself, in bytes.

    Attributes:
        viewed: in one that blocks, as `LeafHandler.view_on_host` gives them: zero where that gives the memory of the
            leaf.
        copied: in an asynchronous one, as `LeafHandler.copy_to_host` gives them.
    """

    viewed: int
    copied: int


class LeafHandler(Protocol):
    """Describes, copies and builds leaves of some types. Stateless, thread-safe, no I/O.

    Arrays come and go as (`Box`, NumPy array with dtypes of NumPy or ml_dtypes, native byte order). A handler inherits
    from this class, which has defaults for all that is optional.
    """

    @property
    @abstractmethod
    def priority(self) -> int:
        """See `Priority`; a class attribute will do."""
        ...

    @abstractmethod
    def describe(self, leaf: Any) -> LeafRecord:
        """What the leaf is: shape, dtype, kind. Also of an abstract leaf. Never waits for a device.

        Raises:
            UnsupportedLeafError: if a leaf like this cannot be stored; says why and what to do.
        """
        ...

    @abstractmethod
    def abstract(self, leaf: Any) -> object:
        """Return the abstract leaf, which requests a leaf of this type, shape, dtype, kind and placement from a load.

        It holds no elements: `shards` refuses it, `destination` has no memory of it and `fill` cannot change it.
        Touches none, copies nothing and waits for nothing: also of a leaf that was deleted, or is still computed. An
        abstract leaf is its own, and so is a small one that cannot be changed: a number, a str.

        Raises:
            UnsupportedLeafError: as `describe`; also if nothing without elements can ask for a leaf like this.
        """
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """Return a value that is equal exactly for leaves that share memory (tied); None, the default, if unknown."""
        return None

    @abstractmethod
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """The boxes of the array that this process holds, of `size` processes; None where it only knows of the array.

        None is for an array that is spread over other processes alone, as those of another stage of a pipeline may be:
        these share it as if the job were theirs, and `rank` and `size` are the place among them and their number when
        they are asked again. A process that is one of them and has nothing, because there were fewer rows than
        processes, gives no boxes.
        """
        ...

    def replicas(self, leaf: Any, size: int) -> int | None:
        """Return how many of `size` processes hold each box of the array; None, the default, if unknown.

        Processes share the work of writing by it. If it is not known it is estimated from where the array is cut. 1 if
        it differs from box to box. Equal on every process that has the array in its tree, also on those that only know
        of it. `size` is as in `shards`.
        """
        return None

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes that a process of a job would hold, as `shards` returns them in that process, for dry runs.

        Touches no elements and waits for nothing. By default only this process is known, and no abstract leaf.

        Args:
            leaf: an array, also an abstract one, or one that was deleted.
            process: which process of the job, by its rank; the job need not run. None: this one.
            rank, size: as for `shards`: the place of that process among those that share the leaf.

        Raises:
            UnsupportedLeafError: if the leaf does not know; says what does.
        """
        if process is None:
            return self.shards(leaf, rank, size)
        raise UnsupportedLeafError(
            f"{type(self).__name__} does not know what another process holds of a {type(leaf).__name__}; call plan "
            "in the processes of the job"
        )

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the host memory that these boxes would take; by default the most: a copy of all elements."""
        record = self.describe(leaf)
        assert isinstance(record, ArrayRecord)  # a value has no boxes
        nbytes = sum([box.size for box in boxes]) * record.spec.numpy_dtype.itemsize
        return HostBytes(nbytes, nbytes)

    @abstractmethod
    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """For asynchronous saves: the elements of each box, in memory that no other code changes or frees.

        Memory that cannot change needs no copy. An immutable array is not enough: other objects may share its memory,
        and change it. Starts the copies and does not wait for them.
        """
        ...

    @abstractmethod
    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """For blocking saves: the elements of each box; may alias the leaf and have any strides."""
        ...

    @abstractmethod
    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes of the stored array that this process needs to build `abstract`; without duplicates."""
        ...

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Memory of `abstract` itself that holds `box`, to be read into: of the stored dtype, C-contiguous, writable.

        Only asked by ``load_into``. None, the default, where there is none: then `build` gets the elements.
        """
        return None

    @abstractmethod
    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build the leaf that `abstract` requests. May keep and alias the arrays: they belong to it.

        Of a `ValueRecord`, `boxes` is empty.
        """
        ...

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Make `target` itself hold the elements, in place; False, the default, where it cannot be changed.

        Only asked by ``load_into``. A box that `destination` gave memory for comes with that memory, filled.
        """
        return False

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of this process that `fill` changes, or None if `fill` returns False.

        Only asked by ``load_into``, before anything is read. The memory of two targets must not overlap. Empty if this
        process holds no element of `target`. By default None.
        """
        return None
