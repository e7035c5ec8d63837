"""Faults of networks and services: no committed checkpoint is lost, incomplete or wrong."""

from __future__ import annotations

import pytest

from tests.object_stores.runs import run
from tests.object_stores.stores import ObjectStore

_SAMPLE = range(2)

_BLOCK = 25


@pytest.mark.parametrize("seed", _SAMPLE)
def test_a_sample_of_random_runs_loses_no_checkpoint(seed: int, object_store: ObjectStore) -> None:
    run(seed, object_store)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(500 // _BLOCK))
def test_many_random_runs_lose_no_checkpoint(block: int, full: bool, object_store: ObjectStore) -> None:
    for seed in range(block * _BLOCK, (block + 1) * _BLOCK, 1 if full else 5):
        run(seed, object_store)
