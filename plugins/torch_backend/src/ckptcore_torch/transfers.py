"""Copies from device to host memory, through pinned staging buffers and a side stream for CUDA."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch

from ckptcore.errors import PluginError
from ckptcore.model import HostArray, Pending, Ready
from ckptcore_torch.conversions import encoding_of

_STAGING_BYTES: Final = 32 << 20
"""Size of a staging buffer."""

_STAGING_BUFFERS: Final = 4
"""Staging buffers per device. At any time, one is filled and one is emptied, while transfers to the others run."""


class DeviceEvent(Protocol):
    """An event in the work queue of a device, such as a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""
        ...


class SideStream(Protocol):
    """A separate work queue of a device, and memory for asynchronous copies."""

    def now(self) -> DeviceEvent:
        """Record an event after the current work of the calling thread's own stream."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Run device work inside the context on this stream."""
        ...

    def wait_for(self, event: DeviceEvent) -> None:
        """Delay further work of this stream until `event`."""
        ...

    def mark(self) -> DeviceEvent:
        """Record an event after the current work of this stream."""
        ...

    def staging(self, size: int) -> torch.Tensor:
        """Allocate host memory for asynchronous copies: uint8, `size` bytes."""
        ...


class CudaSideStream:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # not typed by PyTorch

    def now(self) -> DeviceEvent:
        """Record an event on the current stream of the calling thread."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def entered(self) -> AbstractContextManager[object]:
        """Make the side stream and its device current."""
        return torch.cuda.stream(self._stream)

    def wait_for(self, event: DeviceEvent) -> None:
        """Make the side stream wait for an event."""
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def mark(self) -> DeviceEvent:
        """Record an event on the side stream."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def staging(self, size: int) -> torch.Tensor:
        """Allocate pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@dataclass(slots=True)
class _StagedBytes:
    """Bytes of a copy in a staging buffer.

    Attributes:
        copy: the copy.
        staged: range of the bytes in the buffer.
        start: offset of the bytes in the target of the copy.
    """

    copy: HostCopy
    staged: slice
    start: int


@dataclass(slots=True)
class _StagingBuffer:
    """A staging buffer in use.

    Attributes:
        buffer: pinned host memory.
        contents: the bytes in it.
        used: number of bytes in it.
        arrived: event after the transfers to the buffer; None while the buffer is being filled.
    """

    buffer: torch.Tensor
    contents: list[_StagedBytes] = field(default_factory=list)
    used: int = 0
    arrived: DeviceEvent | None = None


class HostCopy:
    """A running copy of a tensor to a host array. `result` waits for it. Thread-safe.

    Attributes:
        source: the tensor; None after the copy ended.
        after: event on the device before which the copy must not read the tensor.
        bytes: the target as bytes.
        flat: the elements of the tensor as bytes on the device. None before the copy starts and
            after it has ended.
        staged: number of bytes whose transfer to a staging buffer was started.
        arrived: number of bytes in the target.
        error: error of the copy, or None.
    """

    def __init__(self, transfers: Transfers, source: torch.Tensor, target: HostArray, after: DeviceEvent) -> None:
        self._transfers = transfers
        self._target = target
        self.source: torch.Tensor | None = source
        self.after = after
        self.bytes: HostArray = target.reshape(-1).view(np.uint8)
        self.flat: torch.Tensor | None = None
        self.staged = 0
        self.arrived = 0
        self.error: BaseException | None = None

    def result(self) -> HostArray:
        """Wait, and return the filled target."""
        self._transfers.finish(self)
        return self._target


class Transfers:
    """Copies from one device to host arrays, through staging buffers. Thread-safe.

    Small copies share a buffer, and large copies use several. A copy starts on submission if a
    buffer is free. Copies progress whenever a thread waits for one of them. Buffers are reused for
    the next save. If the program drops all references to a waiting copy, the copy and its source
    tensor are dropped.
    """

    def __init__(self, stream: SideStream, *, size: int = _STAGING_BYTES, count: int = _STAGING_BUFFERS) -> None:
        self._stream = stream
        self._size = size
        self._unallocated = count
        self._free: list[torch.Tensor] = []
        self._waiting: deque[weakref.ref[HostCopy]] = deque()
        self._in_use: deque[_StagingBuffer] = deque()
        self._lock = threading.Lock()

    def now(self) -> DeviceEvent:
        """Record an event after the current work of the calling thread's own stream."""
        return self._stream.now()

    def submit(self, source: torch.Tensor, target: HostArray, after: DeviceEvent) -> HostCopy:
        """Start to copy a tensor to a C-contiguous array of the same size, after the event `after`.

        The caller may drop its reference to `source`, but must not change it before the copy is
        done.
        """
        copy = HostCopy(self, source, target, after)
        with self._lock:
            self._waiting.append(weakref.ref(copy))
            self._stage()
        return copy

    def finish(self, copy: HostCopy) -> None:
        """Wait for a copy. Also completes earlier copies, and starts later ones."""
        with self._lock:
            while copy.error is None and copy.arrived < copy.bytes.nbytes:
                self._stage()
                if not self._in_use:
                    raise PluginError(
                        "internal error: waited for a device copy that is not running; please report this"
                    )
                # Buffers are in the order of the copies, so the oldest one is the next to arrive.
                self._empty(self._in_use.popleft())
                self._stage()
        if copy.error is not None:
            raise copy.error

    def _stage(self) -> None:
        """Start transfers of waiting copies to staging buffers, while buffers are free. Never blocks."""
        while self._waiting:
            copy = self._waiting[0]()
            if copy is None or copy.error is not None or copy.staged == copy.bytes.nbytes:
                self._waiting.popleft()
                continue
            staging = self._buffer_with_space()
            if staging is None:
                return
            try:
                self._stage_piece(copy, staging)
            except Exception as error:  # noqa: BLE001  # raised to the thread that waits for this copy
                self._fail(copy, error)

    def _stage_piece(self, copy: HostCopy, staging: _StagingBuffer) -> None:
        with self._stream.entered(), torch.no_grad():
            if copy.flat is None:
                assert copy.source is not None
                self._stream.wait_for(copy.after)
                dense = copy.source.contiguous()
                # Not reshape: a tensor of one element can have any stride, and then cannot be
                # viewed as bytes.
                copy.flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            count = min(copy.bytes.nbytes - copy.staged, self._size - staging.used)
            staged = slice(staging.used, staging.used + count)
            staging.buffer[staged].copy_(copy.flat[copy.staged : copy.staged + count], non_blocking=True)
            staging.contents.append(_StagedBytes(copy, staged, copy.staged))
            staging.used += count
            copy.staged += count
            if staging.used == self._size:
                staging.arrived = self._stream.mark()

    def _buffer_with_space(self) -> _StagingBuffer | None:
        """Return a staging buffer with free space, or None if all are in use."""
        if self._in_use and self._in_use[-1].arrived is None:
            return self._in_use[-1]
        if not self._free:
            if not self._unallocated:
                return None
            self._free.append(self._stream.staging(self._size))
            self._unallocated -= 1
        staging = _StagingBuffer(self._free.pop())
        self._in_use.append(staging)
        return staging

    def _empty(self, staging: _StagingBuffer) -> None:
        """Wait for the transfers to a staging buffer, copy its contents to their targets, and free it."""
        try:
            if staging.arrived is None:
                with self._stream.entered():
                    staging.arrived = self._stream.mark()
            staging.arrived.synchronize()
            elements = staging.buffer.numpy()
            for staged_bytes in staging.contents:
                copy, count = staged_bytes.copy, staged_bytes.staged.stop - staged_bytes.staged.start
                copy.bytes[staged_bytes.start : staged_bytes.start + count] = elements[staged_bytes.staged]
                copy.arrived += count
                if copy.arrived == copy.bytes.nbytes:
                    copy.source = copy.flat = None
        except BaseException as error:
            for staged_bytes in staging.contents:
                self._fail(staged_bytes.copy, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._free.append(staging.buffer)

    def _fail(self, copy: HostCopy, error: BaseException) -> None:
        """Store an error for the thread that waits for the copy."""
        copy.error = error
        copy.source = copy.flat = None


def start_copy(source: torch.Tensor, target: HostArray) -> Pending[HostArray]:
    """Copy a tensor of any device to a C-contiguous host array of its encoding.

    CUDA copies are asynchronous, and `source` must not change before the result is ready. Other
    copies block.
    """
    source = source.detach().resolve_conj().resolve_neg()
    carrier = encoding_of(source.dtype).carrier
    if carrier is not None:
        source = source.view(carrier[0])
    if source.is_cuda and source.numel():
        transfers = _transfers_of(source.device)
        return transfers.submit(source, target, transfers.now())
    with torch.no_grad():
        torch.from_numpy(target if carrier is None else target.view(carrier[1])).copy_(source)
    return Ready(target)


def finish_work_on(tensor: torch.Tensor) -> None:
    """Wait for the calling thread's pending work on a tensor's device, so that other threads can read the tensor."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if not stream.query():
            stream.synchronize()


@functools.cache
def _transfers_of(device: torch.device) -> Transfers:
    return Transfers(CudaSideStream(device))
