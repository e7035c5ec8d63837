"""Executor of a JAX single controller: workers are the hosts of devices, called with colocated Python."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ckptcore.errors import PluginError, RankFailedError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, Box, Pending, Shard, name_of_dtype
from ckptcore.protocols import WantedLeaf
from ckptcore_jax import random_keys
from ckptcore_jax.array_creation import cast_elements, check_dtype, with_weak_type
from ckptcore_jax.leaves import alive, is_committed, plain
from ckptcore_jax.placements import box_of
from ckptcore_jax.shardings import concrete
from ckptcore_jax.staged_executor import Fetched, Held, LeafBoxes, StagedExecutor
from ckptcore_jax.worker_links import Cuts, ReadSpecs, WorkerLink
from ckptcore_jax.worker_stages import ReadStage, WriteStage

__all__ = ["ColocatedExecutor", "devices_by_host"]

T = TypeVar("T")

_CACHED: Final = 1 << 14
"""Cache size for placements of a sharding and a shape. A model has far fewer."""


@dataclass(frozen=True, slots=True)
class _Spread:
    """Placement of an array on workers.

    Attributes:
        boxes: by worker, its boxes, each with the position of its first device among all devices.
        holders: by box, the workers that hold it.
        devices: all devices in order, each with its box and its worker.
    """

    boxes: Sequence[Mapping[Box, int]]
    holders: Mapping[Box, Sequence[int]]
    devices: Sequence[tuple[Any, Box, int]]


class _HeldArrays:
    """Arrays in the memory of a worker's host, and their boxes to write."""

    def __init__(self, link: WorkerLink, arrays: Sequence[jax.Array], cuts: Cuts) -> None:
        self.arrays = arrays
        self.cuts = cuts
        self._link = link

    def wait(self) -> None:
        """Wait for the copies. See `Held`."""
        try:
            for array in self.arrays:
                array.block_until_ready()
        except Exception as error:
            raise RankFailedError(
                f"the worker {self._link.name} failed or could not copy its arrays: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Drop the arrays. See `Held`."""
        self.arrays = ()


class ColocatedExecutor(StagedExecutor):
    """A `ckptcore.protocols.Executor` for `jax.Array`.

    A worker is a host, which `jax.experimental.colocated_python` calls.

    Arrays are copied to the CPU device of their host, and loaded from there. Elements do not pass
    through the controller, except scalars that JAX itself moves. Workers need the same installation
    as the controller.

    Arrays that are not committed to devices are saved by the workers but loaded by the controller,
    because JAX creates such arrays only there.
    """

    def __init__(self, workers: Sequence[Sequence[jax.Device]] | None = None) -> None:
        """Connect to the workers without sending anything.

        Args:
            workers: devices of each worker; None for all devices, grouped by host.

        Raises:
            PluginError: if colocated Python is unavailable, or if a device has two workers.
        """
        found = devices_by_host(jax.devices()) if workers is None else workers
        self._worker_of = {device: number for number, devices in enumerate(found) for device in devices}
        if len(self._worker_of) != sum(map(len, found)) or not all(found):
            raise PluginError("each worker needs its own devices: a device has two workers, or a worker has none")
        leads = _cpu_devices([devices[0] for devices in found])
        self._links = tuple(
            [
                WorkerLink(f"{number} ({len(devices)} devices from {devices[0]})", lead)
                for number, (devices, lead) in enumerate(zip(found, leads, strict=True))
            ]
        )
        self._spread = functools.lru_cache(maxsize=_CACHED)(self._find_spread)

    @property
    def workers(self) -> Sequence[str]:
        """Names of the workers."""
        return [link.name for link in self._links]

    def takes(self, leaf: Any) -> bool:
        """Return True for arrays on devices of the workers."""
        return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and self._has(leaf.sharding)

    def makes(self, abstract: Any) -> bool:
        """Return True for abstract arrays that the workers can load."""
        if not isinstance(abstract, jax.Array | jax.ShapeDtypeStruct) or isinstance(abstract, jax.core.Tracer):
            return False
        sharding = concrete(abstract.sharding)
        if sharding is None or not is_committed(abstract) or not self._has(sharding):
            return False
        return not random_keys.is_key(abstract.dtype) or random_keys.data_sharding(sharding) is not None

    def _has(self, sharding: Sharding) -> bool:
        # An array over several processes has parts that this controller cannot access.
        return sharding.is_fully_addressable and all(device in self._worker_of for device in sharding.device_set)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return an id of the array object, because only the workers know the memory."""
        return ("jax", id(leaf)) if isinstance(leaf, jax.Array) else None

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """Return the boxes of a worker."""
        whole = plain(alive(leaf))
        spread = self._spread(whole.sharding, whole.shape)
        return [Shard(box, spread.holders[box].index(worker), len(spread.holders[box])) for box in spread.boxes[worker]]

    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> Held:
        """Hold the boxes of a worker in the memory of its host."""
        parts: list[jax.Array] = []
        cuts = []
        for one in leaves:
            whole = plain(alive(one.leaf))
            held = self._spread(whole.sharding, whole.shape).boxes[worker]
            numbers: dict[int, int] = {}
            of_leaf = []
            for box in one.boxes:
                outer, place = next((outer, place) for outer, place in held.items() if outer.contains(box))
                if place not in numbers:
                    numbers[place] = len(parts)
                    parts.append(whole.addressable_data(place))  # a reference: nothing is copied
                of_leaf.append((numbers[place], box.within(outer)))
            cuts.append(of_leaf)
        link = self._links[worker]
        return _HeldArrays(link, link.take(parts, may_alias=not copied), cuts)

    def run_write(self, worker: int, stage: WriteStage, held: Held) -> Pending[bytes]:
        """Run the stage on the worker."""
        assert isinstance(held, _HeldArrays)  # returned by this executor
        return _begin(functools.partial(self._links[worker].write, stage, held.arrays, held.cuts))

    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """Return the boxes that a worker must read."""
        random_keys.check(abstract.dtype, stored)
        if not random_keys.is_key(abstract.dtype):
            check_dtype(abstract.dtype)
            cast_elements(np.empty(0, stored.spec.numpy_dtype), abstract.dtype)  # raises an error for impossible casts
        return tuple(self._spread(_plain_sharding(abstract), stored.spec.shape).boxes[worker])

    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> Fetched:
        """Run the stages on the workers, and assemble the leaves."""
        begun = {}
        for worker, stage in stages.items():
            specs: ReadSpecs = [
                ([box.shape for box in self.wanted(leaf.abstract, leaf.stored, worker)], _dtype_name(leaf.abstract))
                for leaf in leaves
            ]
            begun[worker] = _begin(functools.partial(self._links[worker].read, stage, specs))
        reports, read = {}, {}
        failed: list[Exception] = []
        for worker, pending in begun.items():
            try:
                reports[worker], arrays = pending.result()
                read[worker] = iter(arrays)
            except RankFailedError as error:
                failed.append(error)  # wait for the other workers first
        if failed:
            raise failed[0]
        made = []
        for leaf in leaves:
            parts = {
                (worker, box): next(arrays)
                for worker, arrays in read.items()
                for box in self.wanted(leaf.abstract, leaf.stored, worker)
            }
            made.append(self._made(leaf, parts))
        return Fetched(reports, made)

    def _made(self, leaf: WantedLeaf, parts: Mapping[tuple[int, Box], jax.Array]) -> jax.Array:
        """Assemble a leaf from boxes in the memory of the hosts, which are copied to the devices of their host."""
        sharding, shape = _plain_sharding(leaf.abstract), leaf.stored.spec.shape
        spread = self._spread(sharding, shape)
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device, _, _ in spread.devices]
        on_devices = jax.device_put([parts[worker, box] for _, box, worker in spread.devices], places)
        array = jax.make_array_from_single_device_arrays(shape, sharding, on_devices)
        if random_keys.is_key(leaf.abstract.dtype):
            return random_keys.wrapped(leaf.abstract.dtype, array)
        weak = getattr(leaf.abstract, "weak_type", False)
        return with_weak_type(array, sharding) if weak else array

    def _find_spread(self, sharding: Sharding, shape: tuple[int, ...]) -> _Spread:
        boxes: list[dict[Box, int]] = [{} for _ in self._links]
        holders: dict[Box, list[int]] = {}
        devices = []
        for place, (device, index) in enumerate(sharding.devices_indices_map(shape).items()):
            box, worker = box_of(index, shape), self._worker_of[device]
            # Devices are in the order of `jax.Array.addressable_data`, because a single controller
            # addresses all.
            boxes[worker].setdefault(box, place)
            found = holders.setdefault(box, [])
            if worker not in found:
                found.append(worker)
            devices.append((device, box, worker))
        return _Spread(boxes, holders, devices)


def _plain_sharding(abstract: Any) -> Sharding:
    """Return the sharding of the array with a leaf's elements."""
    sharding = concrete(abstract.sharding)
    of_data = random_keys.data_sharding(sharding) if random_keys.is_key(abstract.dtype) else sharding
    if of_data is None:
        raise UnsupportedLeafError(f"random keys with {abstract.sharding} cannot be loaded by workers")
    return of_data


def _dtype_name(abstract: Any) -> str:
    return "uint32" if random_keys.is_key(abstract.dtype) else name_of_dtype(abstract.dtype)


def _cpu_devices(devices: Sequence[Any]) -> Sequence[Any]:
    """Return the CPU device on the host of each device.

    Without other information JAX pairs devices by their order, so the request is for all devices.
    """
    if all(device.platform == "cpu" for device in devices):
        return devices
    from jax.experimental import colocated_python

    everything = tuple(jax.devices())
    cpu_devices = dict(zip(everything, colocated_python.colocated_cpu_devices(everything), strict=True))
    return [cpu_devices[device] for device in devices]


def _begin(work: Callable[[], T]) -> Future[T]:
    """Run work on a new thread, because a call to a worker can block until it returns."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised to the caller of result()
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="ckptcore-worker-call", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down, and cannot start threads
        run()
    return future


def devices_by_host(devices: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Group devices by host, in the order of the first device of each host.

    A host is a task of a slice. Pathways has the task as ``virtual_task_index``, because all
    devices are of one process for its controller. Elsewhere a host is a process.
    """
    hosts: dict[tuple[object, object], list[Any]] = {}
    for device in devices:
        task = getattr(device, "virtual_task_index", None)
        host = getattr(device, "slice_index", None), device.process_index if task is None else task
        hosts.setdefault(host, []).append(device)
    return tuple([tuple(found) for found in hosts.values()])
