"""Timelines: round trips through JSON, which drop invalid events, and their text for people."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from ckptcore_testing.hostile_json import tampered
from ckptcore_tools.timelines import format_timeline

from ckptcore.events import ERROR_CHARACTERS, MAX_EVENTS, Event, Recording, readable_events, timeline_to_json
from plugins.tools.tests.events.sample_events import async_save, event

SAVE_ID = "0123456789abcdef"


def stored(events: tuple[Event, ...]) -> Any:
    return json.loads(json.dumps(timeline_to_json(events)))


def without_place(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(dataclasses.replace(event, location="", operation_id="") for event in events)


def test_a_timeline_is_restored() -> None:
    events = async_save(save_id=SAVE_ID)
    events = (*events, event("write", 0.7, 1.0, rank=3, error="OSError: é\ud800", save_id=SAVE_ID))
    assert readable_events(stored(events)) == without_place(events)


def test_a_round_trip_keeps_times_to_the_microsecond() -> None:
    recording = Recording("load", "run/x", step=-1)
    with recording.phase("open"), recording.phase("read", 5):
        pass
    recording.finish()
    for before, after in zip(recording.events, readable_events(stored(recording.events)), strict=True):
        assert (before.phase, before.step, before.nbytes) == (after.phase, after.step, after.nbytes)
        assert abs(before.began - after.began) < 2e-6 and abs(before.seconds - after.seconds) < 2e-6
    assert timeline_to_json(readable_events(stored(recording.events))) == stored(recording.events)


def test_a_timeline_does_not_contain_the_location() -> None:
    events = async_save(location="/home/somebody/run/step_12")
    assert "somebody" not in json.dumps(timeline_to_json(events))
    assert {event.location for event in readable_events(stored(events), location="here")} == {"here"}


def test_earlier_events_of_a_timeline_get_the_save_id() -> None:
    events = (event("describe", 0, 1), event("write", 1, 1, save_id=SAVE_ID))
    assert [event.save_id for event in readable_events(stored(events))] == [SAVE_ID] * 2


def test_events_of_several_operations_are_no_timeline() -> None:
    for events in (
        (),
        (event("write", 0, 1, step=1), event("write", 0, 1, step=2)),
        (event("write", 0, 1), event("read", 0, 1, operation="load")),
        (event("write", 0, 1, save_id=SAVE_ID), event("write", 0, 1, save_id=SAVE_ID[::-1])),
    ):
        with pytest.raises(ValueError, match="one operation"):
            timeline_to_json(events)


def test_the_longest_events_are_kept_if_there_are_too_many() -> None:
    events = [event("write", number, 1.0 + (number % 7), nbytes=number) for number in range(MAX_EVENTS + 500)]
    kept = readable_events(stored(tuple(events)))
    assert len(kept) == MAX_EVENTS
    numbers = [event.nbytes or 0 for event in kept]
    assert numbers == sorted(numbers)
    assert {number for number in range(MAX_EVENTS + 500) if number % 7} <= set(numbers)


def test_a_phase_of_a_newer_version_is_kept() -> None:
    document = stored(async_save())
    document["phase"][0] = "of_the_future"
    assert readable_events(document)[0].phase == "of_the_future"


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "format"},
        {"operation": ["save"]},
        {"step": 1.0},
        {"step": True},
        {"save_id": "../x"},
        {"began": None},
        {"began": -1},
        {"began": 1 << 60},
        {"phase": ["Write"]},
        {"phase": ["Write"] * 8},
        {"phase": ["\x1b[2J"] * 8},
        {"phase": ["x" * 41] * 8},
        {"rank": [-1] * 8},
        {"offset": [1 << 52] * 8},
        {"duration": [-1] * 8},
        {"duration": [0.5] * 8},
        {"nbytes": [1 << 63] * 8},
        {"error": ["x" * (ERROR_CHARACTERS + 1)] * 8},
        {"error": [5] * 8},
        {"error": "None, No"},
        {name: [0] * (MAX_EVENTS + 1) for name in ("phase", "rank", "offset", "duration", "nbytes", "error")},
        {name: [] for name in ("phase", "rank", "offset", "duration", "nbytes", "error")},
    ],
)
def test_events_with_invalid_fields_are_left_out(change: dict[str, Any]) -> None:
    assert readable_events({**stored(async_save()), **change}) == ()


@pytest.mark.parametrize("document", [None, 3, "x", [], {}, [[]]])
def test_other_data_has_no_events(document: Any) -> None:
    assert readable_events(document) == ()


def test_a_tampered_timeline_has_fewer_or_harmless_events() -> None:
    events = async_save(save_id=SAVE_ID, error="OSError: x")
    fewer = 0
    for document in tampered(stored(events), 3000):
        readable = readable_events(document)
        fewer += len(readable) < len(events)
        assert all(line.isprintable() for line in format_timeline(readable).splitlines())
    assert fewer > 1000


def test_the_text_of_a_save() -> None:
    assert format_timeline(async_save()) == (
        "save step 12 run/step_12, began 2023-11-14 22:13:20 UTC\n"
        "phase                     start ms     took ms    bytes    GB/s\n"
        "save                           0.0      2750.0  4.00 GB    1.45 |############################|\n"
        "  blocking                     0.0       500.0                  |#####                       |\n"
        "    wait_for_previous          0.0       250.0                  |###                         |\n"
        "    describe                 250.0       125.0                  |  ##                        |\n"
        "    copy                     375.0       125.0  4.00 GB   32.00 |   ##                       |\n"
        "  claim                      500.0       125.0                  |     #                      |\n"
        "  write                      625.0      2000.0  4.00 GB    2.00 |      ##################### |\n"
        "  commit                    2625.0       125.0  1.50 kB    0.00 |                          ##|\n"
    )


def test_the_text_has_a_column_for_several_ranks() -> None:
    text = format_timeline([*async_save(rank=0), *async_save(rank=11)])
    assert re.search(r"^phase +rank +start ms", text, re.MULTILINE)
    assert len(re.findall(r"^  write +0 ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^  write +11 ", text, re.MULTILINE)) == 1
    assert max(map(len, text.splitlines())) <= 100


def test_the_order_of_the_events_does_not_matter() -> None:
    assert format_timeline(async_save()[::-1]) == format_timeline(async_save())


def test_errors_are_printed_without_control_characters() -> None:
    text = format_timeline([event("write", 0, 1, error="OSError: \x1b[2J\nfull" + "x" * 200, location="a\rb")])
    assert "    failed: OSError: ?[2J?full" in text
    assert "a?b" in text.splitlines()[0]
    assert len(text.splitlines()) == 4
    assert max(map(len, text.splitlines())) <= 100


def test_a_timeline_without_duration_or_events_has_a_text() -> None:
    assert format_timeline([]) == "no events\n"
    assert format_timeline([event("write", 0, 0, nbytes=0)]).count("#") == 1


def test_rounded_times_keep_the_indentation() -> None:
    events = (event("save", 1e-7, 1.0000006), event("write", 0.5000004, 0.5000009))
    assert "\n  write" in format_timeline(readable_events(stored(events)))
