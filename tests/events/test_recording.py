"""Recordings create an event for each phase, and pass it to observers and the log. Observers cannot fail operations."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from typing import Any, get_args

import pytest

import ckptcore.events
from ckptcore.events import ERROR_CHARACTERS, Event, Operation, Phase, Recording


def test_the_end_of_a_phase_creates_an_event() -> None:
    seen: list[Event] = []
    recording = Recording("save", "run/step_3", [seen.append], step=3, rank=2)
    before = time.time()
    with recording.phase("write") as phase:
        assert seen == []
        phase.nbytes = 128
    (event,) = seen
    assert (event.phase, event.operation, event.location, event.step, event.rank, event.nbytes, event.error) == (
        "write", "save", "run/step_3", 3, 2, 128, None,
    )  # fmt: skip
    # The clock may be set during the test. A tolerance of a day still shows that the unit is seconds since the epoch.
    assert abs(event.began - before) < 86400
    assert event.seconds >= 0
    assert recording.events == (event,)


class _Beginnings:
    """Records the phases that began and ended, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Event]] = []

    def __call__(self, event: Event) -> None:
        self.seen.append(("ended", event))

    def began(self, event: Event) -> None:
        self.seen.append(("began", event))


def test_a_begin_observer_hears_when_phases_begin() -> None:
    observer, ended = _Beginnings(), list[Event]()
    recording = Recording("save", "run/step_3", [ended.append, observer], step=3)
    with recording.phase("write", 5):
        assert ended == []
    recording.finish(5)
    assert [(kind, event.phase) for kind, event in observer.seen] == [
        ("began", "save"), ("began", "write"), ("ended", "write"), ("ended", "save"),
    ]  # fmt: skip
    (_, save), (_, write), (_, write_ended), (_, save_ended) = observer.seen
    assert (write.began, write.operation_id, write.seconds) == (write_ended.began, write_ended.operation_id, 0)
    assert (save.began, save.operation_id, save.step) == (save_ended.began, save_ended.operation_id, 3)


