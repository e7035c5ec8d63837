"""Executor of a JAX single controller: its workers are the hosts of the devices, called with colocated Python."""

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
from ckptcore_jax import random_keys
from ckptcore_jax.array_creation import cast_elements, check_dtype, with_weak_type
from ckptcore_jax.leaves import data_array, is_committed, with_elements
from ckptcore_jax.shardings import box_of, concrete_sharding
from ckptcore_jax.staged_executor import StagedExecutor
from ckptcore_jax.worker_links import Cuts, ReadSpecs, WorkerLink
from ckptcore_jax.worker_loads import StagedReadResult, WantedLeaf
from ckptcore_jax.worker_saves import HeldElements, LeafBoxes
from ckptcore_jax.worker_stages import ReadStage, WriteStage

T = TypeVar("T")

_CACHED: Final = 1 << 14
"""Cache size for placements. A model has far fewer pairs of sharding and shape."""


@dataclass(frozen=True, slots=True)
class _WorkerPlacement:
    """Placement of an array on workers.

    Attributes:
        boxes: for each worker, its boxes. The value of a box is the position of the worker's first device with this
            box, counted among all devices.
        workers: for each box, the workers that have it.
        devices: all devices in order, each with its box and its worker.
    """

    boxes: Sequence[Mapping[Box, int]]
    workers: Mapping[Box, Sequence[int]]
    devices: Sequence[tuple[Any, Box, int]]


class _HeldArrays:
    """Arrays in the memory of a worker's host, and their boxes to write."""

    def __init__(self, link: WorkerLink, arrays: Sequence[jax.Array], cuts: Cuts) -> None:
        self.arrays = arrays
        self.cuts = cuts
        self._link = link

    def wait(self) -> None:
        """Wait for the copies. See `HeldElements`."""
        try:
            for array in self.arrays:
                array.block_until_ready()
        except Exception as error:
            raise RankFailedError(
                f"the worker {self._link.name} failed or could not copy its arrays: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Drop the arrays. See `HeldElements`."""
        self.arrays = ()


class ColocatedExecutor(StagedExecutor):
    """A `ckptcore.protocols.Executor` for `jax.Array`. Its workers are hosts.

    Workers are called with `jax.experimental.colocated_python`. A save copies arrays to the CPU
    device of their host. A load copies them from this CPU device to the devices. Elements do not
    pass through the controller, except scalars that JAX itself moves. Workers need the same
    installation as the controller.

    The workers save arrays that are not committed to devices, but the controller loads them,
    because only the controller can create such arrays.
    """

    def __init__(self, workers: Sequence[Sequence[jax.Device]] | None = None) -> None:
        """Connect to the workers without sending anything.

        Args:
            workers: devices of each worker; None for all devices, grouped by host.

        Raises:
            PluginError: if colocated Python is unavailable, if a device has two workers, or if a
                worker has no device.
        """
        hosts = devices_by_host(jax.devices()) if workers is None else workers
        self._worker_of = {device: number for number, devices in enumerate(hosts) for device in devices}
        if len(self._worker_of) != sum(map(len, hosts)) or not all(hosts):
            raise PluginError("each worker needs its own devices: a device has two workers, or a worker has none")
        leads = _cpu_devices([devices[0] for devices in hosts])
        self._links = tuple(
            [
                WorkerLink(f"{number} ({len(devices)} devices from {devices[0]})", lead)
                for number, (devices, lead) in enumerate(zip(hosts, leads, strict=True))
            ]
        )
        self._placement = functools.lru_cache(maxsize=_CACHED)(self._find_placement)

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
        sharding = concrete_sharding(abstract.sharding)
        if sharding is None or not is_committed(abstract) or not self._has(sharding):
            return False
        return not random_keys.is_key(abstract.dtype) or random_keys.data_sharding(sharding) is not None

    def _has(self, sharding: Sharding) -> bool:
        # Exclude arrays over several processes: the controller cannot access all their shards.
        return sharding.is_fully_addressable and all(device in self._worker_of for device in sharding.device_set)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return an id of the array object, because only the workers know the addresses of its elements."""
        return ("jax", id(leaf)) if isinstance(leaf, jax.Array) else None

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """Return the boxes of a worker."""
        array = data_array(with_elements(leaf))
        placement = self._placement(array.sharding, array.shape)
        return [
            Shard(box, placement.workers[box].index(worker), len(placement.workers[box]))
            for box in placement.boxes[worker]
        ]

    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> HeldElements:
        """Begin to copy a worker's device arrays with the boxes to the memory of its host."""
        parts: list[jax.Array] = []
        cuts = []
        for leaf in leaves:
            array = data_array(with_elements(leaf.leaf))
            positions = self._placement(array.sharding, array.shape).boxes[worker]
            numbers: dict[int, int] = {}
            of_leaf = []
            for box in leaf.boxes:
                outer, position = next(
                    (outer, position) for outer, position in positions.items() if outer.contains(box)
                )
                if position not in numbers:
                    numbers[position] = len(parts)
                    parts.append(array.addressable_data(position))  # a reference, not a copy
                of_leaf.append((numbers[position], box.within(outer)))
            cuts.append(of_leaf)
        link = self._links[worker]
        return _HeldArrays(link, link.take(parts, may_alias=not copied), cuts)

    def run_write(self, worker: int, stage: WriteStage, held: HeldElements) -> Pending[bytes]:
        """Start the stage on the worker."""
        assert isinstance(held, _HeldArrays)  # returned by `take`
        return _start(functools.partial(self._links[worker].write, stage, held.arrays, held.cuts))

    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """Return the boxes that a worker must read."""
        random_keys.expect_same_impl(abstract.dtype, stored)
        if not random_keys.is_key(abstract.dtype):
            check_dtype(abstract.dtype)
            cast_elements(np.empty(0, stored.spec.numpy_dtype), abstract.dtype)  # raises an error for impossible casts
        return tuple(self._placement(_data_sharding(abstract), stored.spec.shape).boxes[worker])

    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> StagedReadResult:
        """Run the stages on the workers, and assemble the leaves."""
        running = {}
        for worker, stage in stages.items():
            specs: ReadSpecs = [
                ([box.shape for box in self.wanted(leaf.abstract, leaf.stored, worker)], _dtype_name(leaf.abstract))
                for leaf in leaves
            ]
            running[worker] = _start(functools.partial(self._links[worker].read, stage, specs))
        reports, read = {}, {}
        failed: list[Exception] = []
        for worker, pending in running.items():
            try:
                reports[worker], arrays = pending.result()
                read[worker] = iter(arrays)
            except RankFailedError as error:
                failed.append(error)  # wait for the other workers first
        if failed:
            raise failed[0]
        built = []
        for leaf in leaves:
            parts = {
                (worker, box): next(arrays)
                for worker, arrays in read.items()
                for box in self.wanted(leaf.abstract, leaf.stored, worker)
            }
            built.append(self._assemble(leaf, parts))
        return StagedReadResult(reports, built)

    def _assemble(self, leaf: WantedLeaf, parts: Mapping[tuple[int, Box], jax.Array]) -> jax.Array:
        """Copy boxes from the memory of the hosts to the devices of their host, and build the leaf."""
        sharding, shape = _data_sharding(leaf.abstract), leaf.stored.spec.shape
        devices = self._placement(sharding, shape).devices
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device, _, _ in devices]
        on_devices = jax.device_put([parts[worker, box] for _, box, worker in devices], targets)
        array = jax.make_array_from_single_device_arrays(shape, sharding, on_devices)
        if random_keys.is_key(leaf.abstract.dtype):
            return random_keys.wrap_data(leaf.abstract.dtype, array)
        weak = getattr(leaf.abstract, "weak_type", False)
        return with_weak_type(array, sharding) if weak else array

    def _find_placement(self, sharding: Sharding, shape: tuple[int, ...]) -> _WorkerPlacement:
        boxes: list[dict[Box, int]] = [{} for _ in self._links]
        workers: dict[Box, list[int]] = {}
        devices = []
        for position, (device, index) in enumerate(sharding.devices_indices_map(shape).items()):
            box, worker = box_of(index, shape), self._worker_of[device]
            # Devices are in the order of `jax.Array.addressable_data`, because a single controller
            # can address all devices.
            boxes[worker].setdefault(box, position)
            of_box = workers.setdefault(box, [])
            if worker not in of_box:
                of_box.append(worker)
            devices.append((device, box, worker))
        return _WorkerPlacement(boxes, workers, devices)


