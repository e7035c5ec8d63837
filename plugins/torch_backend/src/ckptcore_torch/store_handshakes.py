"""Handshake of processes that share a store. It separates the keys of this run of the job from those of earlier runs.

A launcher that restarts all processes may give them the same store, as torchrun does (torch 2.13.0
with ``--max-restarts``). The restart count and the size of the job are not enough to tell all runs
apart.
"""

from __future__ import annotations

import _thread
import functools
import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ckptcore.errors import CheckpointError, CoordinationTimeoutError, RankFailedError
from ckptcore.events import logger_named

logger = logger_named("ckptcore.job")

T = TypeVar("T")

_SERVER_HINT: Final = "it runs in the launcher (torchrun) or in the process of rank 0: check that this is running"

_CHECK_SECONDS: Final = 0.5
"""Interval of the checks for a timeout, in seconds."""

_CANCEL_SECONDS: Final = 5.0
"""Maximum time in seconds that the store takes to answer a wait whose time is over."""


class Connections:
    """The unused connections of this process to the store, on which an exchange can wait. Thread-safe.

    A store without further connections is asked again and again instead: FileStore, whose clone would remove its file,
    stores written in Python, all stores before torch 2.8, and a server that has refused a connection.
    """

    def __init__(self, store: Any) -> None:
        """Connect nothing yet."""
        self._store = store
        self._unused: list[Any] = []
        self._can_connect = hasattr(store, "clone") and not _is_file_store(store)

    def take(self) -> Any | None:
        """Return an unused connection; None if there is none."""
        try:
            return self._unused.pop()
        except IndexError:
            return None

    def connect(self) -> Any | None:
        """Return a new connection; None if the store takes none, or while another thread connects."""
        if not self._can_connect:
            return None
        self._can_connect = False  # a server that refuses connections takes as long as the timeout of the store
        try:
            connection = self._store.clone()
        except RuntimeError as error:
            logger.info("the store of the job is asked again and again, as it takes no further connection: %s", error)
            return None
        self._can_connect = True
        return connection

    def give_back(self, connection: Any) -> None:
        """Give a connection back that has answered."""
        self._unused.append(connection)


def _is_file_store(store: Any) -> bool:
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # exported only at run time
        store = store.underlying_store
    return isinstance(store, dist.FileStore)  # type: ignore[attr-defined]  # as above


