"""Loads on another mesh read only the necessary bytes (see `benchmarks.resharding`)."""

from __future__ import annotations

import pytest

from benchmarks.resharding import CASES, MeshChange, counts, subchunked, whole_shards


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow), *CASES[2:]], ids=lambda case: case.name
)
def test_only_the_necessary_subchunks_are_read(case: MeshChange) -> None:
    counted = counts(case, subchunked())
    assert counted.boxes >= 8
    assert counted.worst <= 1.1


@pytest.mark.slow
def test_without_subchunks_whole_shards_are_read() -> None:
    """This is the reason for subchunks: columns of a shard are spread over all of its bytes."""
    assert counts(CASES[2], whole_shards()).ratio > 8
