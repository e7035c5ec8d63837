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
    "first save": Counts(calls=1650, system_calls=2125, syncs=5, requests=14, nbytes=1060751, memory=12),
    "first load": Counts(calls=904, system_calls=1540, syncs=0, requests=5, nbytes=1060422, memory=11),
    "save 1000 small arrays": Counts(calls=37586, system_calls=126, syncs=5, requests=11, nbytes=184262, memory=4),
    "load 1000 small arrays": Counts(calls=26832, system_calls=29, syncs=0, requests=4, nbytes=117745, memory=4),
    "save one large array": Counts(calls=1367, system_calls=168, syncs=5, requests=45, nbytes=33963073, memory=4),
    "load one large array": Counts(calls=863, system_calls=73, syncs=0, requests=36, nbytes=33896551, memory=36),
    "open 1000 arrays": Counts(calls=94, system_calls=18, syncs=0, requests=1, nbytes=40847, memory=4),
    "one slice": Counts(calls=33, system_calls=14, syncs=0, requests=5, nbytes=66412, memory=4),
    "metadata of 1000 arrays": Counts(calls=4292, system_calls=22, syncs=0, requests=2, nbytes=40884, memory=4),
    "resume": Counts(calls=2074, system_calls=282, syncs=7, requests=54, nbytes=33905250, memory=4),
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
    limits = Counts(calls=10, system_calls=5, syncs=1, requests=2, nbytes=100, memory=4)
    assert not limits.exceeds(limits)
    assert not limits._replace(system_calls=None, syncs=None, memory=None).exceeds(limits)
    above = Counts(calls=11, system_calls=6, syncs=2, requests=3, nbytes=101, memory=5)
    assert [text.partition(":")[0] for text in above.exceeds(limits)] == list(Counts._fields)
    assert above.exceeds(limits)[4] == "nbytes: 101, and the limit is 100"


def test_calls_of_a_function_of_the_core_are_counted() -> None:
    calls = trace(lambda: [redacted_location(name) for name in ("a", "b", "c")])
    assert calls["redaction.py"]["redacted_location"] == 3
