"""Copies between a CUDA device and the host: ours, those of PyTorch in one or more streams, and staged ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from benchmarks.alternating import Contender

_STAGING_BYTES: Final = 16 << 20
_STREAMS: Final = (2, 4)


def copy_contenders(nbytes: int, least: float) -> Mapping[str, Sequence[Contender]]:
    """Return copies of an array to the device and back, by the name of the case.

    Args:
        nbytes: bytes of the array.
        least: target: the time of an asynchronous copy of pinned memory, divided by ours.
    """
    import torch

    on_device, source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda"), torch.ones(nbytes, dtype=torch.uint8)
    pinned, pageable = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True), source.clone()

    def case(ours: Callable[[], None], *, to_host: bool) -> Sequence[Contender]:
        def copy(host: Any, count: int) -> Callable[[], None]:
            target, origin = (host, on_device) if to_host else (on_device, host)
            return partial(_in_streams, target, origin, count)

        contenders = [
            Contender("ckptcore", ours),
            Contender("pinned.copy_", copy(pinned, 1), target=least),
            Contender("pageable.copy_", copy(pageable, 1)),
        ]
        for count in _STREAMS:
            contenders.append(Contender(f"pinned, {count} streams", copy(pinned, count)))
            contenders.append(Contender(f"pageable, {count} streams", copy(pageable, count)))
        pair = (pageable, on_device) if to_host else (on_device, pageable)
        for count in (1, *_STREAMS):
            staged = partial(_Staging(count, to_host=to_host).copy, *pair)
            contenders.append(Contender(f"staged, {count} streams", staged))
        return contenders

    return {
        "copy: host to device": case(lambda: _fill(on_device, source), to_host=False),
        "copy: device to host": case(lambda: _to_host(on_device, source), to_host=True),
    }


def _fill(target: Any, source: Any) -> None:
    """Fill a tensor as a load does."""
    import torch
    from ckptcore_torch.tensors import TensorHandler

    from ckptcore.model import Box

    handler = TensorHandler()
    handler.fill(target, handler.describe(target), [(Box.whole(tuple(target.shape)), source.numpy())])
    torch.cuda.synchronize()


def _to_host(source: Any, target: Any) -> None:
    """Copy a tensor as a save does."""
    from ckptcore_torch.transfers import start_copy

    start_copy(source, target.numpy()).result()


def _in_streams(target: Any, source: Any, count: int) -> None:
    """Copy equal parts, each in a thread with a stream."""
    import torch

    def work(into: Any, part: Any) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # not typed by PyTorch
        with torch.cuda.stream(stream):
            into.copy_(part, non_blocking=True)
        stream.synchronize()

    _in_threads(work, target, source, count)


def _in_threads(work: Callable[[Any, Any], None], target: Any, source: Any, count: int) -> None:
    if count == 1:
        work(target, source)
        return
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, target.chunk(count), source.chunk(count)))


class _Staging:
    """Copies of pageable memory through pinned buffers: two for each stream, which has a thread.

    While the device empties or fills one buffer, the thread fills or empties the other one.
    """

    def __init__(self, streams: int, *, to_host: bool) -> None:
        import torch

        self._count, self._to_host = streams, to_host
        buffer = partial(torch.empty, _STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        stream: Any = torch.cuda.Stream
        self._idle = deque((stream(), [buffer(), buffer()]) for _ in range(streams))

    def copy(self, target: Any, source: Any) -> None:
        """Copy bytes."""
        _in_threads(self._work, target, source, self._count)

    def _work(self, target: Any, source: Any) -> None:
        import torch

        stream, buffers = self._idle.popleft()
        running: deque[tuple[Any, Any, Any]] = deque()
        with torch.cuda.stream(stream):
            for number, (into, part) in enumerate(
                zip(target.split(_STAGING_BYTES), source.split(_STAGING_BYTES), strict=True)
            ):
                if len(running) == len(buffers):
                    self._arrive(*running.popleft())
                buffer = buffers[number % len(buffers)][: part.numel()]
                buffer.copy_(part, non_blocking=self._to_host)
                if not self._to_host:
                    into.copy_(buffer, non_blocking=True)
                running.append((stream.record_event(), into, buffer))
            while running:
                self._arrive(*running.popleft())
        self._idle.append((stream, buffers))

    def _arrive(self, event: Any, into: Any, buffer: Any) -> None:
        event.synchronize()
        if self._to_host:
            into.copy_(buffer)
