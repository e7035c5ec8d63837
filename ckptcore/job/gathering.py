"""Gathering: messages of all ranks of a job to the leader and back.

In a small job every rank sends its data to the leader. A larger job is divided into blocks of ranks, and the first rank
of a block sends the data of its block. The leader then receives one message for each block, and the work of all other
ranks does not grow with the job. If an operation waits long for some ranks, one line in the log names them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

from ckptcore.errors import CheckpointError, CoordinationTimeoutError
from ckptcore.events import logger_named
from ckptcore.protocols import Coordinator, GathersInGroups, ReportsAwaited

logger = logger_named("ckptcore.job")


BLOCK_RANKS: Final = 64
"""Number of ranks in a block. A job of up to this many ranks is not divided."""

_SHOWN: Final = 100
_SHOWN_LATE: Final = 20
_LATE_SECONDS: Final = 1.0
"""The maximum time in seconds by which a timer is late: it may begin while its thread waits for a later one."""

_COMPRESSION: Final = 1
"""The fastest level of zlib. It is enough, because the messages of a block are similar."""


class _Timers:
    """The timers of this process that have not fired. One thread waits for all of them, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Timer] = set()
        self._is_running = False

    def add(self, timer: Timer) -> None:
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, name="ckptcore-timers", daemon=True).start()
                self._is_running = True
            self._waiting.add(timer)

    def remove(self, timer: Timer) -> None:
        with self._lock:
            self._waiting.discard(timer)

    def _run(self) -> None:
        was_idle = False
        while True:
            with self._lock:
                now = time.monotonic()
                for timer in [timer for timer in self._waiting if timer.due <= now]:
                    with suppress(RuntimeError):  # the system has no more threads: try again after the pause
                        threading.Thread(target=timer.fire, name="ckptcore-timer", daemon=True).start()
                        self._waiting.remove(timer)
                if not self._waiting and was_idle:
                    self._is_running = False
                    return
                was_idle = not self._waiting
                pause = min([_LATE_SECONDS, *[timer.due - now for timer in self._waiting if timer.due > now]])
            time.sleep(pause)


@functools.cache
def _timers(process: int) -> _Timers:
    """Return the timers of this process. A forked child has its own."""
    return _Timers()


class Timer:
    """Calls a function after some time, at most a second late, or once the system has a thread for it.

    Unlike a `threading.Timer` it has no thread of its own. Starting one for each exchange took as long as the exchange.
    """

    def __init__(self, seconds: float, function: Callable[..., object], arguments: Sequence[Any]) -> None:
        """Describe the call.

        Args:
            seconds: the time until the call.
            function, arguments: the call.
        """
        self.due = time.monotonic() + seconds
        self.fire = functools.partial(function, *arguments)
        self._timers = _timers(os.getpid())

    def start(self) -> None:
        """Begin to wait.

        Raises:
            RuntimeError: the program ends, or the system has no more threads.
        """
        self._timers.add(self)

    def cancel(self) -> None:
        """Do not call the function, unless that has begun."""
        self._timers.remove(self)


