"""Processes that share a store meet once, so that none takes what a former life of the job left there for an answer.

A launcher that starts all processes again may give them the store that they had before: torchrun does (seen with torch 2.13.0 and
``--max-restarts``), and neither a number of restarts nor the size of the job tells two lives apart everywhere.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
import weakref
from collections.abc import MutableMapping
from typing import Any, Final

from ckptcore.errors import CheckpointError, CoordinationTimeoutError
from ckptcore_torch.watched_stores import WatchedStore

__all__ = ["StoreMeeting", "StoreMeetings", "meetings"]

_FIRST_PAUSE_SECONDS: Final = 0.0005
_LONGEST_PAUSE_SECONDS: Final = 0.05

_ENDING_SECONDS: Final = 5.0
"""How long the end of a program waits for the store to answer."""


class StoreMeeting:
    """How one process met the leader. Any thread.

    A rank sets a random word, ``hello``, and the leader answers it with the name of this life of the job, which begins every
    further key. The leader answers on a thread of its own, once to each rank: so a rank may come late to its first
    exchange, and a process that is started again alone gets no answer. The thread ends with the program, or before it with
    the group or store that the meeting is of.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Touch nothing yet.

        Args:
            store: a `torch.distributed.Store`, with a prefix of ckptcore's own.
            rank, size: which process of how many this is.
        """
        self._store: Final = store
        self._rank: Final = rank
        self._size: Final = size
        self._word: Final = secrets.token_hex(8)
        self._lock: Final = threading.Lock()
        self._life: str | None = None
        self._all_met: Final = threading.Event()
        self._ended: Final = threading.Event()
        self._answering: threading.Thread | None = None
        self._waited = False

    @property
    def size(self) -> int:
        """How many processes the job has."""
        return self._size

    def life(self, store: WatchedStore, key: str, timeout_seconds: float) -> str:
        """What begins the keys of this life of the job; the first call waits until the leader has come.

        Raises:
            CoordinationTimeoutError: if it does not.
        """
        if self._life is not None:
            return self._life
        if self._rank == 0:
            with self._lock:
                if self._life is None:
                    self._life = self._word
                    if self._size > 1:
                        self._answering = threading.Thread(target=self._answer, name="ckptcore-meeting", daemon=True)
                        self._answering.start()
            return self._life
        if not self._lock.acquire(timeout=timeout_seconds):
            raise self._unanswered(key, timeout_seconds)  # nor was the thread answered that has the lock
        try:
            if self._life is None:
                self._life = self._ask(store, key, timeout_seconds)
            return self._life
        finally:
            self._lock.release()

    def wait_for_all(self, store: WatchedStore, timeout_seconds: float) -> None:
        """On the leader, before it goes on without having waited for anybody: it may end, and then answers nobody.

        Only the first call waits, and not after `waited`; of a rank that leads a group only, none does. Past the deadline it goes on: who is missing finds what it was told.
        """
        if self._waited or self._rank:
            return
        self._waited = True
        deadline = time.monotonic() + timeout_seconds
        while not self._all_met.wait(_LONGEST_PAUSE_SECONDS) and time.monotonic() < deadline:
            store.pause(0)

    def waited(self) -> None:
        """Say that the leader has waited for everybody."""
        self._waited = True

    def end(self) -> None:
        """Answer nobody any more. Waits shortly, until the store is let alone.

        A thread that is in the store as the interpreter ends takes the process down with it: ``terminate called without an active
        exception``, SIGABRT (seen with torch 2.13.0 and Python 3.11). And where a group was ended and one of the same processes is made
        over the same store, two lives would answer.
        """
        self._ended.set()
        if self._answering is not None and self._answering is not threading.current_thread():
            self._answering.join(_ENDING_SECONDS)

    def _ask(self, store: WatchedStore, key: str, timeout_seconds: float) -> str:
        """Say hello, and wait for the answer to it."""
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        store.set(self._hello(self._rank), self._word.encode())
        while True:
            if store.has(self._welcome(self._rank)):
                word, life = json.loads(store.get(self._welcome(self._rank)))
                if word == self._word:  # else it was said to another process, of a former life
                    store.set(self._met(life, self._rank), b"")
                    return str(life)
            if time.monotonic() >= deadline:
                raise self._unanswered(key, timeout_seconds)
            store.pause(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _unanswered(self, key: str, timeout_seconds: float) -> CoordinationTimeoutError:
        return CoordinationTimeoutError(
            f"after {timeout_seconds:g} s of the exchange {key!r}, rank 0 had not answered rank {self._rank}: it has not begun to save or "
            "load, or it is dead, or it has met another process of this rank before. A process that is started again alone cannot take "
            "part: start all processes of the job again",
            [0],
        )

    def _answer(self) -> None:
        """Answer every rank that says hello, and once more if what it had said was left from a former life."""
        store = WatchedStore(self._store, "meeting")
        answered: dict[int, str] = {}
        unmet = set(range(1, self._size))
        pause = _FIRST_PAUSE_SECONDS
        try:
            while unmet and not self._ended.is_set():
                for rank in sorted(unmet):
                    if not store.has(self._hello(rank)):
                        continue
                    word = store.get(self._hello(rank)).decode()
                    if answered.get(rank) != word:
                        store.set(self._welcome(rank), json.dumps([word, self._word]).encode())
                        answered[rank] = word
                        pause = _FIRST_PAUSE_SECONDS
                    met = self._met(self._word, rank)
                    if store.has(met):
                        for name in (self._hello(rank), self._welcome(rank), met):
                            store.remove(name)
                        unmet.discard(rank)
                if unmet:
                    self._ended.wait(pause)
                    pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        except CheckpointError:
            return  # the store is gone: every exchange of any process says so itself
        finally:
            self._all_met.set()

    def _hello(self, rank: int) -> str:
        return f"meeting/hello/{rank}"

    def _met(self, life: str, rank: int) -> str:
        return f"meeting/met/{life}/{rank}"

    def _welcome(self, rank: int) -> str:
        return f"meeting/welcome/{rank}"


class StoreMeetings:
    """The meetings of this process, each for as long as the group or store lives that it is of. Any thread."""

    def __init__(self) -> None:
        """None."""
        self._lock = threading.Lock()
        self._known: MutableMapping[Any, dict[tuple[int, int], StoreMeeting]] = weakref.WeakKeyDictionary()

    def of(self, anchor: Any, store: Any, rank: int, size: int) -> StoreMeeting:
        """The meeting of a process in a group, or through a store: every coordinator of it has the same.

        Args:
            anchor: the process group or the store.
            store: with a prefix of ckptcore's own.
            rank, size: which process of how many this is.
        """
        with self._lock:
            known = self._known.setdefault(anchor, {})
            meeting = known.get((rank, size))
            if meeting is None:
                meeting = known[rank, size] = StoreMeeting(store, rank, size)
                weakref.finalize(anchor, meeting.end)  # at the end of the program too
            return meeting


@functools.cache
def meetings() -> StoreMeetings:
    """Those of this process."""
    return StoreMeetings()
