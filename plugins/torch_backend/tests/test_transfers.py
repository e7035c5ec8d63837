"""Copies from a simulated device, which runs copies only when a thread waits for them."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from ckptcore_testing import LateHostMemory
from ckptcore_torch.tensors import TensorHandler
from ckptcore_torch.transfers import DeviceEvent, SideStream, Transfers, finish_work_on, start_copy

from ckptcore.model import Box, HostArray

SIZE = 64


class LateDevice:
    """A `SideStream` that runs copies as late as a device may: when a thread waits for a later event."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.log: list[str] = []
        self.buffers = 0
        self.inside = False
        self.broken: Exception | None = None

    def now(self) -> DeviceEvent:
        return _LateMoment(self, 0)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def entered(self) -> AbstractContextManager[object]:
        return self._entered()

    def wait_for(self, event: DeviceEvent) -> None:
        assert self.inside
        self.log.append("wait for the caller")

    def mark(self) -> DeviceEvent:
        assert self.inside
        return _LateMoment(self, len(self.queue))

    def staging(self, size: int) -> torch.Tensor:
        self.buffers += 1
        return _LateBuffer.make(self, size)


class _LateBuffer(torch.Tensor):
    """Staging memory that queues asynchronous copies."""

    device_of: LateDevice

    @staticmethod
    def make(device: LateDevice, size: int) -> torch.Tensor:
        made = torch.full((size,), 0xEE, dtype=torch.uint8).as_subclass(_LateBuffer)
        made.device_of = device
        return made

    def __getitem__(self, index: object) -> torch.Tensor:
        part = torch.Tensor.__getitem__(self, index).as_subclass(_LateBuffer)
        part.device_of = self.device_of
        return part

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking, "copies to a staging buffer must be asynchronous"
        device = self.device_of
        assert device.inside, "copies must run in the side stream"
        if device.broken is not None:
            raise device.broken
        target = self.as_subclass(torch.Tensor)
        device.log.append(f"copy {source.numel()}")
        device.queue.append(lambda: target.numpy().__setitem__(slice(None), source.numpy()))
        return self


class _LateMoment:
    def __init__(self, device: LateDevice, position: int) -> None:
        self.device = device
        self.position = position

    def synchronize(self) -> None:
        assert not self.device.inside
        self.device.log.append("synchronize")
        for number in range(self.position):
            self.device.queue[number]()
            self.device.queue[number] = lambda: None


def _source(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _target(count: int) -> HostArray:
    return np.zeros(count, np.uint8)


def _transfers(device: LateDevice, count: int = 2) -> Transfers:
    lane: SideStream = device
    return Transfers(lane, size=SIZE, count=count)


@pytest.mark.parametrize("count", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 10 * SIZE + 7])
@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_a_copy_of_any_size_arrives_whole(count: int, buffers: int) -> None:
    device = LateDevice()
    transfers = _transfers(device, buffers)
    source, target = _source(count), _target(count)
    copy = transfers.submit(source, target, transfers.now())
    assert copy.result() is target
    assert target.tolist() == source.tolist()
    assert device.buffers <= buffers
    assert device.log.count("wait for the caller") == 1, "each copy waits once for the work of the caller"


def test_submitting_starts_and_does_not_wait() -> None:
    device = LateDevice()
    transfers = _transfers(device)
    copies = [transfers.submit(_source(SIZE, seed), _target(SIZE), transfers.now()) for seed in range(5)]
    assert "synchronize" not in device.log
    assert device.log.count(f"copy {SIZE}") == 2, "each of the 2 buffers has one running copy"
    for seed, copy in enumerate(copies):
        assert copy.result().tolist() == _source(SIZE, seed).tolist()


