"""``kill -9`` of a run with two tiers at each request.

Committed steps remain, and the next run completes the uploads.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_tiers import NearTier, TieredDirectory

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.policies import LatestN
from plugins.tiers.tests.killed_runs import STEPS, count_requests, kill_at, open_far, watched_tiers
from tests.checkpointer.runs import assert_is_step, save_steps

pytestmark = pytest.mark.system

_SAMPLE: Final = 8


def _prepare(place: Path) -> tuple[Path, Path]:
    """Save steps 1 and 2 in a run with two tiers. Return both directories."""
    near, far = place / "near", place / "far"
    with open_far(watched_tiers(near, far), FaultPlan()) as run:
        save_steps(run, [1, 2])
    return near, far


def _kill_and_resume(place: Path, at: int) -> None:
    near, far = _prepare(place)
    if kill_at(near, far, at, place / "told") != -signal.SIGKILL:
        return  # the run made fewer requests this time, because threads ran in another order
    for tier in (near, far):  # each visible step is complete
        reader = CheckpointReader(tier)
        for step in reader.steps:
            assert_is_step(reader.load(step), step)
    there = CheckpointReader(near).steps
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far), preservation_policy=LatestN(2)) as run:
        newest = run.latest
        assert newest is not None and newest >= 2
        assert_is_step(run.load(), newest)
        tiers.wait_for_uploads(120)
        save_steps(run, [5])
    steps = CheckpointReader(far).steps
    assert steps[-1] == 5 and steps[0] == max(there[-1], *[step for step in (2, *STEPS) if step <= newest])
    for tier in (near, far):
        left = {path.name for path in tier.iterdir()} - {".ckptcore"}
        assert left == {str(step) for step in CheckpointReader(tier).steps}, "what a dead run left"


def _points(place: Path) -> Sequence[int]:
    place.mkdir()
    near, far = _prepare(place)
    points = range(count_requests(near, far, place / "told"))
    assert len(points) > 60, points
    return points


def test_a_run_resumes_after_a_kill_at_sampled_requests(tmp_path: Path) -> None:
    points = _points(tmp_path / "counted")
    for at in random.Random(7).sample(points, _SAMPLE):
        _kill_and_resume(tmp_path / str(at), at)


@pytest.mark.slow
def test_a_run_resumes_after_a_kill_at_any_request(full: bool, tmp_path: Path) -> None:
    for at in _points(tmp_path / "counted")[:: 1 if full else 5]:
        place = tmp_path / str(at)
        _kill_and_resume(place, at)
        shutil.rmtree(place)
