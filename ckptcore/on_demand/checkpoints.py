"""Open checkpoints: the tree of a checkpoint, with arrays that are read on demand."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context
from ckptcore.distributions import ShownInNotebooks
from ckptcore.errors import TreeMismatchError, UnknownPathError
from ckptcore.inspection.describe import CheckpointMetadata, describe_opened
from ckptcore.loading.load import LoadRequest
from ckptcore.loading.reading import read_leaf
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.tree import LEAF, Attribute, Key, Node, PlainKey, TreePath, format_path, leaf_count
from ckptcore.on_demand.arrays import StoredArray
from ckptcore.on_demand.open_state import OpenState
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import open_tree
from ckptcore.other_libraries import ExplainsAttributes

if TYPE_CHECKING:
    from ckptcore.matching.options import LoadReport
    from ckptcore.on_demand.boxes import LoadedBox
    from ckptcore.protocols import Transforms
    from ckptcore.select import Selection

StoredPath: TypeAlias = PlainKey | Sequence[Key]
"""A path in an open tree: a key, a sequence of keys, or keys joined by ``/``."""

_TEXT_KINDS = ("str", "bytes")


class StoredTree(ExplainsAttributes, ShownInNotebooks, Mapping[Any, Any]):
    """A container of an open checkpoint, as a mapping of its keys in order. Lists and tuples have indices as keys.

    Each value is a `StoredTree` for a container, a `StoredArray` for an array, or a small value itself.

    Attributes:
        path: its path from the root of the tree.
    """

    def __init__(self, state: OpenState, node: Node, path: TreePath, first: int) -> None:
        """Refer to a container of an open checkpoint; `first` is the number of the first leaf in the container."""
        self._refer(state, path)
        self._node = node
        self._first = first

    def _refer(self, state: OpenState, path: TreePath) -> None:
        self.path = path
        self._state = state
        self._parts: dict[object, object] = {}  # containers and arrays that were looked up, by the path given

    def __getstate__(self) -> tuple[OpenState, TreePath]:
        """Pickle and copy the location, the options and the path. The copy opens the checkpoint at its first use."""
        return self._state, self.path

    def __setstate__(self, reference: tuple[OpenState, TreePath]) -> None:
        self._refer(*reference)

    @cached_property
    def _node(self) -> Node:
        """The structure of the container. Only pickled or copied objects look it up; see `__init__`."""
        return self._place[0]

    @cached_property
    def _first(self) -> int:
        """The number of the first leaf in the container. Only pickled or copied objects look it up; see `__init__`."""
        return self._place[1]

    @property
    def _place(self) -> tuple[Node, int]:
        node, first = _root_of(self._state), 0
        for key in self.path:
            number = node.keys.index(key)
            first += sum([leaf_count(child) for child in node.children[:number]])
            child = node.children[number]
            assert isinstance(child, Node)  # the path of a container in the same save
            node = child
        return node, first

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {format_path(self.path)}: {self._node.kind} of {len(self)}>"

    def __len__(self) -> int:
        """Return the number of children."""
        return len(self._node.keys)

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of its children; attributes as text."""
        return (key.name if isinstance(key, Attribute) else key for key in self._node.keys)

    def __contains__(self, path: object) -> bool:
        """Return True if the path exists."""
        try:
            self[path]  # type: ignore[index]  # raises TypeError if it is not a path
        except (UnknownPathError, TypeError):
            return False
        return True

    def __getitem__(self, path: StoredPath) -> Any:
        """Return a `StoredTree`, a `StoredArray`, or a small value. Reads no array except long text.

        Args:
            path: keys, or text with keys joined by ``/``: ``("layers", 0)``, ``"params/dense"``. A key that equals the
                whole tuple or text takes precedence. Text also matches an attribute with this name, or an index with
                the same digits.

        Raises:
            UnknownPathError: the path does not exist; suggests a similar path.
            ValueError: the checkpoint was closed. A container or array that was looked up before is still returned.
        """
        try:
            part = self._parts.get(path)
        except TypeError:  # a list of keys
            path = tuple(path) if isinstance(path, Sequence) else path
            part = None
        if part is not None:
            return part
        entry = self._child(path) if isinstance(path, (str, tuple)) else None
        if entry is None:
            keys = (path,) if isinstance(path, (str, int, Attribute)) else tuple(path)
            if (entry := _descend(self, keys)) is None:
                raise self._nothing_at(keys)
        if type(entry) is _SmallValue:
            return entry.read(self._state)
        self._parts[path] = entry
        return entry

    def _child(self, key: object) -> _Entry | None:
        """Return the child with this key, or else a child whose key has the same text; None if there is none."""
        node = self._node
        number = self._numbers.get(key)
        if number is None:
            # Text that is not a key matches an attribute or an index with the same text.
            number = self._numbers_by_text.get(key.name if isinstance(key, Attribute) else key)
        if number is None or (type(key) is bool and type(node.keys[number]) is not bool):
            return None
        child, path, first = node.children[number], (*self.path, node.keys[number]), self._firsts[number]
        if not isinstance(child, Node):
            return self._leaf(path, first)
        _ = self._state.checkpoint  # raises if the checkpoint is closed
        return StoredTree(self._state, child, path, first)

    def _leaf(self, path: TreePath, number: int) -> StoredArray | _SmallValue:
        """Return an array, or the number of a small value."""
        record = self._state.checkpoint.tree.leaves[number]  # raises if the checkpoint is closed
        if isinstance(record, ArrayRecord) and record.kind not in _TEXT_KINDS:
            return StoredArray(self._state, number, path, record.spec)
        return _SmallValue(number)

    @cached_property
    def _numbers(self) -> Mapping[object, int]:
        return dict(zip(self._node.keys, range(len(self)), strict=True))

    @cached_property
    def _numbers_by_text(self) -> Mapping[object, int]:
        return {**{str(key): number for key, number in self._numbers.items()}, **self._numbers}

    @cached_property
    def _firsts(self) -> Sequence[int]:
        """The number of the first leaf in each child."""
        children = self._node.children
        if children.count(LEAF) == len(children):  # a large container of leaves
            return range(self._first, self._first + len(children))
        return list(itertools.accumulate(map(leaf_count, children[:-1]), initial=self._first))

    def _nothing_at(self, keys: Sequence[Key]) -> UnknownPathError:
        from ckptcore.tree.suggestions import NameSuggestions  # only for errors

        names = [str(key) for key in self._node.keys]
        asked = "/".join(map(str, keys))
        first, _, inner = asked.partition("/")
        if first in names and inner:
            depth, count = len(self.path), asked.count("/") + 1
            below = [path[depth:][:count] for path in self._state.checkpoint.tree.paths if path[:depth] == self.path]
            near = NameSuggestions(list(dict.fromkeys(["/".join(map(str, path)) for path in below]))).nearest(asked)
        else:
            near = NameSuggestions(names).nearest(first)
        shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        hint = f"; did you mean {near!r}?" if near not in (None, asked, first) else ""
        return UnknownPathError(
            f"{asked!r} is not in {format_path(self.path)} of {self._state.checkpoint.location.display}, which has "
            f"{shown or 'nothing'}{hint}"
        )


