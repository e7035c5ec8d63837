"""Metrics of torchmetrics whose states are growing lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

import ckptcore


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_a_metric_with_a_list(tmp_path: Path) -> None:
    def made() -> Any:
        metric = torchmetrics.CatMetric()
        metric.persistent(True)
        return torch.nn.ModuleDict({"metric": metric, "accuracy": torchmetrics.MeanMetric()})

    trained, fresh = made(), made()
    for value in (1.0, 2.0, 3.0):
        trained["metric"].update(value)
    ckptcore.save(tmp_path / "c", {"m": trained})
    ckptcore.load_into(tmp_path / "c", {"m": fresh})
    assert fresh["metric"].compute().tolist() == [1, 2, 3]
