"""A controller of JAX saves and loads through its workers.

Messages between them are small, and only workers access the elements of arrays.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax import ColocatedExecutor, JaxLeafHandler, pathways, worker_links
from ckptcore_jax.colocated import _HeldArrays, devices_by_host
from ckptcore_jax.worker_links import Cuts, ReadSpecs, WorkerLink
from ckptcore_jax.worker_loads import WantedLeaf
from ckptcore_jax.worker_saves import LeafBoxes
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptcore
from ckptcore import hookimpl
from ckptcore.errors import PluginError, RankFailedError, UnsupportedLeafError
from ckptcore.model import JSON, ArrayRecord, ArraySpec, Box
from ckptcore.protocols import Snapshot, WriteStore
from ckptcore.runtime import runtime_of

LAYOUTS = ("safetensors", "ocdbt", "zarr3", "dcp")

FEW = 1000
"""Number of elements that the controller may access: its own leaves, and uncommitted arrays."""

MAX_BYTES = 40_000
"""More than any message needs, and less than a sixth of one array."""


@pytest.fixture(scope="module")
def executor() -> ColocatedExecutor:
    """Return an executor with two workers, which share the devices of this process."""
    devices = jax.devices()
    return ColocatedExecutor([devices[:4], devices[4:]])


@pytest.fixture(scope="module")
def context(executor: ColocatedExecutor) -> ckptcore.Context:
    return ckptcore.Context(job=ckptcore.context.JobOptions(executor=executor), durability="none")


def grid() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def state() -> dict[str, Any]:
    """Return arrays with different placements on the workers."""
    mesh, second = grid(), Mesh(np.array(jax.devices()[4:]), ("c",))
    numbers = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    return {
        "split": jax.device_put(numbers, NamedSharding(mesh, P("a", "b"))),
        "rows": jax.device_put(numbers.astype(jnp.bfloat16), NamedSharding(mesh, P(("b", "a")))),
        "replicated": jax.device_put(numbers + 1, NamedSharding(mesh, P())),
        "second": jax.device_put(numbers + 2, NamedSharding(second, P("c"))),
        "one": jax.device_put(numbers + 3, SingleDeviceSharding(jax.devices()[5])),
        "offloaded": jax.device_put(numbers + 4, NamedSharding(mesh, P("a"), memory_kind="pinned_host")),
        "keys": jax.device_put(jax.random.split(jax.random.key(7), 8), NamedSharding(mesh, P("a"))),
        "uncommitted": jnp.arange(1000),
        "here": np.arange(7),
        "step": 3,
    }


def other_places(tree: dict[str, Any]) -> dict[str, Any]:
    """Return abstract arrays that place the arrays of a tree on other devices."""
    mesh = grid()
    places = {
        "split": NamedSharding(mesh, P(None, "a")),
        "rows": NamedSharding(mesh, P()),
        "replicated": NamedSharding(mesh, P("b", "a")),
        "second": SingleDeviceSharding(jax.devices()[0]),
        "one": NamedSharding(mesh, P("a"), memory_kind="pinned_host"),
        "offloaded": NamedSharding(mesh, P("b")),
        "keys": NamedSharding(mesh, P("b")),
    }
    asked = {name: jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=at) for name, at in places.items()}
    return {**tree, **asked}


def bits(leaf: Any) -> bytes:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(actual: dict[str, Any], expected: dict[str, bytes]) -> None:
    assert {name: bits(leaf) for name, leaf in actual.items()} == expected


@contextmanager
def watched() -> Iterator[list[int]]:
    """Record the size of each message and report, and fail on access to elements outside of a worker."""
    messages: list[int] = []
    write, read = WorkerLink.write, WorkerLink.read

    def counted_write(link: WorkerLink, stage: object, arrays: Sequence[jax.Array], cuts: Cuts) -> bytes:
        report = write(link, stage, arrays, cuts)
        messages.extend((len(pickle.dumps((stage, cuts))), len(report)))
        return report

    def counted_read(link: WorkerLink, stage: object, specs: ReadSpecs) -> tuple[bytes, Sequence[jax.Array]]:
        report, arrays = read(link, stage, specs)
        messages.extend((len(pickle.dumps((stage, specs))), len(report)))
        return report, arrays

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(WorkerLink, "write", counted_write)
        patches.setattr(WorkerLink, "read", counted_read)
        for name in ("copy_to_host", "view_on_host", "shards"):
            patches.setattr(JaxLeafHandler, name, _guarded(getattr(JaxLeafHandler, name), jax.Array))
        for name in ("asarray", "array", "ascontiguousarray"):
            patches.setattr(np, name, _guarded(getattr(np, name), jax.Array))
        patches.setattr(jax, "device_get", _guarded(jax.device_get, jax.Array))
        patches.setattr(jax, "device_put", _guarded(jax.device_put, np.ndarray))
        yield messages


def _guarded(function: Callable[..., Any], refused: type) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        for leaf in jax.tree.leaves(arguments):
            if isinstance(leaf, refused) and _size(leaf) > FEW and not _in_worker():
                raise AssertionError(f"{function.__name__} touched elements outside of a worker")
        return function(*arguments, **options)

    return guarded


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape)


def _in_worker() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == worker_links.__file__ and frame.f_code.co_name in (
            "_run_write_stage",
            "_run_read_stage",
        ):
            return True
        frame = frame.f_back
    return False


def test_access_to_elements_is_detected() -> None:
    array = jnp.ones(2000)
    with watched():
        with pytest.raises(AssertionError, match="asarray touched"):
            np.asarray(array)
        with pytest.raises(AssertionError, match="device_put touched"):
            jax.device_put(np.ones(2000))
        with pytest.raises(AssertionError, match="shards touched"):
            ckptcore.save("memory://watched/it", {"array": array})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_load_onto_other_devices(layout: str, context: ckptcore.Context, tmp_path: Path) -> None:
    tree = state()
    expected = {name: bits(leaf) for name, leaf in tree.items()}
    asked = other_places(tree)
    with watched() as messages:
        ckptcore.save(tmp_path / "it", tree, layout=layout, context=context)
    assert len(messages) == 4, "a request and a report for each worker"
    assert max(messages) < MAX_BYTES
    assert_same(ckptcore.load(tmp_path / "it", tree, context=ckptcore.Context()), expected)
    with watched() as messages:
        loaded = ckptcore.load(tmp_path / "it", asked, context=context)
    assert len(messages) == 4
    assert max(messages) < MAX_BYTES
    assert_same(loaded, expected)
    for name, leaf in asked.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert loaded[name].sharding == leaf.sharding, name
            assert loaded[name].dtype == leaf.dtype
    assert not loaded["uncommitted"].committed


def test_deleted_arrays_load_with_their_shardings(context: ckptcore.Context, tmp_path: Path) -> None:
    tree = state()
    expected = {name: bits(leaf) for name, leaf in tree.items()}
    places = {name: leaf.sharding for name, leaf in tree.items() if isinstance(leaf, jax.Array)}
    ckptcore.save(tmp_path / "it", tree, context=context)
    for name in places:
        tree[name].delete()
    with watched() as messages:
        abstract = ckptcore.abstract(tree, context=context)
        assert messages == [], "the workers are not asked"
        loaded = ckptcore.load(tmp_path / "it", abstract, context=context)
    assert len(messages) == 4
    assert {name: loaded[name].sharding for name in places} == places
    assert not loaded["uncommitted"].committed
    assert_same(loaded, expected)


def test_arrays_may_be_deleted_once_an_asynchronous_save_began(context: ckptcore.Context, tmp_path: Path) -> None:
    tree = state()
    expected = {name: bits(leaf) for name, leaf in tree.items()}
    asked = other_places(tree)
    with watched() as messages:
        handle = ckptcore.save_async(tmp_path / "it", tree, layout="zarr3", context=context)
        for name, leaf in tree.items():
            if isinstance(leaf, jax.Array) and name != "uncommitted":  # the load below requests it with this array
                leaf.delete()
        handle.result()
    assert len(messages) == 4
    assert_same(ckptcore.load(tmp_path / "it", asked, context=context), expected)


def test_workers_copy_arrays_that_alias_memory_of_the_caller(executor: ColocatedExecutor) -> None:
    memory = np.zeros(4096 + 64, np.uint8)
    mine = memory[-memory.ctypes.data % 64 :][:4096]
    leaf = jax.device_put(mine, NamedSharding(grid(), P()))
    for worker in range(2):
        mine[:] = 7
        held = executor.take(worker, [LeafBoxes(leaf, (Box.whole(mine.shape),))], copied=True)
        held.wait()
        mine[:] = 8
        assert (np.asarray(leaf) == 8).all(), "this does not alias, and tests nothing"
        assert isinstance(held, _HeldArrays)
        assert [(np.asarray(array) == 7).all() for array in held.arrays] == [True]


def test_each_worker_writes_its_own_objects(context: ckptcore.Context, tmp_path: Path) -> None:
    tree = {name: leaf for name, leaf in state().items() if name in ("split", "second")}
    ckptcore.save(tmp_path / "it", tree, context=context)
    files = {path.name: path.stat().st_size for path in (tmp_path / "it").glob("*.safetensors")}
    assert len(files) == 2
    first, second = (files[name] for name in sorted(files))
    nbytes = 256 * 256 * 4
    assert first // 1000 == nbytes // 2 // 1000  # half of the sharded array
    assert second // 1000 == (nbytes + nbytes // 2) // 1000  # the other half, and the array that only this worker has


@pytest.mark.parametrize("shape", [(), (0, 4), (8, 0), (1,)])
def test_arrays_of_few_elements(shape: tuple[int, ...], context: ckptcore.Context, tmp_path: Path) -> None:
    tree = {"few": jax.device_put(np.ones(shape, np.float32), NamedSharding(grid(), P()))}
    if shape == (8, 0):
        tree["cut"] = jax.device_put(np.ones(shape, np.float32), NamedSharding(grid(), P("a")))
    ckptcore.save(tmp_path / "it", tree, layout="zarr3", context=context)
    loaded = ckptcore.load(tmp_path / "it", tree, context=context)
    for name, leaf in tree.items():
        assert (loaded[name].shape, loaded[name].dtype, loaded[name].sharding) == (shape, leaf.dtype, leaf.sharding)
        assert bits(loaded[name]) == bits(leaf)


@dataclass(frozen=True)
class Reads:
    """A pending read that returns these arrays."""

    arrays: list[list[np.ndarray[Any, Any]]]

    def __call__(self) -> tuple[bytes, list[list[np.ndarray[Any, Any]]]]:
        return b"", self.arrays


def test_elements_are_cast_by_the_workers(executor: ColocatedExecutor) -> None:
    numbers = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    stored = ArrayRecord(ArraySpec((8, 8), "float32"))
    wanted = WantedLeaf(0, jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(grid(), P("a"))), stored)
    stages = {
        worker: Reads([[numbers[box.slices].copy() for box in executor.wanted(wanted.abstract, stored, worker)]])
        for worker in range(2)
    }
    (loaded,) = executor.run_reads(stages, [wanted]).leaves
    np.testing.assert_array_equal(np.asarray(loaded), numbers.astype(jnp.bfloat16))
    complex_numbers = ArrayRecord(ArraySpec((8, 8), "complex64"))
    with pytest.raises(UnsupportedLeafError, match="cannot represent"):
        executor.wanted(wanted.abstract, complex_numbers, 0)


def test_weak_types_are_restored(context: ckptcore.Context, tmp_path: Path) -> None:
    weak = jax.device_put(jnp.asarray(2.5), NamedSharding(grid(), P()))
    assert weak.weak_type
    ckptcore.save(tmp_path / "it", {"weak": weak}, context=context)
    loaded = ckptcore.load(tmp_path / "it", {"weak": weak}, context=context)["weak"]
    assert (loaded.weak_type, float(loaded), loaded.sharding) == (True, 2.5, weak.sharding)


@dataclass(frozen=True)
class FailingLayout(ckptcore.SafetensorsLayout):
    """The safetensors layout with an error on the second worker."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        if snapshot.plan.rank == 2:
            raise ValueError("this worker is unwell")
        return super().write(snapshot, store)