class WatchedStore:
    """The store of one exchange, used on the thread of `run_watched`.

    Attributes:
        abandoned: set when `run_watched` stops waiting for the exchange.
        pending: the function that sends the pending request; None if no request is pending.
        awaited: the names that the pending request waits for.
        running: a lock that is released when the exchange ends.
    """

    def __init__(self, store: Any, key: str, connections: Connections) -> None:
        """Send no request yet.

        Args:
            store: the store of the job.
            key: the key of the exchange.
            connections: the connections of this process on which an exchange can wait.
        """
        self._store = store
        self._key = key
        self._connections = connections
        self.abandoned = threading.Event()
        self.pending: Callable[[], object] | None = None
        self.awaited: Sequence[str] = ()
        # A lock and a thread without an object: with `Event` and `Thread`, this takes three times the processor time.
        self.running = threading.Lock()
        self.running.acquire()

    def set(self, name: str, value: bytes) -> None:
        """Set the value of a name, which is a key of the store."""
        self._request(lambda: self._store.set(name, value))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Set the values of names, with one request."""
        self._request(lambda: self._store.multi_set(list(values), list(values.values())))

    def get(self, name: str) -> bytes:
        """Return the value of an existing name."""
        return bytes(self._request(lambda: self._store.get(name)))

    def get_all(self, names: Sequence[str]) -> list[bytes]:
        """Return the values of existing names, with one request."""
        return list(map(bytes, self._request(lambda: self._store.multi_get(list(names)))))

    def has(self, *names: str) -> bool:
        """Return True if all names exist."""
        return bool(self._request(lambda: self._store.check(list(names))))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, and return the sum."""
        return int(self._request(lambda: self._store.add(name, amount)))

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._request(lambda: self._store.delete_key(name))

    def wait(self, names: Sequence[str], seconds: float) -> bool:
        """Wait until all names exist. Return False after some seconds.

        No other process may wait for these names: `abandon` sets them.

        The store answers when the last name is set. This takes a connection, because no other thread of this process
        can send a request on it meanwhile. Asking again and again takes five times as much processor time.
        """
        connection = self._connections.take()
        if connection is None:
            connection = self._request(self._connections.connect)
        began = time.monotonic()
        if connection is None:
            while not self.has(*names):
                if (waited := time.monotonic() - began) >= seconds:
                    return False
                self.pause(pause_after(waited))
            return True

        def wait() -> bool:
            try:
                connection.wait(list(names), timedelta(seconds=seconds))
            except dist.DistStoreError:
                if time.monotonic() - began < seconds / 2:  # not a timeout, which clocks may measure differently
                    raise
                return False
            return True

        self.awaited = names
        exist = self._request(wait)
        self.awaited = ()
        if exist:
            self._connections.give_back(connection)
        return exist

    def abandon(self) -> None:
        """End the exchange, which runs on another thread: it sends no further request, and its wait ends.

        A thread in the store at interpreter exit would abort the process: see `StoreHandshake.end`.
        """
        self.abandoned.set()
        ending = threading.Thread(target=self._end_wait, daemon=True)  # a server that hangs would block this thread
        ending.start()
        ending.join(_CANCEL_SECONDS)

    def _end_wait(self) -> None:
        names = list(self.awaited)
        with suppress(RuntimeError):  # the store failed, which ends the wait, too
            self._store.multi_set(names, [b""] * len(names))
        self.running.acquire(timeout=_CANCEL_SECONDS)
        with suppress(RuntimeError):
            for name in names:
                self._store.delete_key(name)

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up if the exchange is abandoned."""
        self.abandoned.wait(seconds)

    def _request(self, request: Callable[[], T]) -> T:
        if self.abandoned.is_set():
            raise RankFailedError(f"the exchange {self._key!r} was abandoned")
        self.pending = request
        try:
            return request()
        except RuntimeError as error:  # base of the errors of a failed server, such as torch.distributed.DistError
            raise RankFailedError(
                f"the store of the job failed in the exchange {self._key!r}: {error}; {_SERVER_HINT}"
            ) from error
        finally:
            self.pending = None


def run_watched(
    watched: WatchedStore, key: str, rank: int, timeout_seconds: float, exchange: Callable[[WatchedStore], T]
) -> T:
    """Run an exchange, and stop waiting if a request to the store exceeds the timeout.

    If the server process of ``torch.distributed.TCPStore`` is stopped, ``check``, ``get`` and
    ``add`` wait without a limit (torch 2.13.0). Therefore the exchange runs on another thread,
    which is abandoned on timeout. The waiting time of a request is the number of checks times their
    interval, not a difference of clock times. Therefore a request does not time out if the whole
    machine was suspended.

    Args:
        watched: the store.
        key: key of the exchange.
        rank: rank of this process.
        timeout_seconds: timeout of one request. A wait of the exchange may take a little longer.
        exchange: function that runs the exchange on the store passed to it.

    Raises:
        CoordinationTimeoutError: if the store does not answer. On ranks other than the leader, the
            error names the leader as missing.
        RankFailedError: if the store failed.
        Exception: any other error of the exchange.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(exchange(watched))
        except BaseException as error:  # noqa: BLE001  # raised on the waiting thread
            errors.append(error)
        finally:
            watched.running.release()

    _thread.start_new_thread(run, ())
    try:
        if not _ends(watched, timeout_seconds):
            raise CoordinationTimeoutError(
                f"the store of the job did not answer for {timeout_seconds:g} s "
                f"in the exchange {key!r}; {_SERVER_HINT}",
                [0] if rank else [],
            )
        if errors:
            raise errors[0]
        return results[0]
    finally:
        watched.abandoned.set()
        errors.clear()  # breaks the reference cycle between an error and this frame


