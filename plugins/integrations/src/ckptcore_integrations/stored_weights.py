"""Weights of a checkpoint as lazy tensors: only the elements that a program copies are read.

A program that places weights itself narrows and transposes each one, and copies the result into a parameter.
`WeightReader` passes it a `StoredWeight` for each array. Views of a stored weight read nothing, and copies of it are
recorded. Later one load reads the boxes of many recorded copies; the processes of a group can share this load. Any
other operation on a weight, or on a parameter with a recorded copy, reads the elements first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ckptcore
from ckptcore import ArrayShard, Context, Matching, ShardedArray
from ckptcore.model import Box
from ckptcore.model.tree import Attribute, Key
from ckptcore.results import StoredArray, StoredTree

_CPU: Final = torch.device("cpu")
_PART: Final = Matching(unexpected="ignore")


class StridedBox(NamedTuple):
    """The elements of a view of a C-contiguous array.

    Attributes:
        box: the smallest box of the array that contains the elements, and from which the view can be made.
        offset, strides: position and strides of the view in the C-contiguous elements of the box, in elements. The
            shape of the view does not change.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]


def strided_box(shape: Sequence[int], view: torch.Tensor) -> StridedBox:
    """Return the box of an array that contains a view.

    Args:
        shape: the shape of the array.
        view: a view, not empty, of a C-contiguous tensor of this shape.
    """
    steps = _contiguous_strides(shape)
    last = sum([(extent - 1) * stride for extent, stride in zip(view.shape, view.stride(), strict=True)])
    begin = int(view.storage_offset())
    low, high = _index(begin, steps), _index(begin + last, steps)
    moves = [_index(stride, steps) for stride in view.stride()]
    reached = [
        start + sum([(extent - 1) * move[axis] for extent, move in zip(view.shape, moves, strict=True)])
        for axis, start in enumerate(low)
    ]
    if reached == list(high):  # no step of the view carries over to an earlier axis of the array
        box = Box(tuple(low), tuple([stop + 1 for stop in high]))
        inner = _contiguous_strides(box.shape)
        strides = [sum([step * size for step, size in zip(move, inner, strict=True)]) for move in moves]
        return StridedBox(box, 0, tuple(strides))
    axis = next(axis for axis, (start, stop) in enumerate(zip(low, high, strict=True)) if start != stop)
    box = Box(
        (*low[: axis + 1], *[0] * (len(shape) - axis - 1)),
        (*[start + 1 for start in low[:axis]], high[axis] + 1, *shape[axis + 1 :]),
    )
    first = sum([start * step for start, step in zip(box.start, steps, strict=True)])
    return StridedBox(box, begin - first, view.stride())


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]


def _index(offset: int, steps: Sequence[int]) -> list[int]:
    index = []
    for step in steps:
        index.append(offset // step)
        offset %= step
    return index


class StoredWeight(torch.Tensor):
    """A view of a stored array. Further views read nothing. Other operations read the elements."""

    _source: StoredArray
    _view: torch.Tensor

    @staticmethod
    def __new__(cls, source: StoredArray, view: torch.Tensor) -> Self:
        """Describe a view.

        Args:
            source: the stored array.
            view: a view of a tensor on the meta device with the shape of the array.
        """
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), storage_offset=view.storage_offset(), dtype=view.dtype, device=_CPU
        )
        made._source = source
        made._view = view
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # PyTorch also passes args and kwargs by position
        """Run an operation. Views read no elements; other operations read them."""
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], StoredWeight) and func not in _OTHER_ELEMENTS:
            weight = args[0]
            viewed = func(weight._view, *args[1:], **kwargs)
            if all(_is_plain_view(view, weight) for view in tree_leaves(viewed)):
                return tree_map(lambda view: cls(weight._source, view), viewed)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, StoredWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise ValueError(
                    f"{func} changes a weight of a checkpoint in place, which is only read: call clone() of it first"
                )
        if func is torch.ops.aten.copy_.default and args[0].device.type == "meta":
            return args[0]  # used by programs that count elements before they copy
        args, kwargs = tree_map(elements_of, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # Tensor's has no types
        """Return a text, without reading elements."""
        return f"StoredWeight({self._source!r}, shape={tuple(self.shape)})"


_OTHER_ELEMENTS: Final = frozenset(
    [torch.ops.aten._conj.default, torch.ops.aten._neg_view.default, torch.ops.aten.view.dtype]
)
"""Views whose elements differ from those of the array."""


def _is_plain_view(view: torch.Tensor, weight: StoredWeight) -> bool:
    """Return True if the elements of a view are elements of the weight."""
    return view.dtype == weight.dtype and not view.is_conj() and not view.is_neg()


def elements_of(value: Any) -> Any:
    """Return a tensor with the elements of a stored weight; any other value as it is."""
    if not isinstance(value, StoredWeight):
        return value
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    box = strided_box(value._source.shape, value._view)
    index = tuple(map(slice, box.box.start, box.box.stop))
    return _strided(np.ascontiguousarray(value._source[index]), box, value)


def _strided(elements: np.ndarray[Any, Any], box: StridedBox, weight: StoredWeight) -> torch.Tensor:
    """Return the view of a stored weight, made from the elements of its box."""
    return torch.as_strided(tensor_over(elements, weight.dtype), weight.shape, box.strides, box.offset)


def refuse_missing(model: torch.nn.Module, loaded: Collection[str] | None, place: str) -> None:
    """Raise an error if parameters of a model were not loaded.

    Args:
        model: the model.
        loaded: the names of the parameters that it loaded; None: unknown.
        place: the place of the weights, for the message.

    Raises:
        ValueError
    """
    if loaded is None:
        return
    missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"{place} lacks weights of the model: {', '.join(missing[:5])}{more}. Its names must be those of Hugging "
            "Face; if the weights are in a part of the tree, choose it: set 'subtree' in model_loader_extra_config, or "
            "publish that part"
        )