class LateRanks:
    """Logs which ranks an exchange of an operation waits for, once per operation. Thread-safe.

    Attributes:
        first_seconds: the wait before the line is logged, if this operation has received no answer of another rank yet.
            It is short, because a rank often does not make the call at all: only rank 0 saves, or a rank skips a step.
        later_seconds: the same in later exchanges. It is longer, because a rank may write for minutes.
    """

    first_seconds: ClassVar[float] = 10.0
    later_seconds: ClassVar[float] = 60.0

    def __init__(self, call: str, rank: int, size: int) -> None:
        """Log nothing yet.

        Args:
            call: the operation, such as ``save of /data/run/step-100``.
            rank, size: the rank of this process, and the number of processes of the job.
        """
        self._call = call
        self._rank = rank
        self._size = size
        self._has_answer = False
        self._logged = threading.Lock()  # acquired when the line is logged, and never released

    @contextmanager
    def watch(self, coordinator: Coordinator, key: str, *, ranks: Sequence[int], answers: bool) -> Iterator[None]:
        """Watch an exchange in the body.

        Args:
            coordinator: exchanges the messages.
            key: the key of the exchange.
            ranks: the ranks in the job, by rank of the coordinator.
            answers: True if this rank has an answer of the other ranks once the exchange has ended.
        """
        if self._logged.locked():
            yield
            return
        seconds = self.later_seconds if self._has_answer else self.first_seconds
        timer = Timer(seconds, self._log, [seconds, lambda: _awaited(coordinator, key, ranks)])
        with suppress(RuntimeError):  # the program ends, or the system has no more threads: nothing is logged
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._has_answer = self._has_answer or answers

    def _log(self, seconds: float, awaited: Callable[[], Sequence[int] | None]) -> None:
        ranks = awaited()
        if ranks is None or not self._logged.acquire(blocking=False):
            return
        shown = ", ".join(map(str, ranks[:_SHOWN_LATE])) + (", ..." if len(ranks) > _SHOWN_LATE else "")
        missing = f"{len(ranks)} of {self._size} ranks: {shown}" if ranks else f"some of {self._size} ranks"
        if self._has_answer:
            hint = "They have not finished this stage, or have failed: see their logs"
        else:
            hint = (
                "All ranks of the job must make this call. Look for a condition such as `if rank == 0:` around it, for "
                "a rank that skipped a step, and for errors in their logs"
            )
        if self._rank != 0 and list(ranks) == [0]:
            hint += ". Rank 0 leads: it may itself wait for others, which its own log names"
        text = f"{self._call}: rank {self._rank} has waited {seconds:g} s for {missing}. {hint}"
        logger.warning("%s", text)
        if logger.isEnabledFor(logging.WARNING) and not _is_shown(logger):
            print(f"ckptcore: {text}", file=sys.stderr)  # without it, a job that seems to hang prints nothing


def _is_shown(logger: logging.Logger) -> bool:
    """Return True if the program has configured a handler for the records of a logger."""
    ancestor: logging.Logger | None = logger
    while ancestor is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in ancestor.handlers):
            return True
        ancestor = ancestor.parent if ancestor.propagate else None
    return False


def _awaited(coordinator: Coordinator, key: str, ranks: Sequence[int]) -> Sequence[int] | None:
    """Return the ranks of the job for which an exchange waits; empty if unknown, None if it has just ended."""
    if coordinator.rank != 0:
        return [0]  # other ranks wait for the leader of the job, also in the first gather of a coordinator
    if not isinstance(coordinator, ReportsAwaited):
        return ()
    try:
        return [ranks[rank] for rank in coordinator.awaited(key)] or None
    except CheckpointError:
        return None  # the exchange itself raises the error of its service