def _data_sharding(abstract: Any) -> Sharding:
    """Return the sharding of the array that contains a leaf's elements: the leaf itself, or the data of random keys."""
    sharding = concrete_sharding(abstract.sharding)
    of_data = random_keys.data_sharding(sharding) if random_keys.is_key(abstract.dtype) else sharding
    if of_data is None:
        raise UnsupportedLeafError(
            f"random keys with the sharding {abstract.sharding} cannot be loaded by workers; use a NamedSharding"
        )
    return of_data


def _dtype_name(abstract: Any) -> str:
    return "uint32" if random_keys.is_key(abstract.dtype) else name_of_dtype(abstract.dtype)


def _cpu_devices(devices: Sequence[Any]) -> Sequence[Any]:
    """Return the CPU device on the host of each device.

    JAX may match CPU devices by the order of the devices. Therefore this function requests the CPU
    devices of all devices at once.
    """
    if all(device.platform == "cpu" for device in devices):
        return devices
    from jax.experimental import colocated_python

    everything = tuple(jax.devices())
    cpu_devices = dict(zip(everything, colocated_python.colocated_cpu_devices(everything), strict=True))
    return [cpu_devices[device] for device in devices]


def _start(work: Callable[[], T]) -> Future[T]:
    """Run work on a new thread, because a call to a worker can block."""
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

    Each process is a host. With Pathways, the controller sees all devices in one process. A host is
    then a task of a slice, given by ``slice_index`` and ``virtual_task_index``.
    """
    hosts: dict[tuple[object, object], list[Any]] = {}
    for device in devices:
        task = getattr(device, "virtual_task_index", None)
        host = getattr(device, "slice_index", None), device.process_index if task is None else task
        hosts.setdefault(host, []).append(device)
    return tuple([tuple(on_host) for on_host in hosts.values()])
