"""Retries of requests: how many there are, and when a warning is logged."""

from __future__ import annotations

import logging

import pytest
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.retrying import AdaptiveLimit, RetryPolicy, try_request

POLICY = RetryPolicy(retries=5, initial_wait_seconds=0.0)


class Service:
    """A service that fails a number of times before it answers."""

    def __init__(self, failures: int, kind: FailureKind = FailureKind.CONNECTION) -> None:
        self.left = failures
        self.asked = 0
        self.kind = kind

    def __call__(self) -> str:
        """Answer one request."""
        self.asked += 1
        if self.left:
            self.left -= 1
            raise RequestFailed(Failure(self.kind, None, "", "connection refused"))
        return "answer"


def test_a_few_failures_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(2)
    assert try_request(service, POLICY, AdaptiveLimit(4, "s3://bucket")) == "answer"
    assert service.asked == 3
    assert caplog.records == []


def test_many_failures_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(5)
    assert try_request(service, POLICY, AdaptiveLimit(4, "s3://bucket")) == "answer"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ckptcore.storage", logging.WARNING)
    assert "s3://bucket: 3 tries" in record.getMessage() and "connection refused" in record.getMessage()


def test_the_number_of_tries_is_limited() -> None:
    service = Service(6)
    with pytest.raises(RequestFailed) as caught:
        try_request(service, POLICY, AdaptiveLimit(4, "s3://bucket"))
    assert caught.value.tried.tries == service.asked == 6


def test_permanent_failures_are_not_retried() -> None:
    service = Service(1, FailureKind.PERMISSION)
    with pytest.raises(RequestFailed):
        try_request(service, POLICY, AdaptiveLimit(4, "s3://bucket"))
    assert service.asked == 1
