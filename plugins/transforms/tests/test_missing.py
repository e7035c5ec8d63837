"""The core without this distribution. A load with transforms raises an error that names it; other loads work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ckptcore_transforms import Cast

import ckptcore
from ckptcore.errors import MissingDistributionError


def test_the_core_alone_names_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ckptcore_transforms.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ckptcore_transforms", None)
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(MissingDistributionError, match=r"pip install 'ckptcore\[transforms\]'"):
        ckptcore.load(tmp_path / "c", transforms=[Cast("w", "float16")])
    assert ckptcore.load(tmp_path / "c")["w"].sum() == 3