class _SmallValue(NamedTuple):
    """The number of a small value, which is read again each time."""

    leaf: int

    def read(self, state: OpenState) -> Any:
        return state.guard(lambda checkpoint: read_leaf(checkpoint, self.leaf, state.context))


_Entry: TypeAlias = StoredTree | StoredArray | _SmallValue


def _descend(tree: StoredTree, keys: Sequence[Key]) -> _Entry | None:
    """Follow keys. Text that is not a key is split at slashes."""
    if keys in ((), ("",)) and not isinstance(tree._state.checkpoint.tree.skeleton, Node):
        return tree._leaf((), 0)  # the whole tree is one leaf
    if not keys:  # a new object: caching a checkpoint in itself would be a reference cycle, and keep files open
        return StoredTree(tree._state, tree._node, tree.path, tree._first)
    key, rest = keys[0], keys[1:]
    child = tree._child(key)
    if isinstance(child, StoredTree):
        if (entry := _descend(child, rest)) is not None:
            return entry
    elif not rest and child is not None:
        return child
    if not isinstance(key, str):
        return None
    position = key.rfind("/")
    while position > 0:  # the longest head first, because keys may have slashes
        head, tail = tree._child(key[:position]), key[position + 1 :]
        if isinstance(head, StoredTree):
            entry = _descend(head, (*((tail,) if tail else ()), *rest))
            if entry is not None:
                return entry
        position = key.rfind("/", 0, position)
    return None


