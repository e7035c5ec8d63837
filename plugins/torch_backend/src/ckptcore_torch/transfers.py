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
from ckptcore_torch.dtypes import encoding_of

__all__ = ["CudaLane", "DeviceEvent", "HostCopy", "Lane", "Transfers", "finish_work_on", "start_copy"]

_STAGING_BYTES: Final = 32 << 20
"""Size of a staging buffer."""

_STAGING_BUFFERS: Final = 4
"""Staging buffers per device: one is filled, others are transferred, and one is emptied."""


class DeviceEvent(Protocol):
    """A point in the work of a device, such as a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


class Lane(Protocol):
    """A queue of work on a device besides the caller's own, and memory for asynchronous copies."""

    def now(self) -> DeviceEvent:
        """Return the current end of the calling thread's own work."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Direct work inside the context to this lane."""
        ...

    def wait_for(self, event: DeviceEvent) -> None:
        """Start further work of this lane only after `event`."""
        ...

    def mark(self) -> DeviceEvent:
        """Return the current end of the work in this lane."""
        ...

    def staging(self, size: int) -> torch.Tensor:
        """Allocate host memory for asynchronous copies: uint8, `size` bytes."""
        ...


class CudaLane:
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
class _Piece:
    """Bytes in a staging buffer, with their destination."""

    copy: HostCopy
    staged: slice
    start: int


@dataclass(slots=True)
class _Flight:
    """A staging buffer with its contents and the event of its arrival, which is None while it is being filled."""

    buffer: torch.Tensor
    pieces: list[_Piece] = field(default_factory=list)
    used: int = 0
    arrived: DeviceEvent | None = None


class HostCopy:
    """A running copy of a tensor to a host array. `result` waits for it. Any thread."""

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
    """Copies from one device to host arrays.

    Small copies share a buffer, large ones are split. Any thread.

    Copies start on submission if staging buffers are free, and progress whenever a thread waits for
    one. Staging buffers are reused for the next save. A copy without references is dropped with its
    tensor; data of it in a staging buffer is copied with the next one.
    """

    def __init__(self, lane: Lane, *, size: int = _STAGING_BYTES, count: int = _STAGING_BUFFERS) -> None:
        self._lane = lane
        self._size = size
        self._unmade = count
        self._free: list[torch.Tensor] = []
        self._waiting: deque[weakref.ref[HostCopy]] = deque()
        self._flights: deque[_Flight] = deque()
        self._lock = threading.Lock()

    def now(self) -> DeviceEvent:
        """Return the current end of the calling thread's own work."""
        return self._lane.now()

    def submit(self, source: torch.Tensor, target: HostArray, after: DeviceEvent) -> HostCopy:
        """Start to copy a tensor, in its state at `after`, to a C-contiguous array of the same size.

        The caller may drop `source`, but must not change it before the copy has arrived.
        """
        copy = HostCopy(self, source, target, after)
        with self._lock:
            self._waiting.append(weakref.ref(copy))
            self._stage()
        return copy

    def finish(self, copy: HostCopy) -> None:
        """Wait for a copy. This also advances earlier copies, and some later ones."""
        with self._lock:
            while copy.error is None and copy.arrived < copy.bytes.nbytes:
                self._stage()
                if not self._flights:
                    raise PluginError(
                        "internal error: waited for a device copy that is not running; please report this"
                    )
                self._land(self._flights.popleft())
                self._stage()
        if copy.error is not None:
            raise copy.error

    def _stage(self) -> None:
        """Stage waiting copies while buffers are free. Never blocks."""
        while self._waiting:
            copy = self._waiting[0]()
            if copy is None or copy.error is not None or copy.staged == copy.bytes.nbytes:
                self._waiting.popleft()
                continue
            flight = self._open_flight()
            if flight is None:
                return
            try:
                self._stage_piece(copy, flight)
            except Exception as error:  # noqa: BLE001  # raised to the thread that waits for this copy
                self._fail(copy, error)

    def _stage_piece(self, copy: HostCopy, flight: _Flight) -> None:
        with self._lane.entered(), torch.no_grad():
            if copy.flat is None:
                assert copy.source is not None
                self._lane.wait_for(copy.after)
                dense = copy.source.contiguous()
                # Not reshape: a tensor of one element can have any stride, and then cannot be
                # viewed as bytes.
                copy.flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            count = min(copy.bytes.nbytes - copy.staged, self._size - flight.used)
            staged = slice(flight.used, flight.used + count)
            flight.buffer[staged].copy_(copy.flat[copy.staged : copy.staged + count], non_blocking=True)
            flight.pieces.append(_Piece(copy, staged, copy.staged))
            flight.used += count
            copy.staged += count
            if flight.used == self._size:
                flight.arrived = self._lane.mark()

    def _open_flight(self) -> _Flight | None:
        """Return the buffer being filled, or a new one, or None if all are in use."""
        if self._flights and self._flights[-1].arrived is None:
            return self._flights[-1]
        if not self._free:
            if not self._unmade:
                return None
            self._free.append(self._lane.staging(self._size))
            self._unmade -= 1
        flight = _Flight(self._free.pop())
        self._flights.append(flight)
        return flight

    def _land(self, flight: _Flight) -> None:
        """Wait for a staging buffer, and empty it."""
        try:
            if flight.arrived is None:
                with self._lane.entered():
                    flight.arrived = self._lane.mark()
            flight.arrived.synchronize()
            elements = flight.buffer.numpy()
            for piece in flight.pieces:
                copy, count = piece.copy, piece.staged.stop - piece.staged.start
                copy.bytes[piece.start : piece.start + count] = elements[piece.staged]
                copy.arrived += count
                if copy.arrived == copy.bytes.nbytes:
                    copy.source = copy.flat = None
        except BaseException as error:
            for piece in flight.pieces:
                self._fail(piece.copy, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._free.append(flight.buffer)

    def _fail(self, copy: HostCopy, error: BaseException) -> None:
        """Keep an error for the thread that waits for the copy."""
        copy.error = error
        copy.source = copy.flat = None


def start_copy(source: torch.Tensor, target: HostArray) -> Pending[HostArray]:
    """Copy a tensor of any device to a C-contiguous host array of its encoding.

    CUDA copies are asynchronous, and `source` must not change before the result is ready. Others
    block.
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
    """Wait for the calling thread's pending work on a tensor's device, so that other threads can read it."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if not stream.query():
            stream.synchronize()


@functools.cache
def _transfers_of(device: torch.device) -> Transfers:
    return Transfers(CudaLane(device))
