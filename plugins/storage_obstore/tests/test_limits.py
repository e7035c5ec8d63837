"""The limit of concurrent requests adapts to the service.

It is halved once per burst of failures, grows by one per round of successes, and has a maximum.
"""

from __future__ import annotations

import threading

from ckptcore_obstore.retrying import AdaptiveLimit


def test_the_limit_is_halved_once_for_each_burst() -> None:
    now = 0.0
    limit = AdaptiveLimit(16, "s3://bucket", clock=lambda: now)
    assert (limit.allowed, limit.cuts) == (16, 0)
    for _ in range(10):
        limit.throttled()
    assert (limit.allowed, limit.cuts) == (8, 1)
    for expected in (4, 2, 1, 1):
        now += 2
        limit.throttled()
        assert limit.allowed == expected
    assert limit.cuts == 5


def test_the_limit_grows_by_one_for_each_round() -> None:
    limit = AdaptiveLimit(16, "s3://bucket")
    limit.throttled()
    for before in range(8, 16):
        assert limit.allowed == before
        for _ in range(before + 1):
            limit.succeeded()
    for _ in range(100):
        limit.succeeded()
    assert limit.allowed == 16


def test_no_more_requests_than_allowed_run_concurrently() -> None:
    limit = AdaptiveLimit(4, "s3://bucket")
    limit.throttled()
    lock = threading.Lock()
    under_way = most = 0

    def work() -> None:
        nonlocal under_way, most
        for _ in range(50):
            with limit.slot():
                with lock:
                    under_way += 1
                    most = max(most, under_way)
                with lock:
                    under_way -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most <= 2


def test_a_failed_request_frees_its_slot() -> None:
    limit = AdaptiveLimit(1, "s3://bucket")
    for _ in range(3):
        try:
            with limit.slot():
                raise OSError("failed")
        except OSError:
            continue
    with limit.slot():
        assert limit.allowed == 1
