"""The core without ckptcore-collective: shared loads raise an error that names the distribution. Other loads work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork

import ckptcore
from ckptcore.context import JobOptions
from ckptcore.distributions import import_name
from ckptcore.errors import CheckpointError, MissingDistributionError, RankFailedError
from ckptcore.protocols import Coordinator


def test_the_error_of_shared_loads_names_missing_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ckptcore_collective.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ckptcore_collective", None)
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})

    def load(coordinator: Coordinator) -> None:
        shared = ckptcore.Context(job=JobOptions(coordinator=coordinator, reads="broadcast"))
        expected = r"JobOptions\(reads='broadcast'\) .* pip install 'ckptcore\[collective\]'"
        with pytest.raises(MissingDistributionError, match=expected):
            ckptcore.load(tmp_path / "c", context=shared)
        with pytest.raises(MissingDistributionError, match=expected):
            ckptcore.load_checkpointables(tmp_path / "c", context=shared)
        for reads in ("all", "alone"):
            context = ckptcore.Context(job=JobOptions(coordinator=coordinator, reads=reads))
            assert ckptcore.load(tmp_path / "c", context=context)["w"].sum() == 3

    ThreadJob(2).run(load)
    assert ckptcore.load(tmp_path / "c", context=ckptcore.Context(job=JobOptions(reads="broadcast")))["w"].sum() == 3


@pytest.mark.parametrize("load", [ckptcore.load, ckptcore.load_checkpointables])
def test_a_rank_without_the_distribution_fails_the_load_of_all_ranks(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptcore.save_checkpointables(tmp_path / "several", {"model": {"w": np.ones(3)}})
    ckptcore.save(tmp_path / "one", {"w": np.ones(3)})
    lacking = threading.local()

    def import_or_not(name: str, *, purpose: str = "") -> object:
        if getattr(lacking, "is_lacking", False):
            raise MissingDistributionError(f"{purpose} needs the distribution ckptcore-collective")
        return import_name(name, purpose=purpose)

    monkeypatch.setattr("ckptcore.distributions.import_name", import_or_not)
    place = tmp_path / ("one" if load is ckptcore.load else "several")

    network = ThreadNetwork(2)

    def refused(coordinator: Coordinator) -> type[Exception]:
        lacking.is_lacking = coordinator.rank == 1
        collectives = network.collectives(coordinator.rank)
        context = ckptcore.Context(job=JobOptions(coordinator=coordinator, reads="broadcast", collectives=collectives))
        with pytest.raises(CheckpointError, match="needs the distribution ckptcore-collective") as caught:
            load(place, context=context)
        lacking.is_lacking = False
        assert list(load(place, context=context)) == (["w"] if load is ckptcore.load else ["model"])
        return caught.type

    assert ThreadJob(2, timeout_seconds=20).run(refused) == [RankFailedError, MissingDistributionError]
