"""Events of a run. The table of phases in the documentation lists exactly these events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import Checkpointer
from ckptcore.events import Event, Phase
from ckptcore.policies import LatestN
from tests.checkpointer.runs import array_key, flip, save_steps, tree


def phases(events: list[Event], operation: str, step: int | None) -> set[str]:
    """Return the phases of an operation on a step."""
    return {event.phase for event in events if event.operation == operation and event.step == step}


def test_events_of_saves_loads_and_deletions_have_the_step(directory: str) -> None:
    events: list[Event] = []
    context = ckptcore.Context(observers=(events.append,))
    with Checkpointer(directory, context=context, preservation_policy=LatestN(2)) as run:
        save_steps(run, [1, 2, 3])
        run.load()
        run.save_blocking(4, tree(4))
        run.save_checkpointables(5, {"rng": np.random.default_rng(0)})
        run.wait()
        run.load_checkpointables(into={"rng": np.random.default_rng(1)})
        run.delete(4)
    saving = {"save", "blocking", "wait_for_previous", "describe", "copy", "claim", "write", "commit"}
    assert phases(events, "save", 1) == saving
    assert phases(events, "save", 4) == saving - {"copy"}
    assert phases(events, "load", 3) == {"load", "read"}
    assert phases(events, "load", 5) >= {"load", "open", "read"}
    for step in (1, 2, 3, 4):
        assert phases(events, "delete", step) == {"delete"}
    assert phases(events, "delete", 5) == set()
    assert phases(events, "delete", None) == {"clean"}
    assert all(event.error is None for event in events)
    for event in events:
        if event.step is None:
            assert event.phase == "clean" and event.location == directory
        else:
            assert event.location == f"{directory}/{event.step}"


class _RunningPhases:
    """Counts the phases that began and have not ended, by their identity."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str, float]] = Counter()

    def __call__(self, event: Event) -> None:
        self.counts[event.operation_id, event.operation, event.phase, event.began] -= 1

    def began(self, event: Event) -> None:
        self.counts[event.operation_id, event.operation, event.phase, event.began] += 1


def test_each_phase_that_begins_ends(directory: str) -> None:
    running = _RunningPhases()
    context = ckptcore.Context(observers=(running,))
    with Checkpointer(directory, context=context, preservation_policy=LatestN(3)) as run:
        save_steps(run, [1, 2, 3, 4])
        flip(directory, array_key(directory, "4"))
        run.load()
        run.delete(2)
    assert len(running.counts) > 20
    assert not +running.counts and not -running.counts


def test_the_event_of_a_failed_load_has_the_step(directory: str) -> None:
    events: list[Event] = []
    with Checkpointer(directory, context=ckptcore.Context(observers=(events.append,))) as run:
        save_steps(run, [1, 2])
        flip(directory, array_key(directory, "2"))
        run.load()
    loads = [(event.step, event.error is None) for event in events if event.phase == "load"]
    assert loads == [(2, False), (1, True)]


def test_the_documented_table_matches_the_events(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    events: list[Event] = []
    context = ckptcore.Context(observers=(events.append,))
    near = NearTier(tmp_path / "near")
    with Checkpointer(TieredDirectory(near, tmp_path / "run"), context=context, preservation_policy=LatestN(1)) as run:
        save_steps(run, [1, 2])
        run.load_into(tree(0))
        run.load(abstract=run.metadata(2).abstract)
        model = torch.nn.Linear(2, 2)
        run.save_checkpointables(3, {"model": model})
        run.wait()
        run.load_checkpointables(into={"model": model})

    def together(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(tmp_path / "job", tree(1), context=context)

    run_ranks(2, together, observers=(events.append,))
    assert {event.phase for event in events} == set(get_args(Phase))
