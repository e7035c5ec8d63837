"""Forked children can make requests, whatever the threads of the parent are doing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from ckptcore_gcs.credentials import DefaultTokens
from ckptcore_obstore.retrying import AdaptiveLimit
from ckptcore_s3.credentials import ChainCredentials

pytestmark = pytest.mark.system

_SECONDS = 60


def _in_a_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child. Return its exit status, which is not 0 if it fails or hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        try:
            work()
        except BaseException:  # noqa: BLE001  # the exit status reports it
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_requests_of_the_parent_do_not_count_in_a_child() -> None:
    limit = AdaptiveLimit(2, "s3://bucket")

    def take() -> None:
        with limit.slot(), limit.slot():
            pass

    with limit.slot(), limit.slot():
        assert _in_a_child(take) == 0
    take()


def test_a_lock_of_credentials_is_free_in_a_child() -> None:
    for source in (ChainCredentials(None), DefaultTokens(None)):

        def is_free(source: ChainCredentials | DefaultTokens = source) -> None:
            assert source._lock.acquire(blocking=False)

        with source._lock:
            assert _in_a_child(is_free) == 0
