"""verl: a checkpoint engine that publishes versions of weights, and whose rollout workers follow them.

verl finds it by its configuration::

    checkpoint_engine:
      backend: ckptcore
      custom_backend_module: ckptcore_integrations.verl
      engine_kwargs:
        ckptcore: {location: "s3://bucket/weights", cache: /local/weights}
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

import numpy as np
import torch
from ckptcore_versions import Follower, Publisher, Version, follow
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CoordinationTimeoutError, DirectoryInUseError
from ckptcore.policies import LatestN
from ckptcore_integrations.engine_server import seconds_of
from ckptcore_integrations.stored_weights import tensor_over, torch_dtype

__all__ = ["VersionCheckpointEngine"]

_ALONE: Final = Context(job=JobOptions(coordinator=SingleProcess()))
"""Options of a process that publishes or follows alone, though it belongs to a job of several processes."""

_POLL_SECONDS: Final = 0.2
"""Seconds between listings. The servers are paused meanwhile."""


class VersionCheckpointEngine(CheckpointEngineWithCache):
    """Transfers weights through a directory of versions.

    The first worker of the actor publishes what changed. It needs host memory for two copies of the weights. Each
    rollout worker follows with a cache of its own on its host, and passes the weights on from there.

    The number of a version is that of the version before plus one, so that it also increases if a run resumes at an
    earlier step. The label ``step`` is verl's global step.
    """

    def __init__(
        self,
        bucket_size: int,
        location: str,
        cache: str,
        is_master: bool = False,
        keep: int | None = 4,
        full_every: int = 50,
        only_changed: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        """Describe the transfer. Opens nothing.

        Args:
            bucket_size: not used: arrays are passed on one at a time.
            location: a path or URL of the directory of versions.
            cache: a local directory for the caches of the workers of a host, one in each.
            is_master: True for the worker that publishes. verl sets it for the first worker of the actor.
            keep: the number of versions to keep, besides those that they need; None: all.
            full_every: see `ckptcore_versions.Publisher`.
            only_changed: True to pass on only arrays that changed since the version before, if that was passed on as a
                whole. Only for servers that keep their weights between updates.
            timeout: the maximum time until a version is received, in seconds.
        """
        self._location = location
        self._cache = cache
        self._is_master = is_master
        self._keep = None if keep is None else LatestN(keep)
        self._full_every = full_every
        self._only_changed = only_changed
        self._timeout = seconds_of("timeout", timeout)
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None
        self._number = 0
        self._version: Version | None = None
        self._passed_on: Version | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the number of the version that will be sent: on the master only."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = Publisher(self._location, keep=self._keep, full_every=self._full_every, context=_ALONE)
        latest = self._publisher.latest
        return {"number": 1 if latest is None else latest + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the number of the version for every worker.

        Raises:
            ValueError: the first worker is not the master.
        """
        number = metadata[0].get("number") if metadata else None
        if number is None:
            raise ValueError("the first worker of the actor is not the master, so that no version can be published")
        return {"number": [number] * actor_wg_world_size}, {"number": [number] * rollout_world_size}

    def init_process_group(self, number: int) -> None:
        """Set the number of the version that is sent and received next."""
        self._number = number

    def finalize(self) -> None:
        """Do nothing: the directory and the cache are kept for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights as a version, on the master. Other workers only take part in gathering them.

        Returns:
            Metrics for verl: none.

        Raises:
            The errors of `ckptcore_versions.Publisher.publish`.
        """
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        assert self._publisher is not None  # verl calls `prepare` first
        # A copy also of tensors in host memory, because verl may use their memory for the next one.
        arrays = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        await asyncio.to_thread(self._publisher.publish, self._number, arrays, step=global_steps)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait until this worker has the version that is being sent, verified, and yield its arrays.

        Raises:
            CoordinationTimeoutError: it did not come in time.
            The errors of `ckptcore_versions.Follower.next_version`.
        """
        version, before = await asyncio.to_thread(self._receive)
        is_next = before is not None and before is self._passed_on
        self._passed_on = None
        for name in list(version.changed if self._only_changed and is_next else version.arrays):
            yield name, _tensor(version, name)
        self._passed_on = version

    async def get_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the arrays of the version that was received last, or of the newest one, from the local cache.

        For a server that restarted.

        Raises:
            CoordinationTimeoutError: there is no version.
        """
        version = self._version or (await asyncio.to_thread(self._receive))[0]
        for name in list(version.arrays):
            yield name, _tensor(version, name)

    def close(self) -> None:
        """Release the directory and the cache, as the end of the process does. verl has no such method."""
        if self._publisher is not None:
            self._publisher.close()
        if self._follower is not None:
            self._follower.close()
        self._publisher = self._follower = self._version = self._passed_on = None

    def _receive(self) -> tuple[Version, Version | None]:
        """Return the version with the expected number, or a newer one, and the one that was yielded before it."""
        if self._follower is None:
            self._follower = _in_free_cache(self._location, self._cache)
        while True:
            version, before = self._follower.next_version(self._timeout), self._version
            if version is None:
                raise CoordinationTimeoutError(
                    f"version {self._number} did not appear in {self._location} within {self._timeout:g} s: check that "
                    "the actor could publish it, and that all workers see the same location"
                )
            self._version = version
            if version.number >= self._number:
                return version, before


CheckpointEngineRegistry.register("ckptcore")(VersionCheckpointEngine)


def _in_free_cache(location: str, cache: str) -> Follower:
    """Follow with the first cache that no other process of this host uses. A restarted worker finds its versions."""
    for number in itertools.count():
        try:
            return follow(location, cache=os.path.join(cache, str(number)), poll_seconds=_POLL_SECONDS, context=_ALONE)
        except DirectoryInUseError:
            continue
    raise AssertionError  # `count` does not end


def _tensor(version: Version, name: str) -> torch.Tensor:
    """Return an array of a version, on the accelerator if there is one, as verl's other engines do."""
    array = version.arrays[name]
    assert isinstance(array, np.ndarray)  # whole arrays are followed
    # A copy, because PyTorch has no tensors that cannot be written.
    tensor = tensor_over(np.array(array), torch_dtype(name, array.dtype.name))
    return tensor.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else tensor
