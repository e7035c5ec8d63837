"""Collectives of a jax.distributed job: bytes are sent by computations on one device per process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore.errors import PluginError, RankFailedError
from ckptcore.model import HostArray, Pending
from ckptcore_jax.job_service import service_of_job

__all__ = ["DeviceCollectives", "collectives_of_job"]

_LEAST_BYTES: Final = 1 << 12
"""Smallest message size.

Sizes are rounded up to powers of two, so that few computations are compiled.
"""


class DeviceCollectives:
    """Sends with the collectives of the devices: over the interconnect of accelerators, or gloo between CPUs.

    JAX requires that all processes begin computations over several processes in the same order.
    Therefore a program must not run such computations on another thread during a collective load.
    """

    name = "collectives of jax"

    def __init__(self, rank: int, size: int) -> None:
        """Compile nothing.

        Args:
            rank, size: rank of this process and number of processes, as passed to
                `jax.distributed.initialize`.
        """
        self._rank: Final = rank
        self._size: Final = size

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> _MeshChannels:
        """Connect the groups without waiting. See `ckptcore.protocols.Collectives`.

        `key` is not used, because computations are ordered.

        Raises:
            PluginError: if JAX numbers its processes differently from `jax.distributed.initialize`,
                or if a process has no device.
        """
        if jax.process_index() != self._rank:
            raise PluginError(
                f"jax.process_index() is {jax.process_index()}, but jax.distributed.initialize "
                f'got the process id {self._rank}. Use Context(job=JobOptions(reads="all")), '
                "or other collectives"
            )
        devices: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            devices.setdefault(device.process_index, device)
        missing = [rank for ranks in groups for rank in ranks if rank not in devices]
        if missing:
            raise PluginError(f"the processes {missing} have no device for computations over several processes")
        return _MeshChannels(self._rank, [tuple(ranks) for ranks in groups], devices)


@dataclass(frozen=True, slots=True)
class _Member:
    """A group with this process.

    Attributes:
        ranks: its members.
        shards: sharding of the payloads: one row on the device of each member.
        add: adds the rows, with the result on all devices.
    """

    ranks: tuple[int, ...]
    shards: NamedSharding
    add: Callable[[jax.Array], jax.Array]


class _MeshChannels:
    """Sends by adding zeros of all other members to the sender's data: every kind of device has this collective."""

    depth = 2

    def __init__(self, rank: int, groups: Sequence[tuple[int, ...]], devices: dict[int, jax.Device]) -> None:
        self._rank = rank
        self._device = devices[rank]
        self._members = [_member(ranks, [devices[other] for other in ranks]) for ranks in groups]
        self._zeros: dict[int, jax.Array] = {}

    def memory(self, nbytes: int) -> HostArray:
        """Allocate memory."""
        return np.empty(nbytes, np.uint8)

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send, on the devices."""
        member = self._members[group]
        padded = max(_LEAST_BYTES, 1 << (data.nbytes - 1).bit_length()) if data.nbytes else _LEAST_BYTES
        with _named_rank_errors(member.ranks):
            row = self._given(data, padded) if sender == self._rank else self._nothing(padded)
            shape = (len(member.ranks), padded // 4)
            rows = jax.make_array_from_single_device_arrays(shape, member.shards, [row])
            return _Sum(member.ranks, member.add(rows), None if sender == self._rank else data)

    def _given(self, data: HostArray, padded: int) -> jax.Array:
        """Copy this process's data to its device, as a row."""
        row = np.zeros((1, padded), np.uint8)
        row[0, : data.nbytes] = data
        row_on_device: jax.Array = jax.device_put(row.view(np.uint32), self._device)
        return row_on_device

    def _nothing(self, padded: int) -> jax.Array:
        """Return a row of zeros on this process's device.

        Cached, because most messages have the same size.
        """
        found = self._zeros.get(padded)
        if found is None:
            found = self._zeros[padded] = jax.device_put(np.zeros((1, padded // 4), np.uint32), self._device)
        return found

    def close(self) -> None:
        """Free device memory."""
        self._zeros.clear()


@dataclass(frozen=True, slots=True)
class _Sum:
    """A running message.

    Attributes:
        ranks: members of the group.
        words: the padded message.
        data: its destination; None at the sender.
    """

    ranks: tuple[int, ...]
    words: jax.Array
    data: HostArray | None

    def result(self) -> None:
        """Wait for it."""
        with _named_rank_errors(self.ranks):
            if self.data is None:
                self.words.block_until_ready()
            else:
                self.data[:] = np.asarray(self.words.addressable_data(0)).view(np.uint8)[: self.data.nbytes]


def _member(ranks: tuple[int, ...], devices: Sequence[jax.Device]) -> _Member:
    mesh = Mesh(np.array(devices), ("process",))
    spec: Any = PartitionSpec  # the constructor is untyped in JAX
    return _Member(ranks, NamedSharding(mesh, spec("process")), _adder(mesh))


@functools.lru_cache(maxsize=64)
def _adder(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return a function that adds the rows on a mesh.

    Cached, so that each size is compiled once for all loads.
    """
    spec: Any = PartitionSpec  # the constructor is untyped in JAX
    add: Any = jax.jit(lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype), out_shardings=NamedSharding(mesh, spec()))
    made: Callable[[jax.Array], jax.Array] = add
    return made


@contextmanager
def _named_rank_errors(ranks: Sequence[int]) -> Iterator[None]:
    """Convert an error of a computation to one that names the ranks."""
    try:
        yield
    except RuntimeError as error:  # includes jax.errors.JaxRuntimeError
        raise RankFailedError(
            f"sending between the processes {list(ranks)} failed: {error}; one of them failed, "
            "or their devices cannot compute together (CPUs need "
            "jax_cpu_collectives_implementation=gloo): check their logs, and restart the job"
        ) from error


def collectives_of_job() -> DeviceCollectives | None:
    """Return the collectives of the initialized JAX job, or None without one or for one process.

    Raises:
        PluginError: if this version of JAX is not supported.
    """
    service = service_of_job()
    return None if service is None or service.size == 1 else DeviceCollectives(service.rank, service.size)