def test_a_begin_observer_cannot_fail_an_operation(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(_Beginnings):
        def began(self, event: Event) -> None:
            raise OSError("no collector")

    observer = Failing()
    recording = Recording("save", "x", [observer])
    with recording.phase("write"):
        pass
    assert [event.phase for _, event in observer.seen] == ["write"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_bytes_can_be_given_at_the_start_of_a_phase() -> None:
    recording = Recording("save", "x")
    with recording.phase("copy", 5):
        pass
    with recording.phase("copy"):
        pass
    assert [event.nbytes for event in recording.events] == [5, None]


def test_the_time_of_a_nested_phase_is_within_that_of_the_outer_one() -> None:
    recording = Recording("load", "x")
    with recording.phase("read"), recording.phase("restore"):
        pass
    recording.finish(7)
    inner, read, whole = recording.events
    assert [inner.phase, read.phase, whole.phase, whole.nbytes] == ["restore", "read", "load", 7]
    clock = 1e-6  # the resolution of seconds since the epoch as floats
    assert whole.began <= read.began + clock <= inner.began + 2 * clock
    assert inner.ended <= read.ended + clock <= whole.ended + 2 * clock
    assert 0 <= inner.seconds <= read.seconds


def test_an_error_is_recorded_and_raised() -> None:
    recording = Recording("save", "x")
    failure = OSError("disk on fire")
    with pytest.raises(OSError, match="disk on fire") as caught, recording.phase("write") as phase:
        phase.nbytes = 3
        raise failure
    assert caught.value is failure
    recording.finish(error=failure)
    assert [(event.phase, event.error, event.nbytes) for event in recording.events] == [
        ("write", "OSError: disk on fire", 3), ("save", "OSError: disk on fire", None),
    ]  # fmt: skip


def test_an_interrupt_is_recorded() -> None:
    recording = Recording("save", "x")
    with pytest.raises(KeyboardInterrupt), recording.phase("write"):
        raise KeyboardInterrupt
    assert recording.events[0].error == "KeyboardInterrupt"


def test_an_operation_has_one_final_event() -> None:
    recording = Recording("save", "x")
    recording.finish(error=OSError("full"))
    with recording.phase("clean"):
        pass
    recording.finish(5)
    assert [(event.phase, event.error) for event in recording.events] == [("save", "OSError: full"), ("clean", None)]


def test_a_long_error_is_truncated() -> None:
    recording = Recording("save", "x")
    recording.finish(error=ValueError("x" * 100_000))
    error = recording.events[0].error
    assert error is not None and len(error) == ERROR_CHARACTERS


def test_earlier_events_get_the_save_id_once_it_is_known() -> None:
    seen: list[Event] = []
    recording = Recording("save", "x", [seen.append])
    with recording.phase("describe"):
        pass
    recording.save_id = "0123456789abcdef"
    with recording.phase("write"):
        pass
    assert [event.save_id for event in seen] == [None, "0123456789abcdef"]
    assert [event.save_id for event in recording.events] == ["0123456789abcdef"] * 2


def test_operations_have_distinct_ids() -> None:
    recordings = [Recording("load", "x") for _ in range(3)]
    for recording in [*recordings, *recordings]:
        with recording.phase("read"):
            pass
    ids = [{event.operation_id for event in recording.events} for recording in recordings]
    assert [len(ids_of_one) for ids_of_one in ids] == [1, 1, 1]
    assert len(set.union(*ids)) == 3


def test_phases_of_all_threads_are_recorded() -> None:
    recording = Recording("save", "x", [lambda event: None])
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        for _ in range(100):
            with recording.phase("write", number):
                pass
            assert recording.events

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [sum(event.nbytes == number for event in recording.events) for number in range(4)]
    assert counts == [100] * 4


class Unreachable:
    """An observer whose collector cannot be reached."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, event: Event) -> None:
        self.asked += 1
        raise ConnectionError("nobody listens")


def test_a_failing_observer_is_logged_once_and_fails_no_operation(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    failing, another = Unreachable(), Unreachable()
    recording = Recording("save", "run/a", [failing, seen.append, another])
    with caplog.at_level(logging.WARNING, "ckptcore.events"):
        for _ in range(3):
            with recording.phase("write"):
                pass
    assert len(seen) == 3
    assert (failing.asked, another.asked) == (3, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    for record, observer in zip(caplog.records, (failing, another), strict=True):
        assert repr(observer) in record.getMessage() and "run/a" in record.getMessage()
        assert record.exc_info is not None and isinstance(record.exc_info[1], ConnectionError)


def test_the_error_of_an_observer_does_not_hide_that_of_the_phase(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording("save", "x", [Unreachable()])
    with pytest.raises(OSError, match="disk on fire"), recording.phase("write"):
        raise OSError("disk on fire")
    assert len(caplog.records) == 1


def test_an_interrupt_in_an_observer_is_not_caught() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Recording("save", "x", [interrupted]).phase("write"):
        pass


def test_each_event_is_logged_at_the_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording("save", "run/step_3", step=3)
    with recording.phase("describe"):
        pass
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "ckptcore.events"), recording.phase("write", 12):
        pass
    (record,) = caplog.records
    assert record.name == "ckptcore.events" and record.levelname == "DEBUG"
    assert record.getMessage().startswith("save of run/step_3, step 3, rank 0: write took 0.")
    assert vars(record)["ckptcore_event"] == recording.events[1]


def test_no_event_is_created_without_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases must be cheap without observers. The test counts events, not time."""
    made: list[str] = []

    def make(**fields: Any) -> Event:
        made.append(fields["phase"])
        return Event(**fields)

    monkeypatch.setattr(ckptcore.events, "Event", make)
    recording = Recording("save", "x")
    with recording.phase("write"):
        pass
    assert made == []
    assert [event.phase for event in recording.events] == ["write"] == made


def test_every_phase_is_documented() -> None:
    documentation = inspect.getdoc(ckptcore.events) or ""
    table = documentation.partition("::\n")[2].partition("\n- ")[0]
    names = [line.split()[0] for line in table.splitlines() if line.strip()][2:]
    assert names == list(get_args(Phase))
    assert set(get_args(Operation)) <= set(names)
