"""DeletionQueue: deletions in the background, in the order of requests, with errors that are raised once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from ckptcore.training.deletion import DeletionQueue


@pytest.fixture
def cleaner() -> Iterator[DeletionQueue]:
    made = DeletionQueue("somewhere")
    yield made
    made.close()


def fail() -> None:
    raise ValueError("the disk is gone")


def test_tasks_run_in_order_on_another_thread(cleaner: DeletionQueue) -> None:
    goes_on = threading.Event()
    done: list[int] = []
    threads: set[str] = set()

    def work(number: int) -> None:
        assert goes_on.wait(60)
        threads.add(threading.current_thread().name)
        done.append(number)

    for number in range(20):
        cleaner.begin(lambda number=number: work(number))  # type: ignore[misc]  # the lambda has a default
    assert done == []
    goes_on.set()
    assert cleaner.take_errors() == []
    assert done == list(range(20))
    assert threads.isdisjoint({threading.current_thread().name}) and len(threads) == 1


def test_an_error_is_logged_and_reported_once_and_later_tasks_run(
    cleaner: DeletionQueue, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    with caplog.at_level(logging.WARNING, logger="ckptcore"):
        cleaner.begin(fail)
        cleaner.begin(done.set)
        (error,) = cleaner.take_errors()
    assert isinstance(error, ValueError) and done.is_set()
    assert ["somewhere" in record.getMessage() for record in caplog.records] == [True]
    assert cleaner.take_errors() == []
    assert len(cleaner) == 0


def test_only_the_first_hundred_errors_are_kept(cleaner: DeletionQueue) -> None:
    for _ in range(300):
        done = threading.Event()
        cleaner.begin(done.set)
        assert done.wait(60)
    assert len(cleaner) < 5, "the last may not have been taken note of yet"
    for _ in range(150):
        begun = threading.Event()
        cleaner.begin(fail)
        cleaner.begin(begun.set)
        assert begun.wait(60)
    assert len(cleaner) < 110
    assert 100 <= len(cleaner.take_errors()) < 110


def test_a_closed_queue_finishes_its_tasks_and_accepts_no_more(cleaner: DeletionQueue) -> None:
    goes_on, first, second = threading.Event(), threading.Event(), threading.Event()
    cleaner.begin(goes_on.wait)
    cleaner.begin(first.set)
    cleaner.refuse()
    cleaner.begin(second.set)
    goes_on.set()
    cleaner.close()
    cleaner.close()
    assert first.is_set() and not second.is_set()
