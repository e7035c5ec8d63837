"""Ten operations make few calls, system calls and requests, move few bytes, and need little memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from ckptcore.redaction import redacted_location
from tools.counts import OPERATIONS, Counts, count, has_strace, trace

pytestmark = pytest.mark.system

LIMITS: Final[Mapping[str, Counts]] = {
    # written by python -m tools.counts --write
    "first save": Counts(calls=1697, system_calls=2437, requests=14, nbytes=1060752, memory=10),
    "first load": Counts(calls=908, system_calls=1855, requests=5, nbytes=1061462, memory=9),
    "save 1000 small arrays": Counts(calls=43742, system_calls=142, requests=11, nbytes=184266, memory=4),
    "load 1000 small arrays": Counts(calls=26832, system_calls=29, requests=4, nbytes=158461, memory=4),
    "save one large array": Counts(calls=1414, system_calls=184, requests=45, nbytes=33963068, memory=4),
    "load one large array": Counts(calls=866, system_calls=73, requests=36, nbytes=33902955, memory=36),
    "open 1000 arrays": Counts(calls=94, system_calls=18, requests=1, nbytes=40847, memory=4),
    "one slice": Counts(calls=38, system_calls=14, requests=5, nbytes=85610, memory=4),
    "metadata of 1000 arrays": Counts(calls=4292, system_calls=22, requests=2, nbytes=81602, memory=4),
    "resume": Counts(calls=2094, system_calls=288, requests=54, nbytes=33911765, memory=4),
    # end
}
"""A little above what was counted. Lower them with ``python -m tools.counts --write``, and say why if one rises."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_stays_within_its_limits(name: str, tmp_path: Path) -> None:
    counts = count(name, tmp_path)
    assert not counts.exceeds(LIMITS[name])
    if not has_strace():
        pytest.skip("strace cannot trace here: system calls were not counted, and the other numbers are within limits")


def test_every_operation_has_limits() -> None:
    assert list(LIMITS) == list(OPERATIONS)


def test_numbers_above_a_limit_are_named() -> None:
    limits = Counts(calls=10, system_calls=5, requests=2, nbytes=100, memory=4)
    assert not limits.exceeds(limits)
    assert not limits._replace(system_calls=None, memory=None).exceeds(limits)
    above = Counts(calls=11, system_calls=6, requests=3, nbytes=101, memory=5)
    assert [text.partition(":")[0] for text in above.exceeds(limits)] == list(Counts._fields)
    assert above.exceeds(limits)[3] == "nbytes: 101, and the limit is 100"


def test_calls_of_a_function_of_the_core_are_counted() -> None:
    calls = trace(lambda: [redacted_location(name) for name in ("a", "b", "c")])
    assert calls["redaction.py"]["redacted_location"] == 3
