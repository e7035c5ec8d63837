"""The time for which asynchronous saves block a training loop, compared with Orbax and async_save of DCP.

Each contender runs the same loop: steps of at least 50 ms on the main thread, and a save every few steps. The cost of a
save is the time for which the call blocks the loop. Its wait for the previous save is reported separately.
Contenders take turns; each starts after the previous one has written everything.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.events import Event

Array: TypeAlias = "np.ndarray[Any, Any]"

_STEP_SECONDS = 0.05
_ARRAYS = 40
_ARRAY_ELEMENTS = 1_250_000
"""Elements of float32 in each array: 200 MB in total."""


@dataclass(slots=True)
class _Cost:
    """Further costs of the saves of a contender, in seconds and bytes, one number for each save."""

    waited: list[float] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)

    def note(self) -> str:
        """Return medians."""
        copied = f", {statistics.median(self.copied) / 1e6:.0f} MB copied" if self.copied else ""
        return f"waited {statistics.median(self.waited) * 1e3:.2f} ms{copied}"


class _Saver(Protocol):
    """A library under test, with an empty directory."""

    def save(self, step: int) -> tuple[float, float]:
        """Save. Return the seconds for which the save blocked the loop, and those of waiting for the previous save."""
        ...

    def finish(self) -> None:
        """Wait until everything is written."""
        ...


class _CkptcoreSaver:
    def __init__(self, directory: Path, state: Any, cost: _Cost) -> None:
        self._events: list[Event] = []
        context = ckptcore.Context(observers=[self._events.append])
        self._checkpointer = ckptcore.Checkpointer(directory, context=context)
        self._state = state
        self._cost = cost

    def save(self, step: int) -> tuple[float, float]:
        """See `_Saver`."""
        start = time.perf_counter()
        self._checkpointer.save(step, self._state)
        total = time.perf_counter() - start
        phases = {event.phase: event for event in list(self._events) if event.step == step}
        waited = phases["wait_for_previous"].seconds
        self._cost.copied.append(phases["copy"].nbytes or 0)
        return total - waited, waited

    def finish(self) -> None:
        """See `_Saver`."""
        self._checkpointer.close()


class _OrbaxSaver:
    def __init__(self, directory: Path, state: Any, cost: _Cost) -> None:
        from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no type stubs

        self._checkpointer = v1.training.Checkpointer(directory)
        self._state = state
        self._pending: Any = None

    def save(self, step: int) -> tuple[float, float]:
        """See `_Saver`."""
        start = time.perf_counter()
        if self._pending is not None:
            self._pending.result()
        waited = time.perf_counter() - start
        start = time.perf_counter()
        self._pending = self._checkpointer.save_async(step, self._state, force=True)
        return time.perf_counter() - start, waited

    def finish(self) -> None:
        """See `_Saver`."""
        if self._pending is not None:
            self._pending.result()
        self._checkpointer.close()


class _DcpSaver:
    def __init__(self, directory: Path, state: Any, cost: _Cost) -> None:
        self._directory = directory
        self._state = state
        self._pending: Any = None

    def save(self, step: int) -> tuple[float, float]:
        """See `_Saver`."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        start = time.perf_counter()
        if self._pending is not None:
            self._pending.result()
        waited = time.perf_counter() - start
        start = time.perf_counter()
        self._pending = async_save(self._state, checkpoint_id=self._directory / str(step), no_dist=True)
        return time.perf_counter() - start, waited

    def finish(self) -> None:
        """See `_Saver`."""
        if self._pending is not None:
            self._pending.result()


def rows(setting: Setting) -> Iterator[Row]:
    """Train loops that save every few steps, and measure for how long each save blocks them."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    elements = setting.count(_ARRAY_ELEMENTS)
    arrays = {f"layer_{number}": np.full(elements, number, np.float32) for number in range(_ARRAYS)}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    import jax

    jax_arrays = {name: jax.numpy.asarray(array) + 0 for name, array in arrays.items()}
    for array in jax_arrays.values():
        array.block_until_ready()
    targets = {name: array.copy() for name, array in arrays.items()}
    size = sum(array.nbytes for array in arrays.values())
    for every, frequency in ((4, "every 4th step"), (1, "every step")):
        steps = range(1, 3 * every + 1 if every > 1 else 5)
        for kind, peer, opener, state in (
            ("of torch", "DCP async_save", _DcpSaver, tensors),
            ("of JAX", "Orbax Checkpointer", _OrbaxSaver, jax_arrays),
        ):
            costs = {"ckptcore.Checkpointer": _Cost(), peer: _Cost()}
            contenders = [
                Contender(
                    name,
                    partial(_train, setting.directory / "run", of_one, state, costs[name], steps, every),
                    seconds=statistics.median,
                    target=None if of_one is _CkptcoreSaver else 1.0,
                )
                for name, of_one in (("ckptcore.Checkpointer", _CkptcoreSaver), (peer, opener))
            ]
            memcpy = Contender(
                "memcpy, one thread", partial(_copy_seconds, targets, arrays), seconds=lambda seconds: float(seconds)
            )
            case = Case(
                f"stall, {size / 1e6:.0f} MB {kind}, {frequency}", [*contenders, memcpy], writes=True, memory=2 * size
            )
            for row in compare(case, setting.rounds):
                yield replace(row, cpu=None, note=costs[row.contender].note() if row.contender in costs else "")


def _copy_seconds(targets: Mapping[str, Array], sources: Mapping[str, Array]) -> float:
    start = time.perf_counter()
    for name, source in sources.items():
        np.copyto(targets[name], source)
    return time.perf_counter() - start


def _train(
    directory: Path,
    opener: Callable[[Path, Any, _Cost], _Saver],
    state: Any,
    cost: _Cost,
    steps: Sequence[int],
    every: int,
) -> Sequence[float]:
    """Train in a new directory; return the seconds for which each save blocked the loop."""
    directory.mkdir(parents=True)
    saver = opener(directory, state, cost)
    weights = np.ones((256, 256), np.float32)
    all_blocked = []
    for step in steps:
        until = time.perf_counter() + _STEP_SECONDS
        while time.perf_counter() < until:
            weights = np.tanh(weights @ weights)
        if step % every == 0:
            blocked, waited = saver.save(step)
            all_blocked.append(blocked)
            cost.waited.append(waited)
    saver.finish()
    shutil.rmtree(directory)
    return all_blocked