def _ends(watched: WatchedStore, timeout_seconds: float) -> bool:
    """Wait for the end of an exchange. Return False if a request exceeds the timeout."""
    interval = min(_CHECK_SECONDS, timeout_seconds)
    seen, waited = None, 0.0
    try:
        while not watched.running.acquire(timeout=interval):
            pending = watched.pending
            waited = waited + interval if pending is not None and pending is seen else 0.0
            seen = pending
            if waited >= timeout_seconds + (_CANCEL_SECONDS if watched.awaited else 0.0):
                return False
    except BaseException:  # such as KeyboardInterrupt
        watched.abandon()
        raise
    return True


_SHORTEST_PAUSE_SECONDS: Final = 0.00025
_LONGEST_PAUSE_SECONDS: Final = 0.05
_PAUSED_SHARE: Final = 1 / 6


def pause_after(waited_seconds: float) -> float:
    """Return how long to pause before the next look into a store, in seconds.

    It is a share of the time since the wait began, so an answer is seen late by at most that share, or by 50 ms.
    """
    return min(max(waited_seconds * _PAUSED_SHARE, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)


_ENDING_SECONDS: Final = 5.0
"""Maximum time in seconds that the exit of the program waits for a request to the store."""


class StoreHandshake:
    """Handshake of one process with the leader. Thread-safe.

    Each rank sets its key ``handshake/hello/RANK`` to a random word. The leader answers with the
    word and an id of this run of the job, which is the prefix of all further keys. The rank then
    confirms the answer. A separate thread of the leader answers, so a rank may be late for its
    first exchange. After a rank has confirmed, the leader ignores it: a process that is restarted
    alone gets no answer. The thread ends when all ranks have confirmed, or when its process group,
    store or program ends.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Create the handshake. Does no I/O.

        Args:
            store: a `torch.distributed.Store`, with a prefix for ckptcore.
            rank, size: rank of this process and number of processes.
        """
        self._store: Final = store
        self._rank: Final = rank
        self._size: Final = size
        self._connections: Final = Connections(store)
        self._word: Final = secrets.token_hex(8)
        self._lock: Final = threading.Lock()
        self._run_id: str | None = None
        self._all_met: Final = threading.Event()
        self._ended: Final = threading.Event()
        self._answering: threading.Thread | None = None
        self._waited = False

    @property
    def size(self) -> int:
        """Number of processes of the job."""
        return self._size

    def watched(self, key: str) -> WatchedStore:
        """Return the store for an exchange."""
        return WatchedStore(self._store, key, self._connections)

    def run_id(self, store: WatchedStore, key: str, timeout_seconds: float) -> str:
        """Return the id of this run of the job, the prefix of its keys.

        On ranks other than the leader, the first call waits for the answer of the leader.

        Raises:
            CoordinationTimeoutError: if the leader does not answer within the timeout.
        """
        if self._run_id is not None:
            return self._run_id
        if self._rank == 0:
            with self._lock:
                if self._run_id is None:
                    self._run_id = self._word
                    if self._size > 1:
                        self._answering = threading.Thread(target=self._answer, name="ckptcore-handshake", daemon=True)
                        self._answering.start()
            return self._run_id
        if not self._lock.acquire(timeout=timeout_seconds):
            raise self._unanswered(key, timeout_seconds)  # another thread waits for the same answer
        try:
            if self._run_id is None:
                self._run_id = self._ask(store, key, timeout_seconds)
            return self._run_id
        finally:
            self._lock.release()

    def wait_for_all(self, store: WatchedStore, timeout_seconds: float) -> None:
        """On rank 0, wait until all ranks have finished the handshake.

        This is needed because the program of rank 0 may exit after a broadcast, and then cannot
        answer. Only the first call waits, and only if `waited` was not called before. Other ranks, which can lead a
        group of ranks, never wait. After the timeout rank 0 continues without an error, because late ranks can still
        finish the handshake while its program runs.
        """
        if self._waited or self._rank:
            return
        self._waited = True
        deadline = time.monotonic() + timeout_seconds
        while not self._all_met.wait(_LONGEST_PAUSE_SECONDS) and time.monotonic() < deadline:
            store.pause(0)

    def waited(self) -> None:
        """Record that the leader has already waited for all ranks, in a gather."""
        self._waited = True

    def end(self) -> None:
        """Stop answering. Waits up to 5 s for a pending request to the store.

        This has two reasons. First, a thread that is inside the store at interpreter exit crashes
        the process with ``terminate called without an active exception``, SIGABRT (torch 2.13.0,
        Python 3.11). Second, if the same processes destroy a group and create another one over the
        same store, the threads of both runs would answer.
        """
        self._ended.set()
        if self._answering is not None and self._answering is not threading.current_thread():
            self._answering.join(_ENDING_SECONDS)

    def _ask(self, store: WatchedStore, key: str, timeout_seconds: float) -> str:
        """Set the ``hello`` key of this rank, wait for the leader's answer, and return the id of the run."""
        began = time.monotonic()
        store.set(self._hello(self._rank), self._word.encode())
        while True:
            if store.has(self._welcome(self._rank)):
                word, run_id = json.loads(store.get(self._welcome(self._rank)))
                if word == self._word:  # otherwise it is the answer to a process of an earlier run
                    store.set(self._met(run_id, self._rank), b"")
                    return str(run_id)
            if (waited := time.monotonic() - began) >= timeout_seconds:
                raise self._unanswered(key, timeout_seconds)
            store.pause(pause_after(waited))

    def _unanswered(self, key: str, timeout_seconds: float) -> CoordinationTimeoutError:
        return CoordinationTimeoutError(
            f"rank 0 did not answer rank {self._rank} in the exchange {key!r} within "
            f"{timeout_seconds:g} s: it has not begun to save or load, or it failed, or it "
            "answered an earlier process of this rank. A process that is restarted alone "
            "cannot take part: restart all processes of the job",
            [0],
        )

    def _answer(self) -> None:
        """Answer the ``hello`` of every rank.

        Answer again if the ``hello`` changes: the first one can be from an earlier run.
        """
        store = self.watched("handshake")
        answered: dict[int, str] = {}
        unmet = set(range(1, self._size))
        answered_at = time.monotonic()
        try:
            while unmet and not self._ended.is_set():
                for rank in sorted(unmet):
                    if not store.has(self._hello(rank)):
                        continue
                    word = store.get(self._hello(rank)).decode()
                    if answered.get(rank) != word:
                        store.set(self._welcome(rank), json.dumps([word, self._word]).encode())
                        answered[rank] = word
                        answered_at = time.monotonic()
                    met = self._met(self._word, rank)
                    if store.has(met):
                        # The rank never asks again, so its keys can be removed from the store.
                        for name in (self._hello(rank), self._welcome(rank), met):
                            store.remove(name)
                        unmet.discard(rank)
                if unmet:
                    self._ended.wait(pause_after(time.monotonic() - answered_at))
        except CheckpointError:
            return  # the store failed: exchanges of all processes report it
        finally:
            self._all_met.set()

    def _hello(self, rank: int) -> str:
        return f"handshake/hello/{rank}"

    def _met(self, run_id: str, rank: int) -> str:
        return f"handshake/met/{run_id}/{rank}"

    def _welcome(self, rank: int) -> str:
        return f"handshake/welcome/{rank}"


class StoreHandshakes:
    """Handshakes of this process. They are dropped with their group or store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: MutableMapping[Any, dict[tuple[int, int], StoreHandshake]] = weakref.WeakKeyDictionary()

    def of(self, anchor: Any, store: Any, rank: int, size: int) -> StoreHandshake:
        """Return the handshake of this process for a group or store. All coordinators over the group or store share it.

        Args:
            anchor: the process group or store. The handshake is dropped with it.
            store: the store with the prefix of ckptcore.
            rank, size: rank of this process and number of processes.
        """
        with self._lock:
            known = self._known.setdefault(anchor, {})
            handshake = known.get((rank, size))
            if handshake is None:
                handshake = known[rank, size] = StoreHandshake(store, rank, size)
                weakref.finalize(anchor, handshake.end)  # also at the end of the program
            return handshake


@functools.cache
def handshakes() -> StoreHandshakes:
    """Return the handshakes of this process."""
    return StoreHandshakes()
