"""The core without this distribution: reading in boxes is an error that names it, and slices are read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError


def test_the_core_alone_names_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ckptcore_tools.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ckptcore_tools", None)
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    with ckptcore.open(tmp_path / "c") as checkpoint:
        with pytest.raises(MissingDistributionError, match=r"iter_boxes .* pip install 'ckptcore\[tools\]'"):
            checkpoint.iter_boxes()
        assert checkpoint["w"][0:2].sum() == 2
