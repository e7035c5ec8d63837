"""The core without this distribution: shared loads are an error that names it, and other loads work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore.context import JobOptions
from ckptcore.errors import MissingDistributionError
from ckptcore.protocols import Coordinator


def test_the_core_alone_names_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
