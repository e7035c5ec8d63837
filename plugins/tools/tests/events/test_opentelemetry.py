"""Events become spans and metrics. A span has the times of its event, and the span of the operation as its parent."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
from ckptcore_tools.opentelemetry import OpenTelemetryObserver
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ckptcore.events import Event, Recording
from plugins.tools.tests.events.sample_events import BEGAN, async_save, event


class Collected:
    """An observer with its exported spans and metrics, in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.observer = OpenTelemetryObserver(self.tracers, MeterProvider([self.reader]))

    def tell(self, *events: Event) -> None:
        for each_event in events:
            self.observer(each_event)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def span(self, name: str) -> ReadableSpan:
        (matching,) = [span for span in self.spans if span.name == name]
        return matching

    def points(self, name: str) -> Mapping[str, HistogramDataPoint | NumberDataPoint]:
        """Return the points of a metric by phase."""
        data = self.reader.get_metrics_data()
        assert data is not None
        by_phase: dict[str, HistogramDataPoint | NumberDataPoint] = {}
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        assert isinstance(point, HistogramDataPoint | NumberDataPoint)
                        by_phase[str((point.attributes or {})["ckptcore.phase"])] = point
        return by_phase


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_a_span_has_the_times_and_attributes_of_its_event() -> None:
    collected = Collected()
    collected.tell(*async_save(save_id="0123456789abcdef", rank=3))
    write = collected.span("ckptcore.write")
    assert write.start_time == int(BEGAN) * 10**9 + 625_000_000
    assert write.end_time == int(BEGAN) * 10**9 + 2_625_000_000
    assert dict(write.attributes or {}) == {
        "ckptcore.phase": "write",
        "ckptcore.operation": "save",
        "ckptcore.location": "run/step_12",
        "ckptcore.step": 12,
        "ckptcore.rank": 3,
        "ckptcore.bytes": 4_000_000_000,
        "ckptcore.save_id": "0123456789abcdef",
    }
    claim = dict(collected.span("ckptcore.claim").attributes or {})
    assert "ckptcore.bytes" not in claim and claim["ckptcore.rank"] == 3


def test_the_span_of_the_operation_is_the_parent_of_its_phases() -> None:
    collected = Collected()
    events = async_save()
    collected.tell(*events[:-1])
    assert collected.spans == []
    collected.tell(events[-1])
    whole = collected.span("ckptcore.save")
    assert whole.parent is None
    others = [span for span in collected.spans if span is not whole]
    assert len(others) == len(events) - 1
    assert {parent_id(span) for span in others} == {span_id(whole)}


def test_a_phase_that_ends_after_its_operation_belongs_to_it() -> None:
    collected = Collected()
    collected.tell(*async_save(), event("clean", 2.75, 1.0))
    assert parent_id(collected.span("ckptcore.clean")) == span_id(collected.span("ckptcore.save"))


def test_concurrent_operations_are_separate() -> None:
    collected = Collected()
    for first, second in zip(async_save(operation_id="a", rank=0), async_save(operation_id="b", rank=1), strict=True):
        collected.tell(first, second)
    ranks = {span_id(span): (span.attributes or {})["ckptcore.rank"] for span in collected.spans}
    children = [span for span in collected.spans if span.parent is not None]
    assert len(children) == 14
    for span in children:
        assert (span.attributes or {})["ckptcore.rank"] == ranks[parent_id(span) or 0]


def test_the_span_of_the_caller_is_the_parent_of_the_operation() -> None:
    collected = Collected()
    first, *rest = async_save()
    with collected.tracers.get_tracer("training").start_as_current_span("step 12"):
        collected.tell(first)
    collected.tell(*rest)
    assert parent_id(collected.span("ckptcore.save")) == span_id(collected.span("step 12"))


def test_a_phase_that_failed_has_the_status_of_an_error() -> None:
    collected = Collected()
    recording = Recording("save", "x", [collected.observer])
    failure = OSError("disk on fire")
    with recording.phase("describe"):
        pass
    with pytest.raises(OSError, match="fire"), recording.phase("write"):
        raise failure
    recording.finish(error=failure)
    for name in ("ckptcore.write", "ckptcore.save"):
        status = collected.span(name).status
        assert (status.status_code, status.description) == (StatusCode.ERROR, "OSError: disk on fire")
    assert collected.span("ckptcore.describe").status.status_code is StatusCode.UNSET
    assert (collected.points("ckptcore.phase.duration")["write"].attributes or {})["ckptcore.failed"] is True


def test_durations_and_bytes_are_counted_by_phase() -> None:
    collected = Collected()
    collected.tell(*async_save(operation_id="a"), *async_save(operation_id="b", step=13, location="run/step_13"))
    durations, amounts = collected.points("ckptcore.phase.duration"), collected.points("ckptcore.phase.bytes")
    write = durations["write"]
    assert isinstance(write, HistogramDataPoint)
    assert (write.count, write.sum) == (2, 4.0)
    assert set(durations) == {each_event.phase for each_event in async_save()}
    written = amounts["write"]
    assert isinstance(written, NumberDataPoint) and written.value == 8_000_000_000
    assert set(amounts) == {"copy", "write", "commit", "save"}
    assert set(write.attributes or {}) == {"ckptcore.phase", "ckptcore.operation", "ckptcore.failed"}


def test_operations_that_never_end_are_forgotten() -> None:
    collected = Collected()
    for number in range(1000):
        collected.tell(event("write", number, 1, operation_id=str(number)))
    collected.tell(*async_save(operation_id="last"))
    assert len(collected.spans) == 8
    assert len(collected.observer._open) < 100


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"ckptcore-tools\[opentelemetry\]"):
        OpenTelemetryObserver()
