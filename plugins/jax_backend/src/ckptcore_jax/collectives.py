"""Collectives of a jax.distributed job. They send bytes with computations on one device per process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore.errors import PluginError, RankFailedError, converts_errors
from ckptcore.model import HostArray, Pending
from ckptcore_jax.key_value_coordinator import service_of_job

_LEAST_BYTES: Final = 1 << 12
"""Smallest message size in bytes. Sizes are rounded up to powers of two, so that few computations are compiled."""


class DeviceCollectives:
    """Sends bytes over the interconnect of the accelerators, or with gloo between CPUs.

    JAX requires that all processes start computations over several processes in the same order.
    Therefore a program must not start such computations on another thread during a collective load.

    Attributes:
        rank: rank of this process.
        size: number of processes.
    """

    name = "collectives of jax"

    def __init__(self, rank: int, size: int) -> None:
        """Create the collectives. Compiles nothing.

        Args:
            rank, size: rank of this process and number of processes, as passed to
                `jax.distributed.initialize`.
        """
        self.rank: Final = rank
        self.size: Final = size

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> _MeshChannels:
        """Prepare the groups without communication. See `ckptcore.protocols.Collectives`.

        `key` is not used, because all processes start computations in the same order.

        Raises:
            PluginError: if JAX numbers its processes differently from `jax.distributed.initialize`,
                or if a process has no device.
        """
        if jax.process_index() != self.rank:
            raise PluginError(
                f"jax.process_index() is {jax.process_index()}, but the process_id passed to "
                f"jax.distributed.initialize is {self.rank}; use "
                'Context(job=JobOptions(reads="all")), or other collectives'
            )
        devices: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            devices.setdefault(device.process_index, device)
        missing = [rank for ranks in groups for rank in ranks if rank not in devices]
        if missing:
            raise PluginError(
                f"the processes {missing} have no JAX device; use "
                'Context(job=JobOptions(reads="all")), or other collectives'
            )
        return _MeshChannels(self.rank, [tuple(ranks) for ranks in groups], devices)


@dataclass(frozen=True, slots=True)
class _DeviceGroup:
    """A group that contains this process.

    Attributes:
        ranks: members of the group.
        shards: sharding of the rows: one row on the device of each member.
        add: adds the rows, and puts the sum on all devices.
    """

    ranks: tuple[int, ...]
    shards: NamedSharding
    add: Callable[[jax.Array], jax.Array]


class _MeshChannels:
    """Channels that broadcast with a sum: the sender adds its data, and all other members add zeros.

    Every kind of device supports such a sum.
    """

    depth = 2

    def __init__(self, rank: int, groups: Sequence[tuple[int, ...]], devices: dict[int, jax.Device]) -> None:
        self._rank = rank
        self._device = devices[rank]
        self._groups = [_device_group(ranks, [devices[other] for other in ranks]) for ranks in groups]
        self._zeros: dict[int, jax.Array] = {}

    def memory(self, nbytes: int) -> HostArray:
        """Allocate memory."""
        return np.empty(nbytes, np.uint8)

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Start the broadcast on the devices."""
        joined = self._groups[group]
        padded = max(_LEAST_BYTES, 1 << (data.nbytes - 1).bit_length()) if data.nbytes else _LEAST_BYTES
        with _named_rank_errors(joined.ranks):
            row = self._data_row(data, padded) if sender == self._rank else self._zero_row(padded)
            shape = (len(joined.ranks), padded // 4)
            rows = jax.make_array_from_single_device_arrays(shape, joined.shards, [row])
            return _RunningBroadcast(joined.ranks, joined.add(rows), None if sender == self._rank else data)

    def _data_row(self, data: HostArray, padded: int) -> jax.Array:
        """Copy this process's data to its device as a row."""
        row = np.zeros((1, padded), np.uint8)
        row[0, : data.nbytes] = data
        row_on_device: jax.Array = jax.device_put(row.view(np.uint32), self._device)
        return row_on_device

    def _zero_row(self, padded: int) -> jax.Array:
        """Return a row of zeros on this process's device. Cached, because most messages have the same size."""
        row = self._zeros.get(padded)
        if row is None:
            row = self._zeros[padded] = jax.device_put(np.zeros((1, padded // 4), np.uint32), self._device)
        return row

    def close(self) -> None:
        """Free device memory."""
        self._zeros.clear()


@dataclass(frozen=True, slots=True)
class _RunningBroadcast:
    """A running broadcast.

    Attributes:
        ranks: members of the group.
        words: the sum, which is the padded message.
        data: destination of the message; None on the sender.
    """

    ranks: tuple[int, ...]
    words: jax.Array
    data: HostArray | None

    def result(self) -> None:
        """Wait for the message, and copy it to the destination."""
        with _named_rank_errors(self.ranks):
            if self.data is None:
                self.words.block_until_ready()
            else:
                self.data[:] = np.asarray(self.words.addressable_data(0)).view(np.uint8)[: self.data.nbytes]


def _device_group(ranks: tuple[int, ...], devices: Sequence[jax.Device]) -> _DeviceGroup:
    mesh = Mesh(np.array(devices), ("process",))
    spec: Any = PartitionSpec  # the constructor is untyped in JAX
    return _DeviceGroup(ranks, NamedSharding(mesh, spec("process")), _row_adder(mesh))


@functools.lru_cache(maxsize=64)
def _row_adder(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return a function that adds the rows on a mesh. Cached, so that each size is compiled once for all loads."""
    spec: Any = PartitionSpec  # the constructor is untyped in JAX
    add: Any = jax.jit(lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype), out_shardings=NamedSharding(mesh, spec()))
    typed: Callable[[jax.Array], jax.Array] = add
    return typed


@converts_errors
def _named_rank_errors(ranks: Sequence[int]) -> Iterator[None]:
    """Convert an error of a computation to a RankFailedError that names the processes."""
    try:
        yield
    except RuntimeError as error:  # includes jax.errors.JaxRuntimeError
        raise RankFailedError(
            f"sending between the processes {list(ranks)} failed: {error}; one of them failed, "
            "or their devices cannot compute together (CPUs need "
            "jax_cpu_collectives_implementation=gloo): check their logs, and restart the job"
        ) from error


def collectives_of_job() -> DeviceCollectives | None:
    """Return the collectives of the initialized JAX job, or None without a job or for one process.

    Raises:
        PluginError: if this version of JAX is not supported.
    """
    service = service_of_job()
    return None if service is None or service.size == 1 else DeviceCollectives(service.rank, service.size)
