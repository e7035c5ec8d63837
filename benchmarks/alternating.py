"""Timing of contenders in turn, so that noise of the machine affects all of them equally."""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import PageCache, Row


@dataclass(frozen=True, slots=True)
class Contender:
    """An operation to time.

    Attributes:
        name: its name in the table.
        run: the operation.
        prepare: called before each run, not timed.
        after: called with the result of each run, not timed.
        seconds: returns the time from the result, for runs that measure it themselves.
        target: minimum of the time of this contender divided by that of ckptcore; None: not checked.
    """

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], object] = lambda: None
    after: Callable[[Any], object] = lambda _: None
    seconds: Callable[[Any], float] | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A comparison. The first contender is an operation of ckptcore, and the others are compared with it.

    Attributes:
        name: its name in the table.
        contenders: at least one.
        nbytes: bytes that each run saves, loads or copies; 0 if the time is not proportional to them.
        writes: the runs write files. The system then writes back all dirty pages before each run, and the rows report
            the page cache.
        memory: bytes of memory to fault in before each run. None: `nbytes`, or twice that if the case writes.
    """

    name: str
    contenders: Sequence[Contender]
    nbytes: int = 0
    writes: bool = False
    memory: int | None = None


@dataclass(slots=True)
class Times:
    """Measurements of a contender, one for each round.

    Attributes:
        seconds: wall-clock time, or the time that the run measured itself.
        cpu: processor time of this process, in seconds.
        nbytes_read: bytes that this process read from files, as Linux counts them, whether they were in the page cache
            or not.
        page_caches: state of the page cache before the run, if the case writes.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    nbytes_read: list[int] = field(default_factory=list)
    page_caches: list[PageCache] = field(default_factory=list)


def huge(nbytes: int) -> memoryview:
    """Return fresh memory, in huge pages if the system has them."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def _fault_in(nbytes: int) -> None:
    """Write to every page of fresh memory and free it.

    The host of a virtual machine takes back memory that was free for a while. The next program that uses it waits for
    the host, five times as long as a load takes. After this call the memory is available to every contender.
    """
    if nbytes:
        pages = huge(nbytes)
        pages[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))


def compare(case: Case, rounds: int) -> Sequence[Row]:
    """Measure a case in this process."""
    return timed_rows(case, measure(case, rounds))


def measure(
    case: Case,
    rounds: int,
    barrier: Callable[[], object] = lambda: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Mapping[str, Times]:
    """Run every contender once per round, after a warm-up round. Each round begins with another contender.

    Args:
        case: the comparison.
        rounds: number of timed rounds.
        barrier: called before and after each run; waits for the other processes of a job, which call this too.
        go_on: called before each timed round but the first; False ends the measurement.
    """
    contenders = case.contenders
    memory = case.nbytes * (2 if case.writes else 1) if case.memory is None else case.memory
    times = {contender.name: Times() for contender in contenders}
    for number in range(-1, rounds):
        if number > 0 and not go_on():
            break
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            into = times[contender.name] if number >= 0 else Times()
            contender.prepare()
            if case.writes:
                os.sync()
            _fault_in(memory)
            if case.writes:
                into.page_caches.append(PageCache.now())
            barrier()
            result = run_once(contender, into)
            barrier()
            contender.after(result)
    return times


def run_once(contender: Contender, into: Times) -> Any:
    """Run a contender, add its times to those of other rounds, and return its result."""
    gc.collect()
    gc.disable()
    try:
        read, cpu, start = _bytes_read(), time.process_time(), time.perf_counter()
        result = contender.run()
        stop, cpu_stop, read_stop = time.perf_counter(), time.process_time(), _bytes_read()
    finally:
        gc.enable()
    into.seconds.append(stop - start if contender.seconds is None else contender.seconds(result))
    into.cpu.append(cpu_stop - cpu)
    into.nbytes_read.append(read_stop - read)
    return result


def _bytes_read() -> int:
    path = Path("/proc/self/io")
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    return 0


def timed_rows(case: Case, times: Mapping[str, Times]) -> Sequence[Row]:
    """Summarise the measurements of a case, by contender."""
    ours = times[case.contenders[0].name].seconds
    rows = []
    for contender in case.contenders:
        own = times[contender.name]
        ratio = statistics.median([theirs / base for theirs, base in zip(own.seconds, ours, strict=True)])
        row = Row(
            case.name,
            contender.name,
            statistics.median(own.seconds),
            ratio=ratio,
            spread=_spread(own.seconds),
            cpu=statistics.median(own.cpu) if own.cpu else None,
            nbytes=case.nbytes,
            target="" if contender.target is None else f"at least {contender.target:.2f}",
            reached=contender.target is None or ratio >= contender.target,
            page_cache=_median(own.page_caches),
        )
        rows.append(row)
    return rows


def _spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range divided by the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def _median(times: Sequence[PageCache]) -> PageCache | None:
    if not times:
        return None
    columns = ([cache.free for cache in times], [cache.cached for cache in times], [cache.dirty for cache in times])
    free, cached, dirty = (int(statistics.median(column)) for column in columns)
    return PageCache(free, cached, dirty)
