"""Random derived arrays, each with NumPy's result and the stored elements that it needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from ckptcore_testing.layout_stores import WatchedIndex
from ckptcore_testing.strategies import boxes
from ckptcore_transforms.derived_arrays import permute, stack, weighted_sum
from hypothesis import strategies as st

from ckptcore.context import Context
from ckptcore.derivations import Stored, cast, concatenate, cut, pad, reshape
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.model import JSON, ArraySpec, Box, HostArray, ReadItem, TreeMetadata
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.protocols import ChunkIndex, DerivedArray, ReadStore

CASTS = ("float32", "bfloat16", "float16", "int8", "float64", "float8_e4m3fn")


@dataclass(frozen=True)
class Chain:
    """A derivation to test.

    Attributes:
        derivation: the derivation.
        expected: the whole array, computed by NumPy.
        origins: for each element, the numbers of the stored elements that it depends on, along the last axis.
            Unused places are -1.
    """

    derivation: DerivedArray
    expected: HostArray
    origins: HostArray

    def least(self, box: Box) -> int:
        """Number of stored elements that a box depends on.

        Repeated elements count once for each position.
        """
        return int((self.origins[box.slices] >= 0).sum())


@st.composite
def chains(draw: st.DrawFn, stored: Sequence[HostArray], most: int = 5) -> Chain:
    """Generate an array that is split and joined in a few steps from arrays of a checkpoint."""
    firsts = np.cumsum([0, *[array.size for array in stored]])
    pool = [
        Chain(
            Stored(ArraySpec(array.shape, str(array.dtype)), leaf),
            array,
            (first + np.arange(array.size)).reshape((*array.shape, 1)),
        )
        for leaf, (array, first) in enumerate(zip(stored, firsts, strict=False))
    ]
    chain = draw(st.sampled_from(pool))
    for _ in range(draw(st.integers(1, most))):
        chain = draw(_step(chain))
        pool.append(chain)
    return chain


@st.composite
def _step(draw: st.DrawFn, chain: Chain) -> Chain:
    """Apply one more step."""
    derivation, array, origins = chain.derivation, chain.expected, chain.origins
    step = draw(st.sampled_from(["cut", "reshape", "permute", "pad", "stack", "concatenate", "cast", "average"]))
    axes = array.ndim
    if step == "cut":
        box = draw(boxes(array.shape))
        return Chain(cut(derivation, box), array[box.slices], origins[box.slices])
    if step == "reshape":
        shape = draw(_shape_of(array.size))
        return Chain(reshape(derivation, shape), array.reshape(shape), origins.reshape((*shape, origins.shape[-1])))
    if step == "permute":
        order = draw(st.permutations(range(axes)))
        return Chain(permute(derivation, order), array.transpose(order), origins.transpose((*order, axes)))
    if step == "pad" and axes and array.size < 500:
        before, after = (draw(st.lists(st.integers(0, 2), min_size=axes, max_size=axes)) for _ in range(2))
        widths = list(zip(before, after, strict=True))
        padded = np.pad(array, widths, constant_values=array.dtype.type(1))
        return Chain(pad(derivation, before, after, 1), padded, np.pad(origins, [*widths, (0, 0)], constant_values=-1))
    if step in ("stack", "concatenate") and axes and array.size < 300:
        axis = draw(st.integers(0, axes - 1))
        box = draw(boxes(array.shape)) if step == "concatenate" else Box.whole(array.shape)
        start, stop = list(Box.whole(array.shape).start), list(array.shape)
        start[axis], stop[axis] = box.start[axis], box.stop[axis]
        band = Box(tuple(start), tuple(stop))
        put = stack if step == "stack" else concatenate
        by_numpy = np.stack if step == "stack" else np.concatenate
        several = draw(
            st.permutations(
                [(derivation, array, origins), (cut(derivation, band), array[band.slices], origins[band.slices])]
            )
        )
        return Chain(
            put([parts[0] for parts in several], axis),
            by_numpy([parts[1] for parts in several], axis),
            by_numpy([parts[2] for parts in several], axis),
        )
    if step == "cast":
        dtype = draw(st.sampled_from(CASTS))
        made = cast(derivation, dtype)
        with np.errstate(all="ignore"):
            return Chain(made, array.astype(made.spec.numpy_dtype), origins)
    if step == "average" and axes and array.dtype == np.float32:
        back = tuple(reversed(range(axes)))
        if array.shape == array.T.shape:
            both = weighted_sum([derivation, permute(derivation, back)], [0.5, 2.0])
            expected = array * np.float32(0.5) + array.T * np.float32(2.0)
            return Chain(both, expected, np.concatenate([origins, origins.transpose((*back, axes))], -1))
    return chain


@st.composite
def _shape_of(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Generate a shape with this number of elements."""
    shape: list[int] = []
    left = size
    while left > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([extent for extent in range(1, left + 1) if left % extent == 0])))
        left //= shape[-1]
    return (*shape, left) if left != math.prod(()) or draw(st.booleans()) else tuple(shape)


@dataclass
class Counted:
    """A layout that counts the elements that are read."""

    checkpoint: Checkpoint
    plans: list[Sequence[ReadItem]] = field(default_factory=list)

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of the layout, with counted reads."""
        return WatchedIndex(self.checkpoint.layout.index(tree, state), self._read)

    def _read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        self.plans.append(items)
        return store.read_boxes(index, items, buffers)

    def __getattr__(self, name: str) -> object:
        return getattr(self.checkpoint.layout, name)

    @property
    def elements(self) -> int:
        """Number of elements read."""
        return sum([item.box.size for items in self.plans for item in items])


def open_counted(location: str) -> tuple[Checkpoint, Counted]:
    """Open a checkpoint whose reads are counted."""
    checkpoint = open_checkpoint(location, Context())
    counted = Counted(checkpoint)
    # `Counted` takes all other attributes from the layout
    stored = StoredFormat(counted, checkpoint.state)  # type: ignore[arg-type]
    return dataclasses.replace(checkpoint, stored=stored), counted
