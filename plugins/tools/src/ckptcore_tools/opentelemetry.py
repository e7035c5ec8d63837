"""Export of events as OpenTelemetry spans and metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from ckptcore.events import Event

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, StatusCode, TracerProvider

__all__ = ["OpenTelemetryObserver"]

_MAX_OPERATIONS: Final = 64
"""Maximum number of open operations, and of finished ones kept for late phases. The oldest are dropped."""

T = TypeVar("T")


class OpenTelemetryObserver:
    """An observer that exports each event to OpenTelemetry. Thread-safe.

    Requires the extra ``ckptcore-tools[opentelemetry]``. The OpenTelemetry SDK of the program decides where spans and
    metrics are sent.

    - Span ``ckptcore.<phase>``, with start and end of the phase and the attributes ``ckptcore.phase``,
      ``ckptcore.operation``, ``ckptcore.location`` and ``ckptcore.rank``, and if known ``ckptcore.step``,
      ``ckptcore.bytes`` and ``ckptcore.save_id``. A failed phase has the status ERROR and the error as description.
      The span of the operation (``ckptcore.save``) is the parent of the spans of its phases. Its own parent is the
      span that is current on the thread where the first phase of the operation ends; in a save, this is the
      caller's thread. The spans are created when the operation has ended.
    - Histogram ``ckptcore.phase.duration`` (seconds) and counter ``ckptcore.phase.bytes``, by ``ckptcore.phase``,
      ``ckptcore.operation`` and ``ckptcore.failed``. Location, step and rank are left out to limit the number of time
      series.

    Args:
        tracer_provider: creates the spans. None: the global provider.
        meter_provider: creates the metrics. None: the global provider.

    Raises:
        ImportError: if the OpenTelemetry API is not installed.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        try:
            from opentelemetry import context, metrics, trace
        except ImportError as error:
            raise ImportError(
                "OpenTelemetryObserver needs the OpenTelemetry API, which is not installed: "
                "pip install 'ckptcore-tools[opentelemetry]'"
            ) from error
        self._tracer = trace.get_tracer("ckptcore", tracer_provider=tracer_provider)
        meter = metrics.get_meter("ckptcore", meter_provider=meter_provider)
        self._durations = meter.create_histogram(
            "ckptcore.phase.duration", unit="s", description="How long a phase of a save, load or delete took."
        )
        self._bytes = meter.create_counter(
            "ckptcore.phase.bytes", unit="By", description="Bytes that a phase of a save, load or delete moved."
        )
        self._failed = trace.StatusCode.ERROR
        self._current_context = context.get_current
        self._context_of_span = trace.set_span_in_context
        self._lock = threading.Lock()
        self._open: dict[str, _OpenOperation] = {}
        self._finished: dict[str, Context] = {}

    def __call__(self, event: Event) -> None:
        """Export an event."""
        series: dict[str, str | bool] = {
            "ckptcore.phase": event.phase,
            "ckptcore.operation": event.operation,
            "ckptcore.failed": event.error is not None,
        }
        self._durations.record(event.seconds, series)
        if event.nbytes is not None:
            self._bytes.add(event.nbytes, series)
        with self._lock:
            spans = self._spans(event)
        # End spans without the lock, because some processors export a span when it ends.
        for span, ended in spans:
            _end(span, ended, self._failed)

    def _spans(self, event: Event) -> Sequence[tuple[Span, Event]]:
        """Create and return the spans to end now, with their events.

        These are the spans of an operation that ended with this event, or of a phase that ended after its operation.
        """
        if (parent := self._finished.get(event.operation_id)) is not None:
            return [(self._start(event, parent), event)]
        if event.operation_id not in self._open:
            self._open[event.operation_id] = _OpenOperation(self._current_context())
            _drop_oldest(self._open)
        operation = self._open[event.operation_id]
        if event.phase != event.operation:
            operation.phases.append(event)
            return ()
        del self._open[event.operation_id]
        whole = self._start(event, operation.context)
        self._finished[event.operation_id] = parent = self._context_of_span(whole, operation.context)
        _drop_oldest(self._finished)
        return [*((self._start(phase, parent), phase) for phase in operation.phases), (whole, event)]

    def _start(self, event: Event, parent: Context) -> Span:
        attributes: dict[str, str | int] = {
            "ckptcore.phase": event.phase,
            "ckptcore.operation": event.operation,
            "ckptcore.location": event.location,
            "ckptcore.rank": event.rank,
        }
        if event.step is not None:
            attributes["ckptcore.step"] = event.step
        if event.nbytes is not None:
            attributes["ckptcore.bytes"] = event.nbytes
        if event.save_id is not None:
            attributes["ckptcore.save_id"] = event.save_id
        return self._tracer.start_span(
            f"ckptcore.{event.phase}", context=parent, attributes=attributes, start_time=_nanoseconds(event.began)
        )


@dataclass(frozen=True, slots=True)
class _OpenOperation:
    """An operation that has not ended.

    Attributes:
        context: the OpenTelemetry context of the thread where its first phase ended.
        phases: the phases that have ended.
    """

    context: Context
    phases: list[Event] = field(default_factory=list)


def _end(span: Span, event: Event, failed: StatusCode) -> None:
    if event.error is not None:
        span.set_status(failed, event.error)
    span.end(_nanoseconds(event.began) + _nanoseconds(event.seconds))


def _drop_oldest(operations: dict[str, T]) -> None:
    if len(operations) > _MAX_OPERATIONS:
        del operations[next(iter(operations))]


def _nanoseconds(seconds: float) -> int:
    whole, fraction = divmod(seconds, 1.0)  # a float of nanoseconds since the epoch would be rounded to 256 ns
    return int(whole) * 1_000_000_000 + round(fraction * 1e9)
