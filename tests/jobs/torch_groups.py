"""Process groups of this process, which end without a deadlock in PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

_ended: Final[list[Any]] = []
"""The group that ended last."""


@contextmanager
def process_group(backend: str = "gloo", rank: int = 0, size: int = 1) -> Iterator[None]:
    """Run in a process group. With the backend "fake", the other processes do not exist.

    A reference to the group is kept until the next group is made, so that it outlives all models of a test. The C++
    part of DistributedDataParallel owns its group, too. If it is the last owner, PyTorch 2.13 keeps the lock of the
    interpreter while it waits for the threads of the group, and a thread may need that lock to release a tensor. The
    Python object of a group releases the lock first.
    """
    gc.collect()
    _ended.clear()
    store: Any = FakeStore() if backend == "fake" else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    try:
        yield
    finally:
        dist.destroy_process_group()
        _ended.append(group)