def torch_dtype(name: str, dtype: str) -> torch.dtype:
    """Return the dtype of PyTorch for the dtype of a weight.

    Raises:
        ValueError: PyTorch has none.
    """
    named = getattr(torch, dtype, None)
    if isinstance(named, torch.dtype):
        return named
    raise ValueError(f"{name}: PyTorch has no dtype {dtype}")


def tensor_over(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the memory of an array."""
    if array.dtype.isbuiltin != 1:  # a dtype of ml_dtypes, which PyTorch does not accept
        array = array.view(f"u{array.itemsize}")
    return torch.from_numpy(array).view(dtype)


class _DataSetters(TorchFunctionMode):
    """Reads a stored weight that is assigned to ``data`` of a tensor, because the weight has no memory of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if getattr(func, "__name__", "") == "__set__":
            args = tree_map(elements_of, args)
        return func(*args, **(kwargs or {}))


class _Copy(NamedTuple):
    """A recorded copy: a stored weight, and the tensor that receives its elements."""

    weight: StoredWeight
    target: torch.Tensor


class WeightReader(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """Passes the arrays of a checkpoint to a program as `StoredWeight`, and performs the program's copies in batches.

    Use it as a context manager while the program copies. `fill` performs the remaining copies.
    """

    def __init__(
        self,
        location: str,
        tree: StoredTree,
        contexts: Sequence[Context],
        *,
        targets: Iterable[torch.Tensor],
        batch_bytes: int,
    ) -> None:
        """Prepare to read. Reads nothing.

        Args:
            location: the path or URL of the checkpoint.
            tree: the container with the weights, of the open checkpoint.
            contexts: options for loads of this process alone, and for loads of its group. Without a group, pass the
                same object twice.
            targets: tensors, such as parameters. Copies into their memory are performed later, in batches. Other copies
                are performed immediately.
            batch_bytes: size of the arrays of a batch of recorded copies, in bytes.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        self._location = location
        self._tree = tree
        self._alone, self._together = contexts
        self._targets = {_memory(tensor).storage for tensor in targets if _is_plain(tensor)}
        self._batch_bytes = batch_bytes
        self._copies: list[_Copy] = []
        self._setters = _DataSetters()

    def weights(self, dtype_of: Callable[[str, str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each array, and the array. The group performs the recorded copies after each batch.

        Args:
            dtype_of: returns the dtype of PyTorch for the name of a weight and the name of its stored dtype.
        """
        waiting = 0
        for name, stored in _arrays(self._tree, ""):
            meta = torch.empty(stored.shape, dtype=dtype_of(name, stored.dtype.name), device="meta")
            yield name, StoredWeight(stored, meta)
            waiting += stored.nbytes
            if waiting >= self._batch_bytes:
                self.fill()
                waiting = 0

    def fill(self) -> None:
        """Perform the recorded copies. Every process of the group must call this equally often."""
        self._do_copies(self._together)

    def __enter__(self) -> Self:
        """Intercept the operations of this thread."""
        self._setters.__enter__()  # type: ignore[no-untyped-call]  # PyTorch leaves them untyped
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop intercepting operations."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # PyTorch leaves them untyped
        self._setters.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record copies of stored weights. Perform the recorded copies of a tensor before another operation uses it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[1], StoredWeight) and _is_plain(args[0]):
            target, weight = args[0], args[1]
            if target.shape == weight.shape and _memory(target).storage in self._targets:
                self._copies.append(_Copy(weight, target))
                return target
        if self._copies and not func.is_view:
            used = [_memory(value) for value in tree_leaves((args, kwargs)) if _is_plain(value)]
            if any(_overlap(_memory(copy.target), memory) for copy in self._copies for memory in used):
                self._do_copies(self._alone)
        return func(*args, **kwargs)

    def _do_copies(self, context: Context) -> None:
        """Perform the recorded copies. After an error they stay recorded."""
        copies, self._copies = self._copies, []
        try:
            self._load(copies, context)
        except BaseException:
            self._copies = [*copies, *self._copies]
            raise

    def _load(self, copies: Sequence[_Copy], context: Context) -> None:
        """Load the elements of all copies in one load, and copy. Loads of a group request whole arrays."""
        if not copies and context is self._alone:
            return
        views = [strided_box(copy.weight._source.shape, copy.weight._view) for copy in copies if copy.weight.numel()]
        copies = [copy for copy in copies if copy.weight.numel()]
        boxes: dict[int, list[Box]] = {}
        sources: dict[int, StoredArray] = {}
        shared = context is not self._alone
        for copy, copied in zip(copies, views, strict=True):
            source = copy.weight._source
            sources[id(source)] = source
            # Shards can divide a block, for example by columns, but a block is read and verified whole. So a group
            # requests whole arrays, and each process reads a range of whole blocks.
            boxes.setdefault(id(source), []).append(Box.whole(source.shape) if shared else copied.box)
        request: dict[Key, Any] = {}
        for number, of_source in boxes.items():
            stored = sources[number]
            shards = [ArrayShard(box) for box in _separate(of_source)]
            _container(request, stored)[_plain(stored.path[-1])] = ShardedArray(stored.shape, stored.dtype, shards)
        loaded = ckptcore.load(self._location, request, matching=_PART, context=context)
        with torch.no_grad():
            for copy, copied in zip(copies, views, strict=True):
                stored = copy.weight._source
                array = _container(loaded, stored)[_plain(stored.path[-1])]
                shard = next(shard for shard in array.shards if _contains(shard.box, copied.box))
                part = shard.elements[tuple([slice(*ends) for ends in _within(copied.box, shard.box)])]
                copy.target.copy_(_strided(np.ascontiguousarray(part), copied, copy.weight))


def _container(tree: dict[Key, Any], stored: StoredArray) -> dict[Key, Any]:
    """Return the dict that contains or will contain a stored array. Adds missing dicts to the tree."""
    for key in stored.path[:-1]:
        tree = tree.setdefault(_plain(key), {})
    return tree


def _arrays(tree: StoredTree, prefix: str) -> Iterator[tuple[str, StoredArray]]:
    """Yield the arrays below a container, with their names. A name consists of the keys, joined by dots."""
    for key, stored in tree.items():
        name = f"{prefix}{_plain(key)}"
        if isinstance(stored, StoredTree):
            yield from _arrays(stored, f"{name}.")
        elif isinstance(stored, StoredArray):
            yield name, stored


def _plain(key: Key) -> Key:
    return key.name if isinstance(key, Attribute) else key


def _separate(boxes: Sequence[Box]) -> Sequence[Box]:
    """Merge overlapping boxes: return disjoint boxes that contain the given ones."""
    separate: list[Box] = []
    for box in boxes:
        while touched := [other for other in separate if _intersects(other, box)]:
            separate = [other for other in separate if other not in touched]
            touched.append(box)
            box = Box(
                tuple([min(starts) for starts in zip(*[part.start for part in touched], strict=True)]),
                tuple([max(stops) for stops in zip(*[part.stop for part in touched], strict=True)]),
            )
        separate.append(box)
    return separate


def _intersects(first: Box, second: Box) -> bool:
    starts, stops = map(max, first.start, second.start), map(min, first.stop, second.stop)
    return all(start < stop for start, stop in zip(starts, stops, strict=True))


def _contains(outer: Box, inner: Box) -> bool:
    return all(map(int.__le__, outer.start, inner.start)) and all(map(int.__ge__, outer.stop, inner.stop))


def _within(inner: Box, outer: Box) -> Sequence[tuple[int, int]]:
    return [
        (start - first, stop - first) for start, stop, first in zip(inner.start, inner.stop, outer.start, strict=True)
    ]


def _is_plain(value: object) -> bool:
    """Return True for a tensor with its own memory."""
    return isinstance(value, torch.Tensor) and not isinstance(value, StoredWeight) and value.device.type != "meta"


class _Memory(NamedTuple):
    """A range of memory: the address of its storage, and the addresses of its bytes."""

    storage: int
    start: int
    stop: int


def _memory(tensor: torch.Tensor) -> _Memory:
    """Return the range with the elements of a tensor."""
    last = sum([(extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    storage = tensor.untyped_storage().data_ptr()
    start = storage + int(tensor.storage_offset()) * tensor.element_size()
    return _Memory(storage, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


def _overlap(first: _Memory, second: _Memory) -> bool:
    return max(first.start, second.start) < min(first.stop, second.stop)
