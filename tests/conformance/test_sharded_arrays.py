"""The handler of `ShardedArray` satisfies the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
from ckptcore_testing import LeafExample, LeafHandlerTests, bit_patterns

from ckptcore import ArrayShard, ShardedArray
from ckptcore.builtin.sharded_arrays import ShardedArrayHandler
from ckptcore.model import ArraySpec, Box, Shard

_BOXES = (Box((0, 0), (3, 5)), Box((3, 0), (4, 2)), Box((3, 2), (4, 5)))


def _sharded(whole: np.ndarray[Any, Any]) -> ShardedArray:
    return ShardedArray(whole.shape, whole.dtype, [ArrayShard(box, whole[box.slices].copy()) for box in _BOXES])


def _elements(leaf: ShardedArray) -> np.ndarray[Any, Any]:
    whole = np.zeros(leaf.shape, leaf.dtype)
    for shard in leaf.shards:
        assert shard.elements is not None
        whole[shard.box.slices] = shard.elements
    return whole


def _zero(leaf: ShardedArray) -> None:
    for shard in leaf.shards:
        assert shard.elements is not None
        shard.elements[...] = np.zeros(1, leaf.dtype)


def _example(dtype: str) -> LeafExample:
    whole = bit_patterns(ArraySpec((4, 5), dtype))
    return LeafExample(
        dtype,
        lambda: _sharded(whole),
        whole,
        _elements,
        [lambda: ShardedArray(whole.shape, whole.dtype, [ArrayShard(box) for box in _BOXES]), lambda: _sharded(whole)],
        _zero,
    )


class TestShardedArrays(LeafHandlerTests):
    handler = ShardedArrayHandler()
    examples = tuple([_example(dtype) for dtype in ("float32", "bfloat16", "int4", "complex128", "bool")])

    def test_shards_of_all_processes_cover_the_array(self) -> None:
        boxes = [
            self.handler.shards(
                ShardedArray((4, 5), "float32", [ArrayShard(box, np.zeros(box.shape, np.float32))]), rank, 3
            )
            for rank, box in enumerate(_BOXES)
        ]
        assert boxes == [[Shard(box)] for box in _BOXES]
