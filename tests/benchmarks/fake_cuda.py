"""Runs ``benchmarks.gpu`` without a device: memory of the device and pinned memory are memory of the host.

``python -m tests.benchmarks.fake_cuda [--step SECONDS] ARGUMENTS``. With ``--step`` the clock of the run is simulated:
each look at it takes so long.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import safetensors.torch
import torch
from torch.overrides import TorchFunctionMode

from benchmarks import gpu

FREE_BYTES: Final = 40 << 20
"""Free memory of the device: 16 MiB of state fit."""


class Event:
    """An event of a stream without work."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that the work before it is done."""
        return True


class Stream(Event):
    """A stream without work: copies are done when they return."""

    def __init__(self, device: object = None) -> None:
        self.device = device

    def record_event(self) -> Event:
        """Return an event."""
        return Event()

    def wait_event(self, event: Event) -> None:
        """Do nothing."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""


class _OnHost(TorchFunctionMode):
    """Creates tensors of the device and pinned tensors in memory of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return func(*args, **options)


_FAKES: Final[dict[str, Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "a fake device",
    "mem_get_info": lambda device=None: (FREE_BYTES, 2 * FREE_BYTES),
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: Stream(),
    "stream": contextlib.nullcontext,
    "Stream": Stream,
    "Event": Event,
}


def main(arguments: list[str]) -> int:
    """Run the benchmark with fakes of `torch.cuda`."""
    clock: Callable[[], float] = time.monotonic
    if arguments[:1] == ["--step"]:
        clock = itertools.count(0.0, float(arguments[1])).__next__
        arguments = arguments[2:]
    for name, fake in _FAKES.items():
        setattr(torch.cuda, name, fake)
    load_file = safetensors.torch.load_file
    setattr(safetensors.torch, "load_file", lambda file, device: load_file(file))  # noqa: B010  # another signature
    with _OnHost():
        return gpu.main(arguments, clock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
