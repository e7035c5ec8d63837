"""Timing contenders in turn, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import gc
import json
import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Contender", "Outcome", "compare", "huge", "outcomes_of_ranks", "touch"]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time.

    Attributes:
        name: in the table.
        run: what is timed.
        prepare: what is done before each run, not timed.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The times of a contender.

    Attributes:
        name: in the table.
        seconds: of each round.
        ratios: of each round: the first contender's time divided by this one's; above 1 is faster than the first.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median time, in seconds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)


def huge(nbytes: int) -> memoryview:
    """Fresh memory in huge pages where the system has them."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def touch(nbytes: int) -> None:
    """Take memory, write to every page of it and give it back.

    The host of a virtual machine takes back memory that is free for a while, and the next program that is given it waits
    for the host: five times as long as a load takes, in runs that nobody can foresee. After this the machine has the
    memory at hand, whichever contender is next.
    """
    if nbytes:
        pages = huge(nbytes)
        pages[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))


def compare(contenders: Sequence[Contender], *, rounds: int, warm_up: int = 1, memory: int = 0) -> Sequence[Outcome]:
    """Run every contender once per round, each round beginning with another one; the first is what others are compared with.

    Args:
        contenders: what is timed, the reference first.
        rounds: how often.
        warm_up: rounds before them, not timed.
        memory: bytes of memory that are touched before each run.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(-warm_up, rounds):
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            contender.prepare()
            touch(memory)
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            kept = contender.run()
            seconds = time.perf_counter() - start
            gc.enable()
            del kept
            if number >= 0:
                times[contender.name].append(seconds)
    return _outcomes(times)


def outcomes_of_ranks(results: Path) -> Sequence[Outcome]:
    """What the processes of a job measured: a round takes as long as the slowest of them.

    Args:
        results: a directory with a file of JSON for each rank: by contender, the reference first, the seconds of each round.
    """
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.iterdir())]
    return _outcomes({name: [max(of_round) for of_round in zip(*[rank[name] for rank in ranks], strict=True)]
                      for name in ranks[0]})  # fmt: skip


def _outcomes(times: Mapping[str, Sequence[float]]) -> Sequence[Outcome]:
    """By contender, the reference first, with the seconds of each round."""
    first, *_ = times.values()
    return [
        Outcome(name, tuple(own), tuple(reference / mine for reference, mine in zip(first, own, strict=True)))
        for name, own in times.items()
    ]
