"""Retries: the same request again after a failure that may pass, later each time, until a deadline."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptcore_obstore.failures import FailureKind, RequestFailed, Tried
from ckptcore_obstore.limits import AdaptiveLimit

__all__ = ["RetryPolicy", "try_request"]

T = TypeVar("T")

_LOG: Final = logging.getLogger("ckptcore.storage")

_TRIES_IN_SILENCE: Final = 3
"""One failure or two are the life of a network; whoever waits longer wants to know for what."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a request is tried.

    Attributes:
        retries: tries after the first one.
        deadline_seconds: from the first try on, after which no other one begins.
        first_wait_seconds: the most that is waited before the second try; doubled for each one after it.
        most_wait_seconds: the most that is waited before any.
    """

    retries: int = 10
    deadline_seconds: float = 180.0
    first_wait_seconds: float = 0.1
    most_wait_seconds: float = 15.0


def try_request(
    request: Callable[[], T], policy: RetryPolicy, limit: AdaptiveLimit, check: Callable[[], None] = lambda: None
) -> T:
    """Send a request, again where its failure may pass, each time with a place of the limit.

    Waits between tries are random up to a bound that doubles ("full jitter": what failed together does not come back together).
    `check` is called before each try, without a place, so that it can send requests; what it raises ends this.

    Raises:
        RequestFailed: the last failure; its `tried` says what was done.
    """
    begun = time.monotonic()
    tries = 0
    may_be_done = False
    while True:
        tries += 1
        check()
        with limit.place():
            try:
                answer = request()
            except RequestFailed as error:
                failed = error
            else:
                limit.succeeded()
                return answer
        # One failure of the service is an accident; when the same request meets another, the service may have too much to do.
        if failed.failure.kind is FailureKind.THROTTLED or (failed.failure.kind is FailureKind.SERVER and tries > 1):
            limit.throttled()
        elif failed.failure.status is not None and not failed.failure.kind.may_pass:
            limit.succeeded()
        elapsed = time.monotonic() - begun
        wait = random.uniform(0, min(policy.most_wait_seconds, policy.first_wait_seconds * 2 ** min(tries - 1, 30)))
        if not failed.failure.kind.may_pass or tries > policy.retries or elapsed + wait > policy.deadline_seconds:
            failed.tried = Tried(tries, elapsed, may_be_done)
            raise failed
        may_be_done = True
        if tries == _TRIES_IN_SILENCE:
            _LOG.warning(
                "%s: %d tries of a request failed, the last one with: %s. It is tried again for up to %.0f seconds",
                limit.name, tries, failed, policy.deadline_seconds,
            )  # fmt: skip
        time.sleep(wait)
