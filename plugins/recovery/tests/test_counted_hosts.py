"""Messages and bytes of each host grow at most logarithmically with the number of hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ckptcore_recovery.peers.joining import MemoryOptions

from ckptcore import Checkpointer, Context, ShardedArray
from ckptcore.policies import LatestN
from plugins.recovery.tests.counted_hosts import CountedHosts

_SIZES = (2, 4, 8, 16)
_COLUMNS = 1 << 18
_OPTIONS = MemoryOptions(1 << 30)


def state(rank: int, size: int, step: int) -> dict[str, object]:
    """Return the state of a process: a row of an array that grows with the job, and the step."""
    cuts = [list(range(1, size)), []]
    row = np.full((1, _COLUMNS), step, np.float32)
    return {"w": ShardedArray.part(row, (rank, 0), (size, _COLUMNS), cuts=cuts), "step": step}


def train(rank: int, context: Context, *, size: int, steps: Iterable[int]) -> None:
    """Save steps. Two are kept."""
    with Checkpointer("counted://run", context=context, preservation_policy=LatestN(2)) as run:
        for step in steps:
            run.save(step, state(rank, size, step))
            run.wait()


def load(rank: int, context: Context, *, size: int, step: int) -> None:
    """Load the newest step, and check it."""
    with Checkpointer("counted://run", context=context) as run:
        loaded = run.load_into(state(rank, size, 0))
        assert loaded["step"] == step
        (shard,) = loaded["w"].shards
        assert shard.elements is not None
        np.testing.assert_array_equal(shard.elements, step)


def nothing(rank: int, context: Context) -> None:
    """Join the memory of the job, and end."""


def expect_logarithmic(what: str, counts: Mapping[int, int]) -> None:
    """Check that a count grows no faster than the logarithm of the number of hosts."""
    first, smallest = next(iter(counts.items()))
    for size, count in counts.items():
        assert count <= smallest * (1 + math.log2(size)) / (1 + math.log2(first)), (what, counts)


@pytest.fixture
def make_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], CountedHosts]:
    """Return a function that makes hosts."""
    return lambda size: CountedHosts(tmp_path / str(size), monkeypatch)


def test_messages_and_bytes_of_a_host_grow_at_most_logarithmically(
    make_hosts: Callable[[int], CountedHosts],
) -> None:
    saving, starting = dict[int, tuple[int, int]](), dict[int, tuple[int, int]]()
    for size in _SIZES:
        hosts = make_hosts(size)
        names = [f"host-{number}" for number in range(size)]
        hosts.run(names, nothing, _OPTIONS)
        hosts.most()
        hosts.run(names, partial(train, size=size, steps=range(1, 6)), _OPTIONS)
        saving[size] = hosts.most()
        del hosts.servers["host-1"]
        names[1] = "spare"
        hosts.run(names, nothing, _OPTIONS)
        starting[size] = hosts.most()
        hosts.run(names, partial(load, size=size, step=5), _OPTIONS)
    for what, most in (("saving", saving), ("starting", starting)):
        expect_logarithmic(f"messages of {what}", {size: messages for size, (messages, _) in most.items()})
        expect_logarithmic(f"bytes of {what}", {size: nbytes for size, (_, nbytes) in most.items()})
