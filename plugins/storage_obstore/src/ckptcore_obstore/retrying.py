"""Retries of transient failures until a deadline, and a limit of concurrent requests that adapts to throttling."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptcore.events import logger_named
from ckptcore_obstore.failures import FailureKind, RequestFailed, Tried
from ckptcore_obstore.forks import reset_in_children

_MIN_LIMIT: Final = 1
_SECONDS_BETWEEN_CUTS: Final = 1.0
"""Minimum time between cuts of the limit. Concurrent requests are throttled together, and should cut it only once."""


class AdaptiveLimit:
    """Limit of concurrent requests to one bucket in this process. Thread-safe.

    Uses additive increase and multiplicative decrease.
    """

    def __init__(self, max_requests: int, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the maximum.

        Args:
            max_requests: maximum number of concurrent requests.
            name: name of the bucket, for the log.
            clock: monotonic time in seconds.
        """
        self._max_requests = max_requests
        self.name: Final = name
        self._clock = clock
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Reset to the maximum. A forked child has none of its parent's requests."""
        self._allowed = float(self._max_requests)
        self._running = 0
        self._changed = threading.Condition()
        self._cut_at = float("-inf")
        self.cuts = 0

    @property
    def allowed(self) -> int:
        """Current limit."""
        return max(_MIN_LIMIT, int(self._allowed))

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a slot, and occupy it for one request."""
        with self._changed:
            while self._running >= self.allowed:
                self._changed.wait()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def succeeded(self) -> None:
        """Raise the limit a little after an answered request.

        It grows by about one per round of concurrent requests.
        """
        if self._allowed >= self._max_requests:  # no lock: an outdated value only delays the raise by one request
            return
        with self._changed:
            self._allowed = min(self._max_requests, self._allowed + 1 / max(1.0, self._allowed))
            self._changed.notify()

    def throttled(self) -> None:
        """Halve the limit, at most once per second."""
        with self._changed:
            now = self._clock()
            if now < self._cut_at + _SECONDS_BETWEEN_CUTS:
                return
            self._cut_at = now
            self._allowed = max(_MIN_LIMIT, self._allowed / 2)
            self.cuts += 1
            first = self.cuts == 1
        if first:
            _LOG.warning("%s throttles requests: fewer requests run concurrently for a while", self.name)


T = TypeVar("T")

_LOG: Final = logger_named("ckptcore.storage")

_SILENT_TRIES: Final = 3
"""Number of failed tries of a request after which a warning is logged.

One or two failures are normal in a network. After more failures, the log must explain the wait.
"""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries.

    Attributes:
        retries: maximum number of retries.
        deadline_seconds: time since the start of the first try after which no retry begins.
        initial_wait_seconds: maximum wait before the first retry. It doubles for each further
            retry.
        max_wait_seconds: maximum wait before any retry.
    """

    retries: int = 10
    deadline_seconds: float = 180.0
    initial_wait_seconds: float = 0.1
    max_wait_seconds: float = 15.0


def try_request(
    request: Callable[[], T], policy: RetryPolicy, limit: AdaptiveLimit, check: Callable[[], None] = lambda: None
) -> T:
    """Send a request and retry transient failures. Each try occupies a slot of the limit.

    Waits are random up to a bound that doubles ("full jitter"), so that concurrent failures do not
    retry together. `check` is called before each try. It is called without a slot, so that it can
    send requests itself. Its exceptions end the retries.

    Raises:
        RequestFailed: the last failure, with the number of tries.
    """
    started = time.monotonic()
    tries = 0
    may_be_done = False
    while True:
        tries += 1
        check()
        with limit.slot():
            try:
                response = request()
            except RequestFailed as error:
                failed = error
            else:
                limit.succeeded()
                return response
        # A single server failure can be accidental. If the same request fails again, the service
        # may be overloaded.
        if failed.failure.kind is FailureKind.THROTTLED or (failed.failure.kind is FailureKind.SERVER and tries > 1):
            limit.throttled()
        elif failed.failure.status is not None and not failed.failure.kind.is_transient:
            limit.succeeded()
        elapsed = time.monotonic() - started
        wait = random.uniform(0, min(policy.max_wait_seconds, policy.initial_wait_seconds * 2 ** min(tries - 1, 30)))
        if not failed.failure.kind.is_transient or tries > policy.retries or elapsed + wait > policy.deadline_seconds:
            failed.tried = Tried(tries, elapsed, may_be_done)
            raise failed
        may_be_done = True
        if tries == _SILENT_TRIES:
            _LOG.warning(
                "%s: %d tries of a request failed, the last one with: %s. Retrying for up to "
                    "%.0f seconds",
                limit.name, tries, failed, policy.deadline_seconds,
            )  # fmt: skip
        time.sleep(wait)
