"""Retries of transient failures, with growing waits, until a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptcore.events import logger_named
from ckptcore_obstore.failures import FailureKind, RequestFailed, Tried
from ckptcore_obstore.limits import AdaptiveLimit

T = TypeVar("T")

_LOG: Final = logger_named("ckptcore.storage")

_SILENT_TRIES: Final = 3
"""Number of failed tries of a request after which a warning is logged.

One or two failures are normal in a network. After more, the log must explain the wait.
"""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries.

    Attributes:
        retries: maximum number of retries.
        deadline_seconds: time since the start of the first try after which no retry begins.
        initial_wait_seconds: maximum wait before the first retry; doubled for each further one.
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
    retry together. `check` is called before each try, without a slot, so that it can send requests.
    Its exceptions end the retries.

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
        # A single server failure can be an accident. If the same request fails again, the service
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
