"""The conformance tests of checkpointable handlers pass for a correct handler, and fail for broken ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests

from ckptcore.protocols import CheckpointableHandler


class Meter:
    """An object whose state is a running mean."""

    def __init__(self, count: int, values: list[float]) -> None:
        self.count = count
        self.values = np.array(values)


class MeterHandler(CheckpointableHandler):
    """A correct handler of meters."""

    priority = 100

    def flatten(self, value: Meter) -> dict[str, object]:
        return {"count": value.count, "values": value.values}

    def unflatten(self, like: Meter, state: Any) -> object:
        return state

    def restore(self, target: Meter, state: Any) -> None:
        target.count = state["count"]
        target.values[...] = state["values"]


EXAMPLE = CheckpointableExample(
    "meter",
    lambda: Meter(3, [1.0, 2.0]),
    lambda: Meter(0, [0.0, 0.0]),
    lambda meter: (meter.count, meter.values.tobytes()),
)


class TestMeters(CheckpointableHandlerTests):
    handler = MeterHandler()
    examples = (EXAMPLE,)


class TestMetersThatAreBuilt(CheckpointableHandlerTests):
    """A correct handler whose `unflatten` returns a new object."""

    class Handler(MeterHandler):
        def unflatten(self, like: Meter, state: Any) -> object:
            return Meter(state["count"], list(state["values"]))

    handler = Handler()
    examples = (EXAMPLE,)


class ForgetsTheCount(MeterHandler):
    def restore(self, target: Meter, state: Any) -> None:
        target.values[...] = state["values"]


class CountsReads(MeterHandler):
    def flatten(self, value: Meter) -> dict[str, object]:
        value.count += 1
        return super().flatten(value)


class ClearsBeforeItReads(MeterHandler):
    def restore(self, target: Meter, state: Any) -> None:
        target.values[...] = 0
        super().restore(target, state)


class GivesItself(MeterHandler):
    def flatten(self, value: Meter) -> Any:
        return value


class LosesTheState(MeterHandler):
    def unflatten(self, like: Meter, state: Any) -> object:
        return like


@pytest.mark.parametrize(
    ("handler", "test"),
    [
        (ForgetsTheCount, "test_restore_copies_the_state_into_another_object"),
        (CountsReads, "test_flatten_does_not_change_the_object"),
        (ClearsBeforeItReads, "test_restoring_its_own_state_changes_nothing"),
        (GivesItself, "test_flatten_does_not_change_the_object"),
        (LosesTheState, "test_unflatten_accepts_a_loaded_state"),
    ],
)
def test_a_broken_handler_is_detected(handler: type[MeterHandler], test: str) -> None:
    suite = type("Suite", (CheckpointableHandlerTests,), {"handler": handler()})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(EXAMPLE)
