"""Jobs of PyTorch and JAX are killed at random moments: no step that was reported as saved is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from plugins.recovery.tests.framework_jobs import die, lose, place_on, take_notes
from tests.jobs.processes import run_job

_KILLS: Final = 10

pytestmark = [pytest.mark.slow, pytest.mark.system]


@pytest.mark.parametrize(("framework", "seed"), [("torch", 1), ("jax", 2)])
def test_ten_kills(framework: str, seed: int, job: Path) -> None:
    program = f"plugins.recovery.tests.{framework}_hosts"
    choose = random.Random(seed)
    hosts = [f"host-{number}" for number in range(4)]
    known: list[str] = []  # hosts that were in each start since the last step; the next start needs one of them
    newest, losses, starts = 0, 0, 0
    for kill in range(_KILLS):
        chosen = choose.sample(hosts, choose.choice([2, 3, 4]))
        if known and not set(known) & set(chosen):
            chosen[0] = choose.choice(known)
        place_on(job, *chosen)
        (job / "seed").write_text(f"{seed} {kill}")
        die(program, job, "train", len(chosen), [choose.choice(["safetensors", "zarr3"])])
        loaded, saved = take_notes(job)
        if not loaded:  # killed while it started
            known = [host for host in chosen if host in known]
            continue
        (step,) = loaded
        assert step >= newest, f"step {newest} was reported as saved, and step {step} was loaded"
        newest, known, starts = max(newest, saved), chosen, starts + 1
        if choose.random() < 0.6:
            lost = choose.choice(chosen)
            lose(job, lost)
            losses += 1
            hosts[hosts.index(lost)] = f"spare-{losses}"
            known = [host for host in chosen if host != lost]
    assert newest
    place_on(job, known[0], *[host for host in hosts if host != known[0]])
    step, *others = run_job(program, "load", job, size=4)
    assert step >= newest and set(others) == {step}
    assert starts >= _KILLS // 2 and losses
