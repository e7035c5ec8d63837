"""The simulated job: training of a model in the shapes of Llama 3.1 405B, sharded and replicated over processes.

The shapes are from the ``config.json`` of the model: 126 layers, hidden size 16384, feed-forward 53248, 128 heads and 8
key-value heads of 128 each, a vocabulary of 128256. The state has bfloat16 weights, float32 weights, and both moments
of AdamW.

Shards are those of FSDP2 of PyTorch over tensor parallelism. An array is divided for tensor parallelism first (by rows
or columns; norms are not divided), and then the rows of each part as ``torch.chunk`` does. The embedding and the head
have uneven shards: 16032 rows over 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.model import Box, Shard, dtype_from_name

LAYERS: Final = 126
_HIDDEN: Final = 16384
_FEED_FORWARD: Final = 53248
_KEY_VALUE: Final = 8 * 128
_VOCABULARY: Final = 128256
_STATES: Final = {"model": "bfloat16", "master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}

_ROWS: Final = "rows"
_COLUMNS: Final = "columns"
_WHOLE: Final = "whole"


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of the model, and the axis that tensor parallelism divides."""

    shape: tuple[int, ...]
    parallel: str


def _arrays(layers: int) -> Iterator[tuple[str, _Array]]:
    yield "tok_embeddings.weight", _Array((_VOCABULARY, _HIDDEN), _ROWS)
    for layer in range(layers):
        name = f"layers.{layer}"
        yield f"{name}.attention.wq.weight", _Array((_HIDDEN, _HIDDEN), _ROWS)
        yield f"{name}.attention.wk.weight", _Array((_KEY_VALUE, _HIDDEN), _ROWS)
        yield f"{name}.attention.wv.weight", _Array((_KEY_VALUE, _HIDDEN), _ROWS)
        yield f"{name}.attention.wo.weight", _Array((_HIDDEN, _HIDDEN), _COLUMNS)
        yield f"{name}.feed_forward.w1.weight", _Array((_FEED_FORWARD, _HIDDEN), _ROWS)
        yield f"{name}.feed_forward.w2.weight", _Array((_HIDDEN, _FEED_FORWARD), _COLUMNS)
        yield f"{name}.feed_forward.w3.weight", _Array((_FEED_FORWARD, _HIDDEN), _ROWS)
        yield f"{name}.attention_norm.weight", _Array((_HIDDEN,), _WHOLE)
        yield f"{name}.ffn_norm.weight", _Array((_HIDDEN,), _WHOLE)
    yield "norm.weight", _Array((_HIDDEN,), _WHOLE)
    yield "output.weight", _Array((_VOCABULARY, _HIDDEN), _ROWS)


def _bounds(start: int, stop: int, pieces: int) -> list[int]:
    """Return the boundaries of the pieces of a range, as `torch.chunk` divides it: equal, except the last ones."""
    step = -(-(stop - start) // pieces)
    return [min(stop, start + number * step) for number in range(pieces + 1)]


@dataclass(frozen=True)
class TrainingJob:
    """A job of ``tensor * sharded * replicas`` processes; tensor parallelism is the innermost dimension of its mesh.

    Attributes:
        tensor: processes that share each layer by tensor parallelism.
        sharded: processes over which FSDP shards.
        replicas: number of copies of the whole state.
        layers: number of layers of the model.
    """

    tensor: int
    sharded: int
    replicas: int
    layers: int = LAYERS

    @classmethod
    def of_size(cls, size: int, *, layers: int = LAYERS) -> TrainingJob:
        """Return a job of a number of processes, a multiple of 8. Above 1,024, the state is replicated."""
        sharded = min(128, size // 8)
        return cls(8, sharded, size // (8 * sharded), layers)

    @property
    def size(self) -> int:
        """Total number of processes."""
        return self.tensor * self.sharded * self.replicas

    @cached_property
    def arrays(self) -> Sequence[_Array]:
        """The arrays of one of the four states, in the order of the tree."""
        return [array for _, array in _arrays(self.layers)]

    @cached_property
    def _boundaries(self) -> Mapping[_Array, tuple[tuple[int, ...], ...]]:
        """The inner boundaries of the shards of each kind of array."""
        boundaries: dict[_Array, tuple[tuple[int, ...], ...]] = {}
        for array in self.arrays:
            if array in boundaries:
                continue
            rows = array.shape[0]
            parts = _bounds(0, rows, self.tensor) if array.parallel == _ROWS else [0, rows]
            inner = {bound for first, last in pairwise(parts) for bound in _bounds(first, last, self.sharded)}
            axes = [tuple(sorted(inner - {0, rows})), *[() for _ in array.shape[1:]]]
            if array.parallel == _COLUMNS:
                axes[1] = tuple(_bounds(0, array.shape[1], self.tensor)[1:-1])
            boundaries[array] = tuple(axes)
        return boundaries

    def shard(self, array: _Array, rank: int) -> Shard:
        """Return the box of an array in a process."""
        tensor = rank % self.tensor
        sharded = rank // self.tensor % self.sharded
        replica = rank // (self.tensor * self.sharded)
        start, stop = [0] * len(array.shape), list(array.shape)
        if array.parallel == _ROWS:
            start[0], stop[0] = _bounds(0, array.shape[0], self.tensor)[tensor : tensor + 2]
        elif array.parallel == _COLUMNS:
            start[1], stop[1] = _bounds(0, array.shape[1], self.tensor)[tensor : tensor + 2]
        start[0], stop[0] = _bounds(start[0], stop[0], self.sharded)[sharded : sharded + 2]
        box = Box(tuple(start), tuple(stop))
        if array.parallel == _WHOLE:
            return Shard(box, replica * self.tensor + tensor, self.replicas * self.tensor)
        return Shard(box, replica, self.replicas)

    def shards(self, rank: int) -> dict[int, Sequence[Shard]]:
        """Return the shards in a process by leaf of the tree, as its handlers would."""
        known = {array: (self.shard(array, rank),) for array in self._boundaries}
        count = len(self.arrays)
        return {
            state * count + number: known[array]
            for state in range(len(_STATES))
            for number, array in enumerate(self.arrays)
        }

    def value(self, rank: int) -> dict[str, Any]:
        """Return the state of a process, without memory: all elements of an array share one address."""
        shards = {array: self.shard(array, rank) for array in self._boundaries}
        named = list(_arrays(self.layers))
        value: dict[str, Any] = {}
        for state, dtype_name in _STATES.items():
            dtype = dtype_from_name(dtype_name)
            value[state] = {}
            for name, array in named:
                shard = shards[array]
                elements = np.broadcast_to(np.zeros((1,) * len(array.shape), dtype), shard.box.shape)
                held = ckptcore.ArrayShard(shard.box, elements, shard.replica, shard.replicas)
                value[state][name] = ckptcore.ShardedArray(array.shape, dtype, (held,), cuts=self._boundaries[array])
        return value
