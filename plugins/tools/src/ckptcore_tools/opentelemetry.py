"""Events as OpenTelemetry spans and metrics."""

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

_MOST_OPERATIONS: Final = 64
"""Operations under way, and operations that are over, that are remembered. An older one did not end as it should, or is long
over; the spans of its further phases are not made."""

T = TypeVar("T")


class OpenTelemetryObserver:
    """An observer that hands each event to OpenTelemetry. Any thread.

    Needs the extra ``ckptcore-tools[opentelemetry]``; where the spans and numbers go is for the SDK that the program
    set up.

    - A span ``ckptcore.<phase>`` with the true begin and end, and with the attributes ``ckptcore.phase``,
      ``ckptcore.operation``, ``ckptcore.location``, ``ckptcore.rank``, and where they are known ``ckptcore.step``,
      ``ckptcore.bytes`` and ``ckptcore.save_id``. A phase that failed has the status ERROR with the error as
      description. The span of the operation (``ckptcore.save``) is the parent of those of its phases. It is a child of
      the span that was current where the first phase ended, which is that of the caller. The spans are made when the
      operation is over.
    - The histogram ``ckptcore.phase.duration`` in seconds, and the counter ``ckptcore.phase.bytes``, both by
      ``ckptcore.phase``, ``ckptcore.operation`` and ``ckptcore.failed``. Location, step and rank are left out of these,
      so that the number of series stays small.

    Args:
        tracer_provider: who makes the spans; None: the global one.
        meter_provider: who keeps the numbers; None: the global one.

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
                "OpenTelemetryObserver needs the OpenTelemetry API, which is not installed; "
                "install it with: pip install 'ckptcore-tools[opentelemetry]'"
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
        self._below = trace.set_span_in_context
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._over: dict[str, Context] = {}

    def __call__(self, event: Event) -> None:
        """Hand an event on."""
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
        # Outside the lock, because some processors export a span while it ends.
        for span, ended in spans:
            _end(span, ended, self._failed)

    def _spans(self, event: Event) -> Sequence[tuple[Span, Event]]:
        """The spans to be ended now: of an operation that is over, or of a phase that ended after it."""
        if (above := self._over.get(event.operation_id)) is not None:
            return [(self._start(event, above), event)]
        if event.operation_id not in self._open:
            self._open[event.operation_id] = _Open(self._current_context())
            _forget_oldest(self._open)
        operation = self._open[event.operation_id]
        if event.phase != event.operation:
            operation.phases.append(event)
            return ()
        del self._open[event.operation_id]
        whole = self._start(event, operation.context)
        self._over[event.operation_id] = above = self._below(whole, operation.context)
        _forget_oldest(self._over)
        return [*((self._start(phase, above), phase) for phase in operation.phases), (whole, event)]

    def _start(self, event: Event, above: Context) -> Span:
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
            f"ckptcore.{event.phase}", context=above, attributes=attributes, start_time=_nanoseconds(event.began)
        )


@dataclass(frozen=True, slots=True)
class _Open:
    """An operation that is not over.

    Attributes:
        context: that of the caller.
        phases: those that are over.
    """

    context: Context
    phases: list[Event] = field(default_factory=list)


def _end(span: Span, event: Event, failed: StatusCode) -> None:
    if event.error is not None:
        span.set_status(failed, event.error)
    span.end(_nanoseconds(event.began) + _nanoseconds(event.seconds))


def _forget_oldest(operations: dict[str, T]) -> None:
    if len(operations) > _MOST_OPERATIONS:
        del operations[next(iter(operations))]


def _nanoseconds(seconds: float) -> int:
    whole, fraction = divmod(seconds, 1.0)  # a float of so many nanoseconds since the epoch is too coarse
    return int(whole) * 1_000_000_000 + round(fraction * 1e9)