def test_the_error_names_the_failed_worker(context: ckptcore.Context, tmp_path: Path) -> None:
    tree = state()
    with pytest.raises(RankFailedError, match="worker 1 .4 devices from .* failed: ValueError: this worker is unwell"):
        ckptcore.save(tmp_path / "it", tree, layout=FailingLayout(), context=context)
    assert list(tmp_path.iterdir()) == []
    ckptcore.save(tmp_path / "it", tree, context=context)
    assert ckptcore.verify(tmp_path / "it").ok


class Calls:
    """Colocated Python that counts its compiled functions. Calls to a lost worker fail, as they do with several hosts.

    Attributes:
        compiled: number of compiled functions.
        lost: the first device of the lost worker, or None.
    """

    def __init__(self, colocated_python: Callable[[Any], Any]) -> None:
        self.compiled = 0
        self.lost: jax.Device | None = None
        self._colocated_python = colocated_python

    def colocated_python(self, function: Any) -> SimpleNamespace:
        specialize = self._colocated_python(function).specialize

        def counted(**options: Any) -> Callable[..., Any]:
            self.compiled += 1
            call = specialize(**options)

            def checked(message: jax.Array, *arrays: jax.Array) -> Any:
                if self.lost in message.devices():
                    raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")
                return call(message, *arrays)

            return checked

        return SimpleNamespace(specialize=counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of the executors that the test creates."""
    from jax.experimental import colocated_python  # old versions of JAX lack it

    calls = Calls(colocated_python.colocated_python)
    monkeypatch.setattr(colocated_python, "colocated_python", calls.colocated_python)
    return calls


def test_the_error_for_a_lost_worker_names_it(calls: Calls, tmp_path: Path) -> None:
    devices = jax.devices()
    executor = ColocatedExecutor([devices[:4], devices[4:]])
    context = ckptcore.Context(job=ckptcore.context.JobOptions(executor=executor))
    tree = state()
    ckptcore.save(tmp_path / "before", tree, context=context)
    calls.lost = devices[4]
    with pytest.raises(RankFailedError, match=r"worker 1 .* failed.*connection refused"):
        ckptcore.save(tmp_path / "it", tree, context=context)
    with pytest.raises(RankFailedError, match="worker 1"):
        ckptcore.save_async(tmp_path / "it", tree, context=context).result()
    with pytest.raises(RankFailedError, match="worker 1"):
        ckptcore.load(tmp_path / "before", tree, context=context)
    calls.lost = None
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    ckptcore.save(tmp_path / "it", tree, context=context)
    assert ckptcore.verify(tmp_path / "it").ok


def test_loads_of_one_kind_are_compiled_once(calls: Calls, tmp_path: Path) -> None:
    devices = jax.devices()
    executor = ColocatedExecutor([devices[:4], devices[4:]])
    context = ckptcore.Context(job=ckptcore.context.JobOptions(executor=executor))
    tree = {"split": state()["split"]}
    ckptcore.save(tmp_path / "it", tree, context=context)
    ckptcore.load(tmp_path / "it", tree, context=context)
    compiled = calls.compiled
    ckptcore.load(tmp_path / "it", tree, context=context)
    assert calls.compiled == compiled > 2, "functions for saves and loads"


def test_deleted_arrays_are_refused_by_name(context: ckptcore.Context, tmp_path: Path) -> None:
    tree = {"split": state()["split"]}
    tree["split"].delete()
    with pytest.raises(UnsupportedLeafError, match="split: .* was deleted"):
        ckptcore.save(tmp_path / "it", tree, context=context)


def test_arrays_on_devices_of_no_worker_are_saved_by_the_controller(tmp_path: Path) -> None:
    devices = jax.devices()
    executor = ColocatedExecutor([devices[:2], devices[2:4]])
    array = jax.device_put(np.arange(8), devices[7])
    assert not executor.takes(array)
    ckptcore.save(
        tmp_path / "it", {"array": array}, context=ckptcore.Context(job=ckptcore.context.JobOptions(executor=executor))
    )
    np.testing.assert_array_equal(ckptcore.load(tmp_path / "it")["array"], np.arange(8))


def test_a_device_has_one_worker() -> None:
    devices = jax.devices()
    for workers in ([devices[:4], devices[3:]], [devices, []]):
        with pytest.raises(PluginError, match="its own devices"):
            ColocatedExecutor(workers)


def test_pathways_is_detected_by_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert pathways.executor_of_pathways() is None
    monkeypatch.setattr(pathways, "jax", SimpleNamespace(
        config=SimpleNamespace(jax_platforms="proxy,cpu"), process_count=lambda: 1, devices=jax.devices
    ))  # fmt: skip
    detected = pathways.executor_of_pathways()
    assert isinstance(detected, ColocatedExecutor)
    assert detected is pathways.executor_of_pathways()
    assert runtime_of(ckptcore.Context()).workers() is detected
    assert len(detected.workers) == 1  # all devices of the test belong to one host


def test_hosts_of_pathways_are_tasks_of_slices() -> None:
    def device(number: int, **of: int) -> SimpleNamespace:
        return SimpleNamespace(id=number, process_index=0, **of)

    two_slices = [
        device(number, slice_index=number // 4, virtual_task_index=number // 2 % 2) for number in (0, 1, 4, 2, 3, 5, 6)
    ]
    assert [[member.id for member in host] for host in devices_by_host(two_slices)] == [[0, 1], [4, 5], [2, 3], [6]]
    assert [len(host) for host in devices_by_host([device(0), device(1)])] == [2]


def test_a_plugin_can_provide_the_executor(executor: ColocatedExecutor, tmp_path: Path) -> None:
    class Telling:
        @hookimpl
        def ckpt_executor(self) -> ColocatedExecutor:
            return executor

    context, tree = (
        ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[Telling()])),
        {"split": state()["split"]},
    )
    with watched() as messages:
        ckptcore.save(tmp_path / "it", tree, context=context)
    assert len(messages) == 4
    with pytest.raises(ckptcore.errors.PluginConflictError, match=r"Context\(job=JobOptions\(executor"):
        runtime_of(ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[Telling(), Telling()]))).workers()
