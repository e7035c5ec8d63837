"""Fresh memory and staging memory: aligned, freed, reused, bounded; and copies that are what the source was."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.engine.memory import StagingMemory, StagingPool, allocate
from ckptcore.engine.threads import IOThreads
from ckptcore.model import ArraySpec, HostArray, name_of_dtype
from ckptcore.testing.arrays import same_bits
from ckptcore.testing.strategies import arrays, specs
from tests.engine.objects import held

MIB = 1 << 20


@given(specs())
def test_allocated_arrays_are_what_was_asked_for(spec: ArraySpec) -> None:
    array = allocate(spec)
    assert (array.shape, name_of_dtype(array.dtype)) == (spec.shape, spec.dtype)
    assert array.flags.c_contiguous and array.flags.writeable


@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB + 6, 16 * MIB])
def test_large_arrays_begin_at_a_huge_page_and_can_be_filled(nbytes: int) -> None:
    array = allocate(ArraySpec((nbytes // 2,), "bfloat16"))
    assert array.ctypes.data % (2 * MIB) == 0
    array.view(np.uint16)[...] = 0x3F80
    assert array.dtype == ml_dtypes.bfloat16
    assert array[0] == array[-1] == 1


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    array = allocate(ArraySpec((8 * MIB,), "uint8"))
    mapping = weakref.ref(array.base)
    view = array[100:200].view(np.uint16)
    del array
    gc.collect()
    assert mapping() is not None
    view[...] = 5
    del view
    gc.collect()
    assert mapping() is None


def test_more_memory_than_there_is_is_an_error() -> None:
    with pytest.raises(MemoryError):
        allocate(ArraySpec((1 << 60,), "float64"))
    with pytest.raises(MemoryError):
        allocate(ArraySpec((1 << 50,), "uint8"))
    with pytest.raises(MemoryError):
        allocate(ArraySpec((0, 1 << 80), "uint8"))


@given(st.data())
def test_copies_of_small_arrays_are_equal_and_native(data: st.DataObject) -> None:
    source = data.draw(arrays())
    memory = StagingMemory(StagingPool(data.draw(st.sampled_from([None, 1 << 20]))), IOThreads(2))
    copy = memory.copy(data.draw(held(source))).result()
    assert same_bits(copy, source)
    assert copy.dtype.isnative and copy.flags.c_contiguous and copy.flags.writeable
    assert not np.shares_memory(copy, source)
    memory.give_back(copy)
    memory.close()


LARGE: list[HostArray] = [
    np.arange(3 * MIB, dtype=np.uint32).reshape(3, MIB),
    np.arange(3 * MIB, dtype=np.uint32).reshape(1024, 3072).T,
    np.arange(6 * MIB, dtype=np.uint16).view(ml_dtypes.bfloat16)[::-2],
    np.arange(2 * MIB, dtype=np.float64).astype(">f8"),
    np.arange(100_000, dtype=np.int16),
    np.arange(2 * MIB, dtype=np.uint64).reshape(1, 1, MIB, 2)[..., ::-1],
]


@pytest.mark.parametrize("source", LARGE, ids=lambda array: f"{array.dtype}-{array.shape}")
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_large_arrays_are_equal_and_native(source: HostArray, threads: int) -> None:
    memory = StagingMemory(StagingPool(None), IOThreads(threads))
    copies = [memory.copy(source) for _ in range(3)]
    for copy in copies:
        found = copy.result()
        assert same_bits(found, np.ascontiguousarray(source))
        assert found.dtype.isnative and found.flags.c_contiguous
        assert copy.result() is found
    memory.close()


def test_a_result_comes_where_all_threads_are_busy() -> None:
    threads = IOThreads(1)
    release = threading.Event()
    busy = threads.submit(release.wait)
    memory = StagingMemory(StagingPool(None), threads)
    source = np.arange(MIB)
    assert np.array_equal(memory.copy(source).result(), source)
    release.set()
    assert busy.result()
    memory.close()


def test_the_next_save_gets_the_same_memory() -> None:
    pool = StagingPool(None)
    spec_sets = [ArraySpec((size,), "uint8") for size in (9 * MIB, 5 * MIB, 100_000, 70_000, 10 * MIB)]

    def addresses() -> list[int]:
        memory = StagingMemory(pool, IOThreads(2))
        found = sorted([memory.empty(spec).ctypes.data for spec in spec_sets])
        memory.close()
        return found

    first = addresses()
    held_bytes = pool.held_bytes
    assert addresses() == first
    assert pool.held_bytes == held_bytes
    pool.release_unused()
    assert pool.held_bytes == 0


def test_the_pool_never_holds_more_than_was_used_at_once() -> None:
    pool = StagingPool(None)
    peak = 0
    random = np.random.default_rng(0)
    for _ in range(30):
        memory = StagingMemory(pool, IOThreads(1))
        sizes = random.integers(100_000, 9 * MIB, random.integers(1, 6)).tolist()
        for size in sizes:
            memory.empty(ArraySpec((size,), "uint8"))
            peak = max(peak, pool.held_bytes)
        memory.close()
        assert pool.held_bytes <= peak
    # Rounding to pages and reuse of memory that is a little larger.
    assert peak <= 6 * 9 * MIB * 9 // 8


def test_memory_that_was_given_back_is_reused_within_a_save() -> None:
    pool = StagingPool(None)
    memory = StagingMemory(pool, IOThreads(1))
    first = memory.empty(ArraySpec((3, MIB), "uint8"))
    other = memory.empty(ArraySpec((3, MIB), "uint8"))
    assert not np.shares_memory(first, other)
    address = first.ctypes.data
    memory.give_back(first.reshape(-1))  # a view that begins where the array does will do
    assert memory.empty(ArraySpec((3 * MIB,), "int8")).ctypes.data == address
    memory.give_back(np.zeros(3 * MIB))  # not ours
    memory.close()


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_empty_blocks_while_the_budget_is_used_up(nbytes: int) -> None:
    pool = StagingPool(2 * nbytes + 5000)
    memory = StagingMemory(pool, IOThreads(2))
    spec = ArraySpec((nbytes,), "uint8")
    held_arrays = [memory.empty(spec), memory.empty(spec)]
    if nbytes < 64 << 10:
        held_arrays.extend([memory.empty(spec) for _ in range(5)])
    waiter: Future[HostArray] = Future()
    started = threading.Event()

    def wait() -> None:
        started.set()
        waiter.set_result(memory.empty(spec))

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(10)
    with pytest.raises(TimeoutError):
        waiter.result(0.05)
    memory.give_back(held_arrays.pop())
    assert waiter.result(10).nbytes == nbytes
    thread.join()
    memory.close()
    assert pool.held_bytes <= 2 * nbytes + 5000 + 4096


def test_one_array_larger_than_the_budget_is_allowed_alone() -> None:
    pool = StagingPool(1000)
    memory = StagingMemory(pool, IOThreads(2))
    large = memory.copy(np.arange(MIB)).result()
    blocked = threading.Event()

    def wait() -> None:
        memory.empty(ArraySpec((10,), "uint8"))
        blocked.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not blocked.wait(0.05)
    memory.give_back(large)
    assert blocked.wait(10)
    thread.join()
    memory.close()


def test_after_close_everything_is_back_and_nothing_is_given_out() -> None:
    pool = StagingPool(None)
    threads = IOThreads(1)
    release = threading.Event()
    busy = threads.submit(release.wait)
    memory = StagingMemory(pool, threads)
    array = memory.empty(ArraySpec((MIB,), "uint8"))
    copy = memory.copy(np.zeros(9 * MIB, np.uint8))
    memory.close()
    memory.close()
    release.set()
    busy.result()
    with pytest.raises(RuntimeError, match="after the save ended"):
        copy.result()
    with pytest.raises(RuntimeError, match="after the save ended"):
        memory.empty(ArraySpec((1,), "uint8"))
    with pytest.raises(RuntimeError, match="after the save ended"):
        memory.copy(np.zeros(1))
    memory.give_back(array)
    held_bytes = pool.held_bytes
    pool.release_unused()
    assert held_bytes >= 10 * MIB and pool.held_bytes == 0
