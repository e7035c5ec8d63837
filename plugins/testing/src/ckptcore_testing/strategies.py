"""Hypothesis strategies for boxes, partitions, dtypes, specs, arrays, keys and nested trees."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ckptcore.model import ArraySpec, Box, HostArray, Key
from ckptcore_testing.arrays import DTYPE_NAMES, bit_patterns

__all__ = [
    "Pair",
    "Point",
    "arrays",
    "boxes",
    "dtypes",
    "keys",
    "partitions",
    "shapes",
    "specs",
    "trees",
    "values",
]

Point = namedtuple("Point", ("x", "y"))
"""A named tuple for trees."""


@dataclasses.dataclass
class Pair:
    """A dataclass for trees."""

    first: Any
    second: Any


def dtypes(names: Sequence[str] = DTYPE_NAMES) -> st.SearchStrategy[str]:
    """Names of dtypes."""
    return st.sampled_from(list(names))


def shapes(max_dims: int = 4, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, including shapes without axes and without elements."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def specs(names: Sequence[str] = DTYPE_NAMES, *, max_dims: int = 4, max_side: int = 6) -> st.SearchStrategy[ArraySpec]:
    """Array specs of these dtypes."""
    return st.builds(ArraySpec, shapes(max_dims, max_side), dtypes(names))


def arrays(names: Sequence[str] = DTYPE_NAMES) -> st.SearchStrategy[HostArray]:
    """C-contiguous NumPy arrays with random bit patterns."""
    return st.builds(bit_patterns, specs(names), st.integers(0, 99))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], *, allow_empty: bool = False) -> Box:
    """A box inside an array. It is empty only if the array is, or if `allow_empty`."""
    start, stop = [], []
    for extent in shape:
        least = 0 if allow_empty or extent == 0 else 1
        low = draw(st.integers(0, extent - least))
        start.append(low)
        stop.append(draw(st.integers(low + least, extent)))
    return Box(tuple(start), tuple(stop))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], max_parts: int = 6) -> tuple[Box, ...]:
    """Boxes that cover an array without gaps or overlaps, not always in a grid."""
    parts = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_parts - 1))):
        number = draw(st.integers(0, len(parts) - 1))
        box = parts[number]
        long_axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
        if not long_axes:
            continue
        axis = draw(st.sampled_from(long_axes))
        cut = draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
        low_stop = (*box.stop[:axis], cut, *box.stop[axis + 1 :])
        high_start = (*box.start[:axis], cut, *box.start[axis + 1 :])
        parts[number : number + 1] = [Box(box.start, low_stop), Box(high_start, box.stop)]
    return tuple(draw(st.permutations(parts)))


def keys() -> st.SearchStrategy[Key]:
    """Keys of mappings: ints, bools, strs (some of which layouts must escape), and tuples of such keys."""
    awkward = st.sampled_from(
        [
            "",
            ".",
            "..",
            "a",
            "a.b",
            "a/b",
            "b",
            "0",
            "1",
            "-1",
            "__metadata__",
            "weight",
            "%2E",
            "~0",
            "é",
            "e\u0301",
            "\\",
            "True",
            "('a', 1)",
        ]
    )
    plain = st.one_of(st.integers(-3, 12), st.booleans(), awkward, st.text(max_size=4))
    parts = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
    return st.one_of(plain, st.lists(parts, max_size=3).map(tuple), st.just(("a", 1)))


def values() -> st.SearchStrategy[object]:
    """Values that are stored in the root: None, bool, int of any size, float, complex, str and bytes."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(10**40), 10**40),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=8),
        st.binary(max_size=8),
    )


def trees(
    leaves: st.SearchStrategy[Any] | None = None,
    *,
    containers: Sequence[Callable[[Sequence[object]], object]] = (),
    max_leaves: int = 12,
) -> st.SearchStrategy[Any]:
    """Nested trees of all built-in containers, including empty ones, with leaves of every kind.

    Args:
        leaves: the leaves. None: NumPy arrays and values.
        containers: functions that create other containers from any number of children.
        max_leaves: approximate maximum number of leaves.
    """

    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(children, max_size=3)
        return st.one_of(
            several,
            several.map(tuple),
            st.dictionaries(keys(), children, max_size=3),
            st.dictionaries(keys(), children, max_size=3).map(OrderedDict),
            st.builds(Point, children, children),
            st.builds(Pair, children, children),
            *[several.map(make) for make in containers],
        )

    return st.recursive(st.one_of(arrays(), values()) if leaves is None else leaves, extend, max_leaves=max_leaves)
