"""Far tiers that pause or fail on request."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from ckptcore.errors import StorageError
from tests.checkpointer.runs import Watch, writes_arrays


class Standstill:
    """A far tier in which every write of arrays waits until `open` is called.

    Attributes:
        arrived: set when a write waits.
    """

    def __init__(self, watch: Watch) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()
        watch.before = self._stop

    def _stop(self, name: str, keys: Sequence[str]) -> None:
        if name == "write_at" or writes_arrays(name, keys):
            self.arrived.set()
            assert self._open.wait(60)

    def open(self) -> None:
        """Resume the waiting writes, and no longer delay later ones."""
        self._open.set()


class Outage:
    """A far tier in which every request for a step fails until `end` is called. Requests for its owner succeed.

    Attributes:
        met: set when a request has failed.
    """

    def __init__(self, watch: Watch) -> None:
        self.met = threading.Event()
        self._is_over = threading.Event()
        self._watch = watch

    def begin(self) -> None:
        """Make requests fail from now on."""
        self._watch.before = self._fail

    def _fail(self, name: str, keys: Sequence[str]) -> None:
        if not self._is_over.is_set() and not all(key.startswith(".ckptcore") for key in keys):
            self.met.set()
            raise StorageError("503: the far tier is away, as its test asked it to be")

    def end(self) -> None:
        """Make requests succeed again."""
        self._is_over.set()


class Silence:
    """A far tier that answers no request from `begin` until `end`.

    Attributes:
        met: set when a request waits for an answer.
    """

    def __init__(self, watch: Watch) -> None:
        self.met = threading.Event()
        self._is_over = threading.Event()
        self._watch = watch

    def begin(self, *unanswered: str) -> None:
        """Answer no request from now on. If names are given, answer no request with these names."""
        self._watch.before = functools.partial(self._wait, unanswered)

    def _wait(self, unanswered: Sequence[str], name: str, keys: Sequence[str]) -> None:
        if not unanswered or name in unanswered:
            self.met.set()
            self._is_over.wait()

    def end(self) -> None:
        """Answer all requests again."""
        self._is_over.set()
