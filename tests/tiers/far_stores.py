"""Far tiers that pause or fail when a test asks for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptcore_testing.far_storage import FarRequestKind, FarStorage

import ckptcore
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.context import PluginOptions
from ckptcore.errors import StorageError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from tests.checkpointer.runs import ROOT, Watch, writes_arrays


class Standstill:
    """Lets whatever would write arrays to the far tier wait, until it is opened.

    Attributes:
        arrived: set when something waits.
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
        """Resume it."""
        self._open.set()


class Outage:
    """A far tier of which every request for a step fails, until it is over. Who owns it can still be said.

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
        """Answer nothing from now on, or no request of these names."""
        self._watch.before = functools.partial(self._wait, unanswered)

    def _wait(self, unanswered: Sequence[str], name: str, keys: Sequence[str]) -> None:
        if not unanswered or name in unanswered:
            self.met.set()
            self._is_over.wait()

    def end(self) -> None:
        """Answer everything."""
        self._is_over.set()


class Meeting:
    """Far storages ``far://`` in which a request for the root of step 2 waits for one of step 3, and vice versa.

    Attributes:
        left: how many times they still wait.
        context: a Context with these storages.
    """

    def __init__(self) -> None:
        self.left = 0
        self.context = ckptcore.Context(plugins=PluginOptions(extra=(self,)))
        self._both = threading.Barrier(2, self._meet)
        self._objects = MemoryStorages()

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"far": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return _MeetingStorage(self, self._objects.open(url.replace("far://", "memory://"), options))

    def _meet(self) -> None:
        self.left -= 1

    def wait(self, key: str) -> None:
        """Wait for the other request, if any is left."""
        if self.left and key in (f"2/{ROOT}", f"3/{ROOT}"):
            self._both.wait(30)  # two at once, or this breaks


class _MeetingStorage(FarStorage):
    def __init__(self, meeting: Meeting, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._meeting = meeting

    @contextmanager
    def request(self, kind: FarRequestKind, key: str, start: int = 0, stop: int = 0) -> Iterator[None]:
        with super().request(kind, key, start, stop):
            self._meeting.wait(key)
            yield
