"""Conversions between named entries of torch.distributed.checkpoint and trees, and of tensors to NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ckptcore.model import (
    ArrayRecord,
    Attribute,
    HostArray,
    LeafRecord,
    Node,
    Skeleton,
    TreeMetadata,
    TreePath,
    dtype_from_name,
)

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in checkpoints."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype with a name from a checkpoint, or None if PyTorch lacks it."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def host_array(tensor: torch.Tensor) -> HostArray:
    """Return the elements of a tensor as a NumPy array. It shares the memory of a tensor on the CPU; others are copied.

    Raises:
        UnsupportedLeafError: NumPy and ml_dtypes have no such dtype.
    """
    dtype = dtype_from_name(dtype_name(tensor.dtype))
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        array: HostArray = plain.numpy()
    except TypeError:  # a dtype of ml_dtypes, which PyTorch and NumPy exchange as integers
        array = plain.view(_INTEGERS[dtype.itemsize]).numpy().view(dtype)
    return array


def fits_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if elements of a dtype can be read into the memory of a tensor."""
    return (
        tensor.is_cpu
        and tensor.dtype == dtype
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


Steps: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry: text in mappings, numbers in lists."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An array or a value of a tree, with its name in torch.distributed.checkpoint.

    Attributes:
        steps: the keys that lead to the entry. Joined by dots, they are its name.
        path: the same keys as they are in the tree.
        leaves: the numbers of its leaves.
        node: its containers; a leaf for an array or a single value.
    """

    steps: Steps
    path: TreePath
    leaves: range
    node: Skeleton

    @property
    def name(self) -> str:
        """The name of the entry."""
        return ".".join(map(str, self.steps))


class _Branch(dict[str | int, Any]):
    """A container of a tree under construction, in contrast to a dict that is a value."""


def tree_of(entries: Mapping[str, Any], paths: Mapping[str, Steps]) -> dict[str, Any]:
    """Return a tree with the entries at their paths. If the paths are not usable, the keys are the names.

    The paths are usable if the keys of each path, joined by dots, are the name of its entry, and if no entry is inside
    another one.
    """
    root = _Branch()
    for name, value in entries.items():
        steps = paths.get(name, ())
        if ".".join(map(str, steps)) != name or not isinstance(steps[0], str) or not _put(root, steps, value):
            return dict(entries)
    tree: dict[str, Any] = _finished(root)
    return tree


def _put(branch: _Branch, steps: Steps, value: Any) -> bool:
    """Add a value.

    Return False if it conflicts with another value, or if a container would be both list and mapping.
    """
    for position, step in enumerate(steps):
        if branch and type(next(iter(branch))) is not type(step):
            return False
        if position == len(steps) - 1:
            if step in branch:
                return False
            branch[step] = value
        else:
            branch = branch.setdefault(step, _Branch())
            if not isinstance(branch, _Branch):
                return False
    return True


def _finished(value: Any) -> Any:
    """Replace branches by dicts, and by lists where their keys are all indices of a list."""
    if not isinstance(value, _Branch):
        return value
    if isinstance(next(iter(value), None), int) and sorted(value) == list(range(len(value))):
        return [_finished(value[number]) for number in range(len(value))]
    return {str(step): _finished(inner) for step, inner in value.items()}


def entries_of(tree: TreeMetadata) -> Iterator[Entry]:
    """Yield the entries of a tree, flattened as torch.distributed.checkpoint flattens state dicts.

    An object with named fields is a mapping.
    """
    root = tree.skeleton
    if isinstance(root, Node):
        yield from _Flattener(tree.leaves).entries(root)


class _Flattener:
    """One pass over a tree."""

    def __init__(self, leaves: Sequence[LeafRecord]) -> None:
        self._leaves = leaves
        self._next = 0

    def entries(self, node: Node, steps: Steps = (), path: TreePath = ()) -> Iterator[Entry]:
        """Yield the entries of a container that is flattened."""
        for key, child in zip(node.keys, node.children, strict=True):
            inner = (*steps, key if node.kind == "list" and isinstance(key, int) else str(key))
            if isinstance(child, Node) and self._is_flattened(child):
                yield from self.entries(child, inner, (*path, key))
            else:
                first, self._next = self._next, self._next + _count(child)
                yield Entry(inner, (*path, key), range(first, self._next), child)

    def _is_flattened(self, node: Node) -> bool:
        if node.kind in ("dict", "OrderedDict"):
            return True
        if node.kind == "object":
            return bool(node.keys) and all(isinstance(key, Attribute) for key in node.keys)
        return node.kind == "list" and self._has_arrays_or_mappings(node, self._next)

    def _has_arrays_or_mappings(self, node: Node, first: int) -> bool:
        """Return True if a list or a list inside it has an array or a mapping.

        `first` is the number of its first leaf.
        """
        for child in node.children:
            if isinstance(child, Node):
                has_arrays = child.kind in ("dict", "OrderedDict") or (
                    child.kind == "list" and self._has_arrays_or_mappings(child, first)
                )
            else:
                has_arrays = isinstance(self._leaves[first], ArrayRecord)
            if has_arrays:
                return True
            first += _count(child)
        return False


def _count(node: Skeleton) -> int:
    """Return the number of leaves."""
    if not isinstance(node, Node):
        return 1
    children: Sequence[Skeleton] = node.children
    return sum(map(_count, children))