class Gathering:
    """Sends data from all ranks to the leader, and from the leader to all. Stateless and thread-safe."""

    def __init__(
        self, coordinator: Coordinator, *, late: LateRanks | None = None, block_ranks: int = BLOCK_RANKS
    ) -> None:
        """Divide a large job into blocks if its coordinator supports groups.

        Args:
            coordinator: connects the processes.
            late: logs the ranks for which an exchange waits long; None: log them without the name of an operation.
            block_ranks: the number of ranks of a block; equal in every process.
        """
        self._coordinator = coordinator
        self._late = late or LateRanks("an exchange", coordinator.rank, coordinator.size)
        self._block_ranks = block_ranks
        self.rank = coordinator.rank
        self.size = coordinator.size
        has_blocks = self.size > block_ranks
        self._groups = coordinator if has_blocks and isinstance(coordinator, GathersInGroups) else None

    @property
    def blocks(self) -> Sequence[range]:
        """The ranks of each block; one block of all ranks in a small job."""
        if self._groups is None:
            return (range(self.size),)
        return [self._block(number) for number in range(-(-self.size // self._block_ranks))]

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Send a payload to the leader. Returns all payloads in order of rank on the leader, and None on other ranks.

        The first rank of a block waits for the other ranks of the block. If this first rank is missing, the leader
        reports only this rank, because it receives nothing about the rest of the block.

        Raises:
            CoordinationTimeoutError: on the leader, with the missing ranks. On another rank, its payload could not be
                sent in time.
        """
        if self._groups is None:
            return self._gather_on(self._coordinator, key, payload, range(self.size), of_all=True)
        number = self.rank // self._block_ranks
        block = self._block(number)
        missing: list[int] = []
        of_block: Sequence[bytes] | None = None
        try:
            of_block = self._gather_on(
                self._groups.within(block), f"{key}/block-{number}", payload, block, of_all=False
            )
        except CoordinationTimeoutError as error:
            if self.rank != block[0]:
                raise  # this rank could not send its own payload
            # If the error names no ranks, the connection itself failed: all other ranks count as missing.
            missing = [block[index] for index in error.missing] or list(block[1:])
        if self.rank != block[0]:
            return None
        relays = range(0, self.size, self._block_ranks)
        batch = b"" if self.rank == 0 else _pack(of_block or (), missing)  # the leader has the data of its own block
        try:
            # Other relays may start one deadline later than this rank, and wait up to one deadline for their blocks.
            batches = self._gather_on(
                self._groups.within(relays, deadlines=2), f"{key}/blocks", batch, relays, of_all=True
            )
        except CoordinationTimeoutError as error:
            raise self._timed_out(key, [*missing, *[relays[index] for index in error.missing]]) from error
        if batches is None:
            return None
        gathered = list(of_block or ())
        for data in batches[1:]:
            payloads, absent = _unpack(data)
            gathered += payloads
            missing += absent
        if missing:
            raise self._timed_out(key, missing)
        return gathered

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload of the leader on every rank. Other ranks pass None."""
        return self._broadcast_on(self._coordinator, key, payload)

    def receive(self, key: str) -> bytes:
        """Return a payload that the leader broadcasts without a gather before. Not called on the leader."""
        with self._late.watch(self._coordinator, key, ranks=[0], answers=True):
            return self._coordinator.broadcast(key, None)

    def broadcast_to_blocks(self, key: str, message: Callable[[range], bytes] | None) -> bytes:
        """Return the message of the leader to the block of this rank.

        Args:
            key: the key of the exchange.
            message: on the leader, returns the message to the ranks of a block; None on the others.
        """
        if self._groups is None:
            return self.broadcast(key, None if message is None else message(range(self.size)))
        if message is None:
            number = self.rank // self._block_ranks
            return self._broadcast_on(self._groups.within(self._with_leader(number)), f"{key}-{number}", None)
        for number, block in enumerate(self.blocks):
            ranks = self._with_leader(number)
            if len(ranks) > 1:
                self._groups.within(ranks).broadcast(f"{key}-{number}", message(block))
        return message(self._block(0))

    def _gather_on(
        self, coordinator: Coordinator, key: str, payload: bytes, ranks: Sequence[int], *, of_all: bool
    ) -> Sequence[bytes] | None:
        with self._late.watch(coordinator, key, ranks=ranks, answers=of_all and self.rank == 0):
            return coordinator.gather(key, payload)

    def _broadcast_on(self, coordinator: Coordinator, key: str, payload: bytes | None) -> bytes:
        """Broadcast from the leader to the ranks of a coordinator. The receivers wait for several deadlines.

        The leader may start up to a deadline later than this rank, and reports missing ranks after its own deadline. In
        a job with blocks, the leader waits one deadline for its own block, and two for the first ranks of other blocks.
        """
        if payload is not None:
            return coordinator.broadcast(key, payload)
        with self._late.watch(coordinator, key, ranks=[0], answers=True):
            for _ in range(1 if self._groups is None else 3):
                try:
                    return coordinator.broadcast(key, None)
                except CoordinationTimeoutError:
                    continue
            return coordinator.broadcast(key, None)

    def _block(self, number: int) -> range:
        first = number * self._block_ranks
        return range(first, min(first + self._block_ranks, self.size))

    def _with_leader(self, number: int) -> Sequence[int]:
        block = self._block(number)
        return block if number == 0 else (0, *block)

    def _timed_out(self, key: str, missing: Sequence[int]) -> CoordinationTimeoutError:
        ranks = sorted(missing)
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
        return CoordinationTimeoutError(
            f"{len(ranks)} of {self.size} ranks did not take part in the exchange {key!r} before its deadline: "
            f"[{shown}]. Check what they were doing. A rank is also missing if the first rank of its block of "
            f"{self._block_ranks} is",
            ranks,
        )


def _pack(payloads: Sequence[bytes], missing: Sequence[int]) -> bytes:
    import zlib  # only large jobs need it

    head = json.dumps({"sizes": list(map(len, payloads)), "missing": list(missing)}, separators=(",", ":"))
    return b"".join((head.encode("ascii"), b"\n", zlib.compress(b"".join(payloads), _COMPRESSION)))


def _unpack(data: bytes) -> tuple[list[bytes], list[int]]:
    import zlib  # only large jobs need it

    line, _, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    joined = zlib.decompress(rest)
    payloads = []
    start = 0
    for size in head["sizes"]:
        payloads.append(joined[start : start + size])
        start += size
    return payloads, head["missing"]
