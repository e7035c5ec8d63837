"""How long a training loop stands still for a save in the background, beside Orbax's Checkpointer and DCP's async_save.

Each contender trains the same loop: steps of at least 50 ms on the main thread, a save every few of them. What a save costs
the loop is the time that the call blocks it; what it waits for the save before is told apart. Contenders take turns, and one
begins only when the one before has written everything.
"""

from __future__ import annotations

import gc
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

import ckptcore
from ckptcore.events import Event

__all__ = ["stall_rows"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_STEP_SECONDS = 0.05


@dataclass(slots=True)
class _Cost:
    """What the saves of a contender cost the loop, in seconds and bytes, a number for each save."""

    blocked: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


class _Saver(Protocol):
    """A library under test, opened on a fresh directory."""

    def save(self, step: int) -> tuple[float, float]:
        """Seconds for which the loop was blocked by the save itself, and by waiting for the one before."""
        ...

    def finish(self) -> None:
        """Wait until all is written."""
        ...


class _Ours:
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


class _Orbax:
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


class _DCP:
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


def stall_rows(scratch: Path, rounds: int, megabytes: int = 200) -> Iterator[tuple[str, bool]]:
    """Rows to print, and whether each reached its target: lower than the peer."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    arrays = {f"layer_{number}": np.full(megabytes * 250_000 // 40, number, np.float32) for number in range(40)}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    import jax

    jax_arrays = {name: jax.numpy.asarray(array) + 0 for name, array in arrays.items()}
    for array in jax_arrays.values():
        array.block_until_ready()
    kept = {name: array.copy() for name, array in arrays.items()}
    raw = statistics.median(_copy_seconds(kept, arrays) for _ in range(7))
    yield f"{f'stall, {megabytes} MB':32} {'raw memcpy, one thread':24} blocked {raw * 1e3:8.2f} ms", True
    for every, told in ((4, "every 4th step"), (1, "every step")):
        for peer, opener, state in (
            ("DCP async_save", _DCP, tensors),
            ("Orbax Checkpointer", _Orbax, jax_arrays),
        ):
            costs = _alternate(scratch, [opener, _Ours], state, rounds, every)
            yield from _rows(f"stall, {megabytes} MB, {told}", peer, costs)


def _copy_seconds(targets: Mapping[str, Array], sources: Mapping[str, Array]) -> float:
    start = time.perf_counter()
    for name, source in sources.items():
        np.copyto(targets[name], source)
    return time.perf_counter() - start


def _alternate(
    scratch: Path, openers: Sequence[Callable[[Path, Any, _Cost], _Saver]], state: Any, rounds: int, every: int
) -> Sequence[_Cost]:
    costs = [_Cost() for _ in openers]
    for number in range(-1, rounds):
        order = list(range(len(openers)))
        shift = number % len(order)
        for position in [*order[shift:], *order[:shift]]:
            cost = costs[position] if number >= 0 else _Cost()
            _train(scratch / "run", openers[position], state, cost, every)
    return costs


def _train(directory: Path, opener: Callable[[Path, Any, _Cost], _Saver], state: Any, cost: _Cost, every: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    saver = opener(directory, state, cost)
    gc.collect()
    weights = np.ones((256, 256), np.float32)
    for step in range(1, 3 * every + 1 if every > 1 else 5):
        until = time.perf_counter() + _STEP_SECONDS
        while time.perf_counter() < until:
            weights = np.tanh(weights @ weights)
        if step % every == 0:
            blocked, waited = saver.save(step)
            cost.blocked.append(blocked)
            cost.waited.append(waited)
    saver.finish()
    shutil.rmtree(directory, ignore_errors=True)


def _rows(name: str, peer: str, costs: Sequence[_Cost]) -> Iterator[tuple[str, bool]]:
    theirs, ours = costs
    their_blocked, our_blocked = statistics.median(theirs.blocked), statistics.median(ours.blocked)
    for label, cost in ((peer, theirs), ("ckptcore.Checkpointer", ours)):
        blocked, waited = statistics.median(cost.blocked) * 1e3, statistics.median(cost.waited) * 1e3
        copied = f"{statistics.median(cost.copied) / 1e6:.0f} MB copied" if cost.copied else ""
        ratio = their_blocked / statistics.median(cost.blocked)
        is_ours = cost is ours
        verdict = ("lower reached" if our_blocked < their_blocked else "lower MISSED") if is_ours else ""
        yield (
            f"{name:32} {label:24} blocked {blocked:8.2f} ms  waited {waited:8.2f} ms {ratio:7.2f}  {copied:15} {verdict}",
            not is_ours or our_blocked < their_blocked,
        )
