"""The collectives of a jax.distributed job: bytes cross in computations over one device of each process."""

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
"""Computations are compiled for sizes that are powers of two from here on, so that there are few of them."""


class DeviceCollectives:
    """Sends over the collectives of the devices: over the interconnect of accelerators, or gloo between CPUs.

    Computations over several processes must be begun in the same order on all of them, as JAX says: a program that computes over
    several processes on one thread does not load so on another one meanwhile.
    """

    name = "collectives of jax"

    def __init__(self, rank: int, size: int) -> None:
        """Compile nothing yet.

        Args:
            rank, size: which process of how many this is, as `jax.distributed.initialize` was told.
        """
        self._rank: Final = rank
        self._size: Final = size

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> _MeshChannels:
        """See `ckptcore.protocols.Collectives`; waits for nobody before it first sends. `key` is not needed: computations have an order.

        Raises:
            PluginError: if JAX numbers its processes otherwise than `jax.distributed.initialize` was told, or one has no device.
        """
        if jax.process_index() != self._rank:
            raise PluginError(
                f"jax.process_index() is {jax.process_index()} in the process that jax.distributed.initialize was told is {self._rank}: "
                'expected the same. Give Context(job=JobOptions(reads="all")), or collectives of your own'
            )
        devices: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            devices.setdefault(device.process_index, device)
        missing = [rank for ranks in groups for rank in ranks if rank not in devices]
        if missing:
            raise PluginError(
                f"the processes {missing} have no device that computations over several processes can use"
            )
        return _MeshChannels(self._rank, [tuple(ranks) for ranks in groups], devices)


@dataclass(frozen=True, slots=True)
class _Member:
    """A group that this process is in.

    Attributes:
        ranks: its members.
        shards: how what each gives is placed: a row on the device of each.
        add: adds rows; the result is on all devices.
    """

    ranks: tuple[int, ...]
    shards: NamedSharding
    add: Callable[[jax.Array], jax.Array]


class _MeshChannels:
    """Sends by adding what the sender has to zeros of the others: the one collective that every kind of device has."""

    depth = 2

    def __init__(self, rank: int, groups: Sequence[tuple[int, ...]], devices: dict[int, jax.Device]) -> None:
        self._rank = rank
        self._device = devices[rank]
        self._members = [_member(ranks, [devices[other] for other in ranks]) for ranks in groups]
        self._zeros: dict[int, jax.Array] = {}

    def memory(self, nbytes: int) -> HostArray:
        """Any memory."""
        return np.empty(nbytes, np.uint8)

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send; the devices do it."""
        member = self._members[group]
        padded = max(_LEAST_BYTES, 1 << (data.nbytes - 1).bit_length()) if data.nbytes else _LEAST_BYTES
        with _naming_peers(member.ranks):
            row = self._given(data, padded) if sender == self._rank else self._nothing(padded)
            shape = (len(member.ranks), padded // 4)
            rows = jax.make_array_from_single_device_arrays(shape, member.shards, [row])
            return _Sum(member.ranks, member.add(rows), None if sender == self._rank else data)

    def _given(self, data: HostArray, padded: int) -> jax.Array:
        """What this process sends, as a row on its device."""
        row = np.zeros((1, padded), np.uint8)
        row[0, : data.nbytes] = data
        placed: jax.Array = jax.device_put(row.view(np.uint32), self._device)
        return placed

    def _nothing(self, padded: int) -> jax.Array:
        """A row of zeros on the device of this process; kept, as most messages are of one size."""
        found = self._zeros.get(padded)
        if found is None:
            found = self._zeros[padded] = jax.device_put(np.zeros((1, padded // 4), np.uint32), self._device)
        return found

    def close(self) -> None:
        """Let device memory go."""
        self._zeros.clear()


@dataclass(frozen=True, slots=True)
class _Sum:
    """A message under way.

    Attributes:
        ranks: among whom.
        words: what is sent, padded.
        data: where it goes; None at the sender.
    """

    ranks: tuple[int, ...]
    words: jax.Array
    data: HostArray | None

    def result(self) -> None:
        """Wait for it."""
        with _naming_peers(self.ranks):
            if self.data is None:
                self.words.block_until_ready()
            else:
                self.data[:] = np.asarray(self.words.addressable_data(0)).view(np.uint8)[: self.data.nbytes]


def _member(ranks: tuple[int, ...], devices: Sequence[jax.Device]) -> _Member:
    mesh = Mesh(np.array(devices), ("process",))
    spec: Any = PartitionSpec  # JAX says no types here
    return _Member(ranks, NamedSharding(mesh, spec("process")), _adder(mesh))


@functools.lru_cache(maxsize=64)
def _adder(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Adds the rows of the devices of a mesh; kept, so that each size is compiled once for all loads."""
    spec: Any = PartitionSpec  # JAX says no types here
    add: Any = jax.jit(lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype), out_shardings=NamedSharding(mesh, spec()))
    made: Callable[[jax.Array], jax.Array] = add
    return made


@contextmanager
def _naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    """Let an error of a computation say which processes to look at."""
    try:
        yield
    except RuntimeError as error:  # also jax.errors.JaxRuntimeError
        raise RankFailedError(
            f"sending between the processes {list(ranks)} failed: {error}; one of them is gone, or their devices cannot compute "
            "together (between CPUs they do with jax_cpu_collectives_implementation=gloo): look at what they were doing, and start the "
            "job again"
        ) from error


def collectives_of_job() -> DeviceCollectives | None:
    """Those of the job for which `jax.distributed.initialize` was called; None where it was not, or for one process.

    Raises:
        PluginError: this version of JAX keeps its service where this does not look.
    """
    service = service_of_job()
    return None if service is None or service.size == 1 else DeviceCollectives(service.rank, service.size)
