"""Actors that join their job again after one of them was restarted. Their Contexts keep working.
Old and new ranks start to count exchanges at the same number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ckptcore_ray.jobs import make_job

import ckptcore
from ckptcore.errors import CheckpointError
from plugins.ray_coordinator.tests.ranks import Ranks, new_name, state


class Member:
    """A rank that joins with `join_job`, and keeps one Context in all incarnations."""

    def __init__(self) -> None:
        self.context = ckptcore.Context()
        self.run: ckptcore.Checkpointer | None = None

    def join(self, job: str, rank: int) -> int:
        """Join, or join again. Return the incarnation."""
        from ckptcore_ray.membership import join_job

        return join_job(job, rank, 2, timeout_seconds=30).incarnation

    def save(self, location: Path, step: int) -> None:
        """Save with the Context of this actor, and with the default one."""
        ckptcore.save(location, state(step), context=self.context, overwrite=True)
        ckptcore.save(location, state(step), overwrite=True)

    def open(self, directory: Path) -> int | None:
        """Open a run. Close it before if it is open. Return the newest step."""
        if self.run is not None:
            self.run.close()
        self.run = ckptcore.Checkpointer(directory, context=self.context)
        return self.run.latest

    def step(self, step: int) -> None:
        """Save a step."""
        assert self.run is not None
        self.run.save(step, state(step))
        self.run.wait()


def test_context_works_in_the_next_incarnation(ranks: Ranks, tmp_path: Path) -> None:
    member_class: Any = ray.remote(num_cpus=0)(Member)
    members = [member_class.remote(), member_class.remote()]

    def all_join() -> list[int]:
        joined: list[int] = ray.get([member.join.remote(job.name, rank) for rank, member in enumerate(members)])
        return joined

    with make_job(new_name(), 2) as job:
        assert all_join() == [1, 1]
        for step in range(2):  # so that the surviving rank has counted more exchanges than its replacement
            ray.get([member.save.remote(tmp_path / "one", step) for member in members])
        assert ray.get([member.open.remote(tmp_path / "run") for member in members]) == [None, None]
        ray.get([member.step.remote(1) for member in members])
        ray.kill(members[1])
        members[1] = member_class.remote()
        assert all_join() == [2, 2]
        ray.get([member.save.remote(tmp_path / "one", 5) for member in members])
        assert ckptcore.load(tmp_path / "one")["step"] == 5
        with pytest.raises(CheckpointError, match="belongs to a job that this process has left or joined again since"):
            ray.get(members[0].step.remote(2))
        assert ray.get([member.open.remote(tmp_path / "run") for member in members]) == [1, 1]
        ray.get([member.step.remote(2) for member in members])
    assert ckptcore.CheckpointReader(tmp_path / "run").steps == (1, 2)
    for member in members:
        ray.kill(member)