def _root_of(state: OpenState) -> Node:
    """Return the outermost container; an empty one if the whole tree is one leaf."""
    skeleton = state.checkpoint.tree.skeleton
    return skeleton if isinstance(skeleton, Node) else Node("dict", (), ())


class OpenCheckpoint(StoredTree):
    """An open checkpoint: a mapping of its tree, with arrays that are read when they are indexed. Thread-safe.

    All data is from the save that was opened. Use the checkpoint in a ``with`` statement, or call `close`. It can be
    pickled, for example for the workers of a data loader. The copy has the location and the options, and opens the
    checkpoint at its first use. It raises `CheckpointNotFoundError` if the checkpoint was replaced or deleted by then.
    """

    def __init__(self, location: LocationLike, context: Context) -> None:
        """Open a checkpoint; see `ckptcore.open`."""
        state = OpenState(location, context)
        checkpoint = state.checkpoint
        if checkpoint.is_files:
            raise TreeMismatchError(
                f"{checkpoint.location.display} has files of an object instead of a tree: load() returns them as bytes",
                ["files are stored, a tree is opened"],
            )
        super().__init__(state, _root_of(state), (), 0)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self._node.kind} of {len(self)}"
        return f"<OpenCheckpoint: {state}>"

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._state.is_closed

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the checkpoint."""
        self.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from the storage so far, including bytes read for verification.

        Reads of the root, and of arrays in the bases of an update, are not counted.

        Raises:
            ValueError: the checkpoint was closed.
        """
        store = self._state.checkpoint.store
        return store.bytes_read + store.bytes_got

    @cached_property
    def metadata(self) -> CheckpointMetadata:
        """Metadata of the checkpoint; see `ckptcore.metadata`. Reads no array.

        Raises:
            CheckpointNotFoundError: the metadata must be read again, but the checkpoint was replaced or deleted.
            ValueError: the checkpoint was closed.
        """

        context = self._state.context

        def describe(checkpoint: Checkpoint) -> CheckpointMetadata:
            # Open it without the cache: a cached root is shared, but callers may change the metadata that they get.
            if checkpoint.root is not None:
                checkpoint = open_tree(checkpoint.location, checkpoint.version, context)
            return describe_opened(checkpoint, context)

        return self._state.attempt(describe)

    def iter_boxes(
        self,
        *,
        select: Selection | None = None,
        transforms: Transforms = (),
        first: Selection | Sequence[Selection] = (),
        report: LoadReport | None = None,
    ) -> Generator[LoadedBox, None, None]:
        """Read all arrays in boxes, one after the other, with bounded memory.

        Reads ahead: boxes in memory, including those that were read ahead, take about ``MemoryOptions.load_bytes``, or
        128 MiB. Data that can only be read whole may exceed this, such as a compressed chunk, or an array of other
        software with one checksum. Boxes come in storage order, so that few bytes are read twice; the arrays of `first`
        come before the others. Small values are not included; they are in ``metadata.abstract``.

        Args:
            select: as for `ckptcore.load`.
            transforms: as for `ckptcore.load`; boxes are parts of the transformed arrays.
            first: arrays to read before all others; several selections are read one after the other.
            report: filled after the last box, or when the iterator fails or is closed; values count as skipped.

        Raises:
            Errors of `ckptcore.load`, before anything is read. During the iteration:
            CorruptCheckpointError: bytes differ from those written. Earlier boxes are valid.
            CheckpointNotFoundError: the checkpoint was replaced or deleted. Without checksums, earlier boxes may be of
                another save.
        """
        from ckptcore.on_demand.boxes import iter_boxes  # plain loads and slices do not need it

        request = LoadRequest(select=select, transforms=transforms, report=report)
        return iter_boxes(self._state, request, first)

    def close(self) -> None:
        """Close the files. Arrays that were read, and memory maps, stay valid. Closing again does nothing."""
        self._state.close()
