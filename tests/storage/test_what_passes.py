"""Space, inodes, rights and the mount itself go and return: a run loses nothing, and goes on without a restart."""

from __future__ import annotations

import pytest

from tests.storage.mounts import Mounts, mounts
from tests.storage.passing import PLACES, run

__all__ = ["mounts"]

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", PLACES)
def test_a_short_run(kind: str, mounts: Mounts) -> None:
    run(PLACES[kind](mounts), 1, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", PLACES)
def test_a_run_of_200_saves(kind: str, seed: int, mounts: Mounts) -> None:
    run(PLACES[kind](mounts), seed, 200)
