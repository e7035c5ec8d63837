"""Recovery from steps in memory, compared with other ways: from the kill of a job to its first new step.

A job of torch with gloo has one process on each host. One host is lost: its process and its memory. The launcher ends
the other processes, and starts as many again, forked from a process that has imported all libraries. All contenders
load the same bytes: the state is sharded over the processes. The phases are:

- detection: from the kill until the last new process runs. A real launcher takes longer.
- agreement: until all processes have a process group, and know what to load from where.
- transfer: the bytes are moved.
- building: the rest: the memory of the state before, and until all processes have finished a step.

The processor time is that of all new processes until their first step, and what the servers used meanwhile. A note
divides it: if there are more processes than processors, it decides how long all of them take.

The start of a program is not measured: all processes are forked from one that has imported all libraries, and the
memory server of the spare host runs already, as if a launcher had started it (see the how-to). In the row "no server
yet" the new process starts it, which is the start of an interpreter. torchft keeps a second, healthy replica group of
as many processes, whose servers run. Its managers, which would agree on who is healthy, are left out: the address is
known. The loads of all others agree among the new processes.

Each contender has its best configuration. ckptcore verifies all bytes, lm-resiliency those that TorchDistTransfer
sends; DCP and torchft verify nothing. Files on disk are removed from the page cache, in which a spare host would not
have them either. lm-resiliency writes what survived to files when its processes get SIGTERM, and reads them in new
processes; here these files are in memory, and hosts share them.

The row "plain sockets, verified" is a bound without ckptcore: servers hold the parts of processes in memory, and new
processes receive their own part, verify it, and meet in the first step. It finds nothing, and copies nothing again.

Further rows: the transfer alone, between two network namespaces with a limited rate and on the loopback interface; the
time for which a save into memory blocks the training; the slowdown of the steps of training by copies.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import recovery_processes as processes
from benchmarks.alternating import Case, Contender, compare
from benchmarks.killed_jobs import Forker, KilledJob
from benchmarks.limited_network import NetworkHost, NetworkUnavailableError, limited_hosts
from benchmarks.recovery_processes import ARRAYS, COLUMNS
from benchmarks.report import Row
from benchmarks.setting import Setting

_SIZES: Final = (2, 4, 8, 16)
_BYTES: Final = 1 << 29
_LINK_BYTES: Final = 1 << 27
_RATES: Final = (125e6, 500e6, None)
"""Rates of networks in bytes per second: 1 and 4 Gbit/s, and the loopback interface."""

_ROUNDS: Final = 5
"""The maximum number of rounds."""

_SHARE: Final = 0.8
"""Target: this share of a limited rate."""

_BLOCKED_SHARE: Final = 0.8
"""Target: the time for which a save into a directory in memory blocks, divided by that of a save into the memory of
hosts. Both copy the state."""

_LIMIT: Final = 100e6
"""A rate of copies, in bytes per second."""


def rows(setting: Setting) -> Iterator[Row]:
    """Kill jobs, limit networks, and train."""
    with tempfile.TemporaryDirectory(prefix="ckptcore-bench-", dir="/dev/shm") as memory:
        forker = Forker()
        try:
            # At most 15 minutes on two processors.
            setting = replace(setting, rounds=min(setting.rounds, _ROUNDS))
            for size in [size for size in _SIZES if size <= setting.count(_SIZES[-1], least=2)]:
                yield from _killed(setting, Path(memory), forker, size)
            yield from _training(setting, Path(memory), forker)
        finally:
            forker.close()
        for rate in _RATES:
            try:
                yield from _transfer(setting, Path(memory), rate)
            except NetworkUnavailableError as error:
                print(f"recovery: rows of limited networks are left out: {error}", file=sys.stderr)


def _installed(*names: str) -> Sequence[str]:
    """Return the contenders that are installed."""
    missing = set()
    if not processes.HAS_TORCHFT:
        missing.add(processes.TORCHFT)
    if not processes.HAS_LM_RESILIENCY:
        missing |= {processes.LM_RESILIENCY, processes.LM_TRANSFER}
    if left_out := missing & set(names):
        print(f"recovery: {', '.join(sorted(left_out))}: not installed; call make bench-recovery", file=sys.stderr)
    return [name for name in names if name not in missing]


def _rows_of_arrays(setting: Setting, size: int, nbytes: int = _BYTES) -> int:
    return max(1, setting.count(nbytes) // (ARRAYS * COLUMNS * 4) // size) * size


def _jobs(
    setting: Setting,
    memory: Path,
    forkers: Sequence[Forker],
    size: int,
    names: Sequence[str],
    networks: Sequence[NetworkHost] = (),
    nbytes: int = _BYTES,
) -> Mapping[str, KilledJob]:
    return {
        name: KilledJob(
            name,
            size,
            _rows_of_arrays(setting, size, nbytes),
            forkers,
            setting.directory / f"{number}-{size}",
            memory / f"{number}-{size}",
            networks,
        )
        for number, name in enumerate(names)
    }


def _killed(setting: Setting, memory: Path, forker: Forker, size: int) -> Iterator[Row]:
    """Kill a job of each contender."""
    ours = (processes.MEMORY, processes.COLD, processes.DISK)
    names = _installed(*ours, processes.DCP, processes.TORCHFT, processes.LM_RESILIENCY, processes.PLAIN)
    jobs = _jobs(setting, memory, [forker], size, names)
    nbytes = _rows_of_arrays(setting, size) * ARRAYS * COLUMNS * 4
    try:
        contenders = [
            Contender(
                name,
                job.recover,
                job.prepare,
                job.clear,
                lambda recovery: float(recovery.total),
                None if name in (*ours, processes.PLAIN) else 1.0,
            )
            for name, job in jobs.items()
        ]
        case = Case(f"recovery: {size} processes, {nbytes >> 20} MiB", contenders, memory=nbytes)
        for row in compare(case, setting.rounds):
            yield replace(row, cpu=None, note=jobs[row.contender].note())
        results = jobs[processes.MEMORY].results
        counts = statistics.median([result.messages for result in results])
        yield Row(f"recovery: restart of {size} hosts", "messages of a host, at most", counts, "messages")
        moved = statistics.median([result.nbytes for result in results])
        yield Row(f"recovery: restart of {size} hosts", "bytes of a host, at most", moved, "B")
    finally:
        for job in jobs.values():
            job.close()


def _transfer(setting: Setting, memory: Path, rate: float | None) -> Iterator[Row]:
    """Lose one of two hosts. Measure how long the other one sends half of the state."""
    names = _installed(processes.MEMORY, processes.SOCKET, processes.TORCHFT, processes.LM_TRANSFER)
    with ExitStack() as stack:
        networks: Sequence[NetworkHost] = () if rate is None else stack.enter_context(limited_hosts(rate))
        forkers = [Forker(network) for network in networks] or [Forker()]
        for forker in forkers:
            stack.callback(forker.close)
        jobs = _jobs(setting, memory, forkers, 2, names, networks, 2 * _LINK_BYTES)
        for job in jobs.values():
            stack.callback(job.close)
        nbytes = _rows_of_arrays(setting, 2, 2 * _LINK_BYTES) * ARRAYS * COLUMNS * 4 // 2
        contenders = [
            Contender(name, job.recover, job.prepare, job.clear, lambda recovery: float(recovery.seconds["transfer"]))
            for name, job in jobs.items()
        ]
        place = "loopback" if rate is None else f"{rate * 8 / 1e9:.0f} Gbit/s"
        case = Case(f"recovery: transfer, {place}, {nbytes >> 20} MiB", contenders, nbytes=nbytes, memory=nbytes)
        for row in compare(case, setting.rounds):
            if rate is None:
                yield replace(row, cpu=None)
                continue
            share = nbytes / rate / row.median
            target = f"at least {_SHARE:.0%} of the rate" if row.contender == processes.MEMORY else ""
            yield replace(
                row, cpu=None, target=target, reached=not target or share >= _SHARE, note=f"{share:.0%} of the rate"
            )


def _training(setting: Setting, memory: Path, forker: Forker) -> Iterator[Row]:
    """Train on two hosts, which copy each other's steps."""
    nbytes = _rows_of_arrays(setting, 2) * ARRAYS * COLUMNS * 4 // 2

    def train(name: str, every: int, limit: float | None) -> Mapping[str, Any]:
        (job,) = _jobs(setting, memory, [forker], 2, [name]).values()
        try:
            return job.train(every=every, bytes_per_second=limit)
        finally:
            job.close()

    def blocked(result: Mapping[str, Any]) -> float:
        times = zip(result["blocked"], result["waited"], strict=True)
        return float(statistics.median([total - waited for total, waited in times]))

    copied: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}

    def note(name: str, result: Mapping[str, Any]) -> None:
        copied.setdefault(name, []).extend(result["copied"])
        shares.setdefault(name, []).extend(result["shares"])

    saving = [
        Contender(
            name, partial(train, name, 6, None), after=partial(note, name), seconds=blocked,
            target=_BLOCKED_SHARE if name == processes.TMPFS else None,
        )
        for name in (processes.MEMORY, processes.TMPFS)
    ]  # fmt: skip
    case = Case(f"recovery: a save blocks, {nbytes >> 20} MiB of each host", saving, nbytes=nbytes, memory=nbytes)
    for row in compare(case, setting.rounds):
        seconds, share = statistics.median(copied[row.contender]), statistics.median(shares[row.contender])
        text = f"of which the copy takes {seconds:.4f} s; the calling thread uses {share:.2f} of a plain copy"
        yield replace(row, cpu=None, note=text)
    training = [
        Contender(label, partial(train, name, every, limit), seconds=lambda result: statistics.fmean(result["steps"]))
        for label, name, every, limit in (
            (processes.NOTHING, processes.NOTHING, 0, None),
            ("saves at each 6th step", processes.MEMORY, 6, None),
            (f"saves at each 6th step, {_LIMIT / 1e6:.0f} MB/s", processes.MEMORY, 6, _LIMIT),
        )
    ]
    case = Case("recovery: a step of training", training, memory=nbytes)
    for row in compare(case, setting.rounds):
        yield replace(row, cpu=None)
