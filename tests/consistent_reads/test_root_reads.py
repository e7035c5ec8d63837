"""Bytes of roots that a load reads."""

from __future__ import annotations

from pathlib import Path

from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import faulty_context, new_place, store_at, through

import ckptcore


def test_a_root_is_read_once_and_then_its_checksum(tmp_path: Path) -> None:
    """The second read shows whether the checkpoint was replaced meanwhile."""
    place, plan = new_place("memory", tmp_path), FaultPlan()
    ckptcore.save(place, {"text": "x" * 10_000})
    assert ckptcore.load(through(place), context=faulty_context(place, plan)) == {"text": "x" * 10_000}
    root = store_at(place).get("checkpoint.json")
    assert plan.bytes_read == len(root) + len(',"checksum":"xxh3_64:0123456789abcdef"}\n')