def test_small_copies_share_a_buffer() -> None:
    device = LateDevice()
    transfers = _transfers(device)
    copies = [transfers.submit(_source(4, seed), _target(4), transfers.now()) for seed in range(SIZE // 4)]
    for seed, copy in enumerate(copies):
        assert copy.result().tolist() == _source(4, seed).tolist()
    assert device.log.count("synchronize") == 1


@pytest.mark.parametrize("order", [1, -1])
def test_threads_may_wait_for_copies_in_any_order(order: int) -> None:
    device = LateDevice()
    transfers = _transfers(device)
    sizes = [1, 200, 3, SIZE, 5, 999, 0 + 7]
    copies = [transfers.submit(_source(size, size), _target(size), transfers.now()) for size in sizes]
    for size, copy in list(zip(sizes, copies, strict=True))[::order]:
        assert copy.result().tolist() == _source(size, size).tolist()
        assert copy.result().tolist() == _source(size, size).tolist(), "the second result differs"


def test_buffers_are_used_again_by_the_next_save() -> None:
    device = LateDevice()
    transfers = _transfers(device, 2)
    for seed in range(10):
        source = _source(5 * SIZE, seed)
        assert transfers.submit(source, _target(5 * SIZE), transfers.now()).result().tolist() == source.tolist()
    assert device.buffers == 2


def test_strided_tensors_of_any_dtype_arrive_in_c_order() -> None:
    transfers = _transfers(LateDevice())
    source = torch.arange(30, dtype=torch.float64).reshape(5, 6).t()[1:, ::2]
    target = np.zeros((5, 3))
    transfers.submit(source, target, transfers.now()).result()
    assert target.tolist() == source.tolist()
    alone = np.zeros((1, 1))
    transfers.submit(torch.arange(9.0, dtype=torch.float64)[::5].view(2, 1)[1:], alone, transfers.now()).result()
    assert alone == 5
    scalar = np.zeros(())
    transfers.submit(torch.tensor(2.5, dtype=torch.float64), scalar, transfers.now()).result()
    assert scalar == 2.5


def test_source_tensor_is_referenced_until_its_copy_is_done() -> None:
    device = LateDevice()
    transfers = _transfers(device)
    source = _source(3 * SIZE)
    gone = weakref.ref(source)
    copy = transfers.submit(source, _target(3 * SIZE), transfers.now())
    del source
    gc.collect()
    assert gone() is not None
    copy.result()
    device.queue.clear()
    gc.collect()
    assert gone() is None


def test_a_copy_that_nobody_waits_for_is_dropped() -> None:
    device = LateDevice()
    transfers = _transfers(device, 1)
    first = transfers.submit(_source(SIZE), _target(SIZE), transfers.now())
    source = _source(SIZE, 1)
    gone = weakref.ref(source)
    transfers.submit(source, _target(SIZE), transfers.now())
    del source
    gc.collect()
    assert gone() is None
    assert first.result().tolist() == _source(SIZE).tolist()
    assert transfers.submit(_source(9, 2), _target(9), transfers.now()).result().tolist() == _source(9, 2).tolist()


def test_device_error_reaches_only_the_threads_that_wait_for_the_copy() -> None:
    device = LateDevice()
    transfers = _transfers(device, 1)
    fine = transfers.submit(_source(SIZE), _target(SIZE), transfers.now())
    device.broken = RuntimeError("the device is gone")
    lost = [transfers.submit(_source(8), _target(8), transfers.now()) for _ in range(2)]
    assert fine.result().tolist() == _source(SIZE).tolist()
    for copy in lost:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                copy.result()
    device.broken = None
    assert transfers.submit(_source(8), _target(8), transfers.now()).result().tolist() == _source(8).tolist()


def test_several_threads_wait_at_once() -> None:
    transfers = _transfers(LateDevice(), 2)
    sizes = [seed * 7 % 150 + 1 for seed in range(60)]
    copies = [transfers.submit(_source(size, size), _target(size), transfers.now()) for size in sizes]
    start = threading.Barrier(4)

    def wait(number: int) -> None:
        start.wait()
        for size, copy in list(zip(sizes, copies, strict=True))[number::4]:
            assert copy.result().tolist() == _source(size, size).tolist()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(wait, number) for number in range(4)]:
            done.result()


def test_copy_of_a_cpu_tensor_is_immediate() -> None:
    source = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj()
    target = np.zeros(4, np.complex64)
    assert start_copy(source, target).result() is target
    assert target.tolist() == source.tolist()
    finish_work_on(source)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_copies_of_cuda_tensors_exclude_later_changes(dtype: torch.dtype) -> None:
    handler = TensorHandler()
    on_host = torch.arange(3_000_000).remainder(7).to(torch.float32).to(dtype).reshape(1500, 2000)
    expected = handler.view_on_host(on_host.t(), [Box.whole((2000, 1500))])[0].result().tobytes()
    with torch.cuda.stream(torch.cuda.Stream()):
        leaf = on_host.cuda(non_blocking=True).t()
        (shard,) = handler.shards(leaf, 0, 1)
        (view,) = handler.view_on_host(leaf, [shard.box])
        assert view.result().tobytes() == expected
        (copy,) = handler.copy_to_host(leaf, [shard.box], LateHostMemory())
        array = copy.result()
        leaf.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).zero_()
        torch.cuda.synchronize()
        assert array.tobytes() == expected


@needs_cuda
def test_cuda_tensors_are_built_and_filled() -> None:
    handler = TensorHandler()
    target = torch.nn.Parameter(torch.zeros(2, 3, device="cuda"))
    record = handler.describe(target)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    box = Box.whole((2, 3))
    assert handler.destination(target, record, box) is None  # type: ignore[arg-type]  # the leaf has an ArrayRecord
    assert handler.fill(target, record, [(box, array)]) is True
    assert target.tolist() == array.tolist()
    built = handler.build(target, record, [(box, array)])
    assert isinstance(built, torch.nn.Parameter)
    assert built.device == target.device
    assert built.tolist() == array.tolist()
