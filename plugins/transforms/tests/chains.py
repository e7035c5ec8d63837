"""Random chains of transforms of a random tree, with NumPy's results and the stored elements that each needs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from ckptcore_transforms import (
    Apply,
    Average,
    Cast,
    Default,
    Drop,
    Fuse,
    IfPresent,
    MergeAxes,
    MergeLora,
    Pad,
    Refuse,
    Rename,
    RenameTable,
    Reshape,
    Scale,
    Slice,
    Split,
    SplitAxis,
    Stack,
    Transform,
    Transpose,
    Unstack,
)
from hypothesis import strategies as st

import ckptcore
from ckptcore import AbstractArray
from ckptcore.model import HostArray

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "int32", "uint4", "int4", "bool", "complex64")
FLOATS = ("float32", "bfloat16", "float16", "float64")
OTHER, ADAPTER = "memory://transforms/chains-other", "memory://transforms/chains-adapter"


@dataclass(frozen=True)
class Part:
    """The expected elements of an array, and their origins.

    Attributes:
        elements: the elements, computed by NumPy.
        origins: for each element, the numbers of the stored elements that it depends on, along the last axis.
            Unused places are -1.
    """

    elements: HostArray
    origins: HostArray

    @property
    def dtype(self) -> str:
        """The name of the dtype of the elements."""
        return self.elements.dtype.name

    def moved(self, move: Callable[[HostArray], HostArray]) -> Part:
        """Return the same elements in another order. `move` must accept arrays of any dtype."""
        if not self.elements.ndim:
            return Part(move(self.elements), self.origins)
        each = [move(self.origins[..., number]) for number in range(self.origins.shape[-1])]
        return Part(move(self.elements), np.stack(each, -1))

    def made(self, elements: HostArray) -> Part:
        """Return the result of an elementwise operation: new elements with the same origins."""
        return Part(elements, self.origins)


Tree: TypeAlias = Mapping[str, Part]
"""Expected arrays by the text of their paths."""


@dataclass
class Chain:
    """Transforms, with the expected tree.

    Attributes:
        stored: the stored tree.
        transforms: the transforms, in order.
        tree: the expected tree.
        others: other checkpoints to save, by location.
    """

    stored: Mapping[str, HostArray]
    transforms: list[Transform] = field(default_factory=list)
    tree: dict[str, Part] = field(default_factory=dict)
    others: dict[str, Mapping[str, HostArray]] = field(default_factory=dict)
    names: int = 0

    def name(self) -> str:
        """Return a path that is not in the tree."""
        self.names += 1
        return ("new/{}" if self.names % 2 else "n.{}").format(self.names)

    def change(self, path: str, transform: Transform, made: Part) -> None:
        """Record the change of one array."""
        self.transforms.append(transform)
        self.tree[path] = made

    def replace(self, path: str, made: Mapping[str, Part], *transforms: Transform) -> None:
        """Record the replacement of one array by others."""
        self.transforms.extend(transforms)
        del self.tree[path]
        self.tree.update(made)


def begun(stored: Mapping[str, HostArray]) -> Chain:
    """Return a chain without transforms."""
    tree, first = {}, 0
    for path, array in stored.items():
        tree[path] = Part(array, (first + np.arange(array.size)).reshape((*array.shape, 1)))
        first += array.size
    return Chain(stored, tree=tree)


def exactly(path: str) -> re.Pattern[str]:
    """Return a template that matches one path, with special characters escaped."""
    return re.compile(re.escape(path))


def _rename(draw: st.DrawFn, chain: Chain, path: str) -> None:
    new = chain.name()
    part = chain.tree[path]
    pick = draw(st.sampled_from(["rename", "table", "maybe"]))
    if pick == "rename":
        chain.replace(path, {new: part}, Refuse(new), Rename(exactly(path), new), Refuse(exactly(path)))
    elif pick == "table":
        chain.replace(path, {new: part}, RenameTable({path: new}))
    else:
        chain.replace(path, {new: part}, IfPresent(Drop("not/there")), IfPresent(Rename(exactly(path), new)))


def _drop(draw: st.DrawFn, chain: Chain, path: str) -> None:
    if len(chain.tree) > 1:
        chain.replace(path, {}, Drop(exactly(path)))


def _default(draw: st.DrawFn, chain: Chain, path: str) -> None:
    there = draw(st.booleans())
    array = np.arange(3, dtype=np.int16)
    if there:
        chain.transforms.append(Default(path, array))
    else:
        new = chain.name()
        chain.transforms.append(Default(new, array))
        chain.tree[new] = Part(array, np.full((3, 1), -1))


def _cast(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part, dtype = chain.tree[path], draw(st.sampled_from(DTYPES))
    if part.dtype.startswith("complex") and not dtype.startswith("complex"):
        return
    to = AbstractArray((), dtype).dtype
    with np.errstate(all="ignore"):
        try:
            elements = part.elements.astype(to)
        except TypeError:
            return
    if "float" in part.dtype and "float" not in dtype and not np.isfinite(part.elements.astype(np.float64)).all():
        return  # the result of an overflow depends on the processor
    chain.change(path, Cast(exactly(path), dtype), part.made(elements))


def _transpose(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    axes = draw(st.permutations(range(part.elements.ndim)))
    if part.elements.ndim:
        chain.change(path, Transpose(exactly(path), tuple(axes)), part.moved(lambda array: array.transpose(axes)))


def _reshape(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if not part.elements.ndim:
        return
    shape = draw(_shapes_of(part.elements.size))
    if shape:
        chain.change(path, Reshape(exactly(path), shape), part.moved(lambda array: array.reshape(shape)))


def _split_axis(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if not part.elements.ndim:
        return
    shape = part.elements.shape
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(_shapes_of(shape[axis])) or (1,)
    made = part.moved(lambda array: array.reshape((*shape[:axis], *sizes, *shape[axis + 1 :])))
    chain.change(path, SplitAxis(exactly(path), axis - len(shape) * draw(st.integers(0, 1)), sizes), made)


def _merge_axes(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    shape = part.elements.shape
    if not shape:
        return
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, len(shape) - axis))
    sizes = shape[axis : axis + count]
    merged = (*shape[:axis], math.prod(sizes), *shape[axis + count :])
    first = axis - len(shape) * draw(st.integers(0, 1))
    chain.change(path, MergeAxes(exactly(path), first, sizes), part.moved(lambda array: array.reshape(merged)))


def _scale(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if part.dtype in FLOATS:
        wide = np.float64 if part.dtype == "float64" else np.float32
        with np.errstate(all="ignore"):
            made = np.divide(part.elements.astype(wide), 2).astype(part.elements.dtype)
        chain.change(path, Scale(exactly(path), 0.5), part.made(made))


def _slice(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if part.elements.ndim:
        axis = draw(st.integers(0, part.elements.ndim - 1))
        start = draw(st.integers(0, part.elements.shape[axis]))
        stop = draw(st.integers(start, part.elements.shape[axis]))
        index = (*(slice(None),) * axis, slice(start, stop))
        chain.change(path, Slice(exactly(path), start, stop, axis), part.moved(lambda array: array[index]))


def _pad(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if not part.elements.ndim or part.elements.size > 300:
        return
    axis, more = draw(st.integers(0, part.elements.ndim - 1)), draw(st.integers(0, 3))
    widths = [(0, more if own == axis else 0) for own in range(part.elements.ndim)]
    value = part.elements.dtype.type(1)
    made = Part(
        np.pad(part.elements, widths, constant_values=value),
        np.pad(part.origins, [*widths, (0, 0)], constant_values=-1),
    )
    size = part.elements.shape[axis] + more
    chain.change(path, Pad(exactly(path), size, axis, True if part.dtype == "bool" else 1), made)


def _apply(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if part.elements.size > 60:
        return
    every = part.origins.reshape(-1) if part.origins.size else np.array([-1])
    of_all = np.broadcast_to(every, (*part.elements.shape, every.size))
    if draw(st.booleans()) or not part.elements.ndim:
        chain.change(
            path,
            Apply(exactly(path), lambda array: array.reshape(-1)[::-1].reshape(array.shape)),
            Part(part.elements.reshape(-1)[::-1].reshape(part.elements.shape), of_all),
        )
        return
    if part.elements.shape[0]:
        first = Apply(exactly(path), lambda array: array[0], lambda spec: AbstractArray(spec.shape[1:], spec.dtype))
        chain.change(path, first, Part(part.elements[0], of_all[0]))


def _split(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if not part.elements.ndim:
        return
    axis = draw(st.integers(0, part.elements.ndim - 1))
    extent = part.elements.shape[axis]
    cuts = sorted(draw(st.lists(st.integers(0, extent), max_size=2)))
    bounds = [0, *cuts, extent]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    names = [chain.name() for _ in sizes]
    made = {
        name: part.moved(lambda array, start=start, stop=stop: array[(*(slice(None),) * axis, slice(start, stop))])  # type: ignore[misc]
        for name, start, stop in zip(names, bounds, bounds[1:], strict=False)
    }
    chain.replace(path, made, Split(exactly(path), names, axis, sizes))


def _unstack(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if not part.elements.ndim:
        return
    axis = draw(st.integers(0, part.elements.ndim - 1))
    count = part.elements.shape[axis]
    if not 1 <= count <= 6:
        return
    new, layers = chain.name(), chain.name()
    before = (slice(None),) * axis
    made = {
        f"{layers}.{number}": part.moved(lambda array, number=number: array[(*before, number)])  # type: ignore[misc]
        for number in range(count)
    }
    if part.elements.ndim == 1:
        made = {name: Part(part.elements[number], part.origins[number]) for number, name in enumerate(made)}
    chain.replace(
        path,
        made,
        Rename(exactly(path), new),
        Unstack(new, f"{layers}.{{i}}", axis - part.elements.ndim * draw(st.integers(0, 1))),
    )


def _stack(draw: st.DrawFn, chain: Chain, path: str) -> None:
    """Stack or concatenate arrays that differ at most in their extent along one axis."""
    part = chain.tree[path]
    stacks = draw(st.booleans()) or not part.elements.ndim
    axis = draw(st.integers(0, part.elements.ndim if stacks else part.elements.ndim - 1))

    def likeness(array: HostArray) -> object:
        shape = list(array.shape)
        if not stacks and len(shape) > axis:
            shape[axis] = 0
        return array.dtype, shape

    like = [other for other, piece in chain.tree.items() if likeness(piece.elements) == likeness(part.elements)]
    chosen = draw(st.permutations(like))[: draw(st.integers(1, 3))]
    if sum([chain.tree[name].elements.size for name in chosen]) > 600:
        return
    members, new = chain.name(), chain.name()
    parts = [chain.tree.pop(name) for name in chosen]
    width = max([piece.origins.shape[-1] for piece in parts])
    origins = [
        np.pad(
            piece.origins,
            [*[(0, 0)] * (piece.origins.ndim - 1), (0, width - piece.origins.shape[-1])],
            constant_values=-1,
        )
        for piece in parts
    ]
    table = {name: f"{members}.{number}" for number, name in enumerate(chosen)}
    put = np.stack if stacks else np.concatenate
    chain.tree[new] = Part(put([piece.elements for piece in parts], axis), put(origins, axis))
    chain.transforms.append(RenameTable(table))
    rank = part.elements.ndim + stacks
    signed_axis = axis - rank * draw(st.integers(0, 1))
    if stacks:
        chain.transforms.append(Stack(f"{members}.{{i}}", new, signed_axis))
    else:
        sizes = [piece.elements.shape[axis] for piece in parts]
        chain.transforms.append(Fuse(list(table.values()), new, signed_axis, sizes))


def _lora(draw: st.DrawFn, chain: Chain, path: str) -> None:
    part = chain.tree[path]
    if part.elements.ndim != 2 or part.dtype not in FLOATS or chain.others.get(ADAPTER) is not None:
        return
    rows, columns = part.elements.shape
    rank = draw(st.integers(0, 2))
    up, down = np.ones((rows, rank), np.float32) * 2, np.arange(rank * columns, dtype=np.float32).reshape(rank, columns)
    new = chain.name()
    chain.others[ADAPTER] = {f"{new}.B": up, f"{new}.A": down}
    wide = np.float64 if part.dtype == "float64" else np.float32
    with np.errstate(all="ignore"):
        made = (part.elements.astype(wide) + wide(0.5) * (up.astype(wide) @ down.astype(wide))).astype(
            part.elements.dtype
        )
        if not np.isfinite(made.astype(np.float64)).all() or np.abs(made.astype(np.float64)).max(initial=0) > 1000:
            del chain.others[ADAPTER]
            return
    merge = MergeLora("{name...}", "{name...}.B", "{name...}.A", 0.5, ADAPTER)
    chain.replace(path, {new: part.made(made)}, Rename(exactly(path), new), merge)


_STEPS: Sequence[Callable[[st.DrawFn, Chain, str], None]] = (
    _rename,
    _drop,
    _default,
    _cast,
    _transpose,
    _reshape,
    _split_axis,
    _merge_axes,
    _scale,
    _slice,
    _pad,
    _apply,
    _split,
    _unstack,
    _stack,
    _lora,
)


@st.composite
def chains(draw: st.DrawFn, stored: Mapping[str, HostArray], most: int = 6) -> Chain:
    """Generate transforms of a stored tree."""
    chain = begun(stored)
    if draw(st.integers(0, 4)) == 0 and not any(array.dtype.kind == "c" for array in stored.values()):
        _average(chain)
    for _ in range(draw(st.integers(0, most))):
        path = draw(st.sampled_from(sorted(chain.tree)))
        draw(st.sampled_from(_STEPS))(draw, chain, path)
    return chain


def _average(chain: Chain) -> None:
    chain.transforms.append(Average([OTHER]))
    chain.others[OTHER] = chain.stored  # the mean of equal numbers is the same number, however it is rounded


@st.composite
def _shapes_of(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Generate a shape with this number of elements."""
    if size == 0:
        return draw(st.sampled_from([(0,), (0, 3), (2, 0, 1)]))
    shape: list[int] = []
    left = size
    while left > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([extent for extent in range(1, left + 1) if left % extent == 0])))
        left //= shape[-1]
    return (*shape, left)


def save_beside(chain: Chain) -> None:
    """Save the other checkpoints that a chain reads."""
    for location, state in chain.others.items():
        ckptcore.save(location, state, overwrite="non-atomic")


@st.composite
def stored_trees(draw: st.DrawFn) -> Mapping[str, HostArray]:
    """Generate small arrays by the texts of their paths. All dtypes can represent their elements, small integers."""
    tree = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = AbstractArray((), draw(st.sampled_from(DTYPES))).dtype
        array: HostArray = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
        tree[f"{'ab/'[number % 3]}x{number}"] = array
    return tree
