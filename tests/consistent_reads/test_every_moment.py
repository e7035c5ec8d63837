"""Reads of a location that changes before each operation of the reader. The result must be that of one state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_testing.faults import FaultPlan, Step
from ckptcore_testing.locations import faulty_context, through

from tests.consistent_reads.readers import READERS, Outcome, outcome_of
from tests.consistent_reads.states import LAYOUTS, SCHEMES, STATES, Place, state_of

pytestmark = pytest.mark.system


class _Changes(FaultPlan):
    """A plan that makes each change before the chosen operation of the reader."""

    def __init__(self, changes: Sequence[tuple[int, Callable[[], None]]]) -> None:
        super().__init__()
        self._left = list(changes)

    @property
    def are_done(self) -> bool:
        """True if all changes were made."""
        return not self._left

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Make the changes that are due."""
        while self._left and len(self.operations) >= self._left[0][0]:
            _, change = self._left.pop(0)
            change()
        return super().begin(name, keys, offset, nbytes)


@functools.cache
def _undisturbed(reader: str, scheme: str, layout: str, state: str, directory: Path) -> Outcome:
    """Return the outcome of a read of a location that does not change."""
    place = Place(scheme, directory, state_of(state, layout, scheme))
    return outcome_of(READERS[reader], through(place.location), faulty_context(place.location, FaultPlan()))


def _read_during_changes(
    reader: str, scheme: str, layout: str, states: Sequence[str], moments: Sequence[int], directory: Path
) -> tuple[Outcome, bool]:
    """Read a location that changes at these operations. Return the outcome, and whether the last state was reached."""
    place = Place(scheme, directory, state_of(states[0], layout, scheme))
    changes = [
        (moment, functools.partial(place.become, state_of(state, layout, scheme)))
        for moment, state in zip(moments, states[1:], strict=True)
    ]
    plan = _Changes(changes)
    outcome = outcome_of(READERS[reader], through(place.location), faulty_context(place.location, plan))
    return outcome, plan.are_done


def _wrong(reader: str, scheme: str, layout: str, states: Sequence[str], directory: Path) -> list[str]:
    """Return the failures of reads during every change, one line each."""
    allowed = {_undisturbed(reader, scheme, layout, state, directory): state for state in states}
    failures = []
    moments = [0] * (len(states) - 1)
    while True:
        outcome, done = _read_during_changes(reader, scheme, layout, states, moments, directory)
        if outcome not in allowed and (outcome != "replaced" or not max(moments)):
            failures.append(
                f"{reader} {scheme} {layout} {' -> '.join(states)} before {moments}: {outcome}, not {list(allowed)}"
            )
        if done:
            moments[-1] += 1
        else:
            # The reader ended before the last change, so later moments would give no new case.
            if len(moments) == 1 or moments[-1] == moments[-2]:
                return failures
            moments[-2] += 1
            moments[-1] = moments[-2]


_FIRST: Final = [
    ("nothing", "tree"),
    ("nothing", "several"),
    ("tree", "other tree"),
    ("several", "other several"),
    ("foreign", "tree"),
]
"""Changes that the quick tests try with every layout."""

_CHANGES: Final = [
    ("nothing", "claim"),
    ("nothing", "claim of several"),
    ("nothing", "update"),
    ("nothing", "partial"),
    ("nothing", "foreign"),
    ("nothing", "foreign several"),
    ("tree", "nothing"),
    ("tree", "claim"),
    ("tree", "several"),
    ("tree", "update"),
    ("tree", "foreign"),
    ("several", "nothing"),
    ("several", "claim of several"),
    ("several", "tree"),
    ("several", "foreign several"),
    ("claim", "tree"),
    ("claim of several", "several"),
    ("partial", "tree"),
    ("partial", "nothing"),
    ("update", "nothing"),
    ("update", "tree"),
    ("foreign", "nothing"),
    ("foreign", "several"),
    ("foreign several", "several"),
    ("foreign several", "tree"),
    ("foreign several", "nothing"),
]
"""Changes that the slow tests try with every layout."""

_TWO_CHANGES: Final = [
    ("nothing", "tree", "nothing"),
    ("nothing", "several", "nothing"),
    ("nothing", "claim", "tree"),
    ("tree", "nothing", "other tree"),
    ("tree", "claim", "other tree"),
    ("tree", "several", "other tree"),
    ("several", "nothing", "other several"),
    ("foreign", "tree", "nothing"),
    ("foreign", "several", "nothing"),
    ("partial", "tree", "nothing"),
    ("update", "nothing", "tree"),
]
"""Changes of which both are made while one reader reads."""


_OF_SLICES: Final = ("open", "slice")
_PARTS: Final = 5


def _part(changes: Sequence[Sequence[str]], reader: str, full: bool) -> Sequence[Sequence[str]]:
    """Return a part of the changes, which differs between readers, or all with `full`."""
    return changes if full else changes[list(READERS).index(reader) % _PARTS :: _PARTS]


def _expect_right(reader: str, scheme: str, layout: str, changes: Iterable[Sequence[str]], directory: Path) -> None:
    wrong = [line for states in changes for line in _wrong(reader, scheme, layout, states, directory)]
    assert not wrong, f"{len(wrong)} reads went wrong:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3"])
def test_a_change_before_each_call(reader: str, layout: str, tmp_path: Path) -> None:
    _expect_right(reader, "memory", layout, _FIRST, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_before_each_call(reader: str, scheme: str, layout: str, full: bool, tmp_path: Path) -> None:
    _expect_right(reader, scheme, layout, _part([*_FIRST, *_CHANGES], reader, full), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt"])
def test_a_change_between_any_two_states(reader: str, layout: str, full: bool, tmp_path: Path) -> None:
    pairs = _part(list(itertools.permutations(STATES, 2)), reader, full)
    _expect_right(reader, "memory", layout, pairs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_changes_during_a_read(reader: str, layout: str, full: bool, tmp_path: Path) -> None:
    """A checkpoint is deleted, and another one saved, during one read.

    After each slice of a checkpoint of other software, only its root is checked, because checking all names is slow.
    """
    changes = [states for states in _TWO_CHANGES if reader not in _OF_SLICES or states[0] != "foreign"]
    _expect_right(reader, "memory", layout, _part(changes, reader, full), tmp_path)
