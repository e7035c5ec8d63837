"""The core without ckptcore-orbax: errors name the distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError


class Iterator:
    """An object with asynchronous methods, as Orbax calls them."""

    async def save(self, directory: Any) -> None:
        """Write nothing."""

    async def load(self, directory: Any) -> None:
        """Read nothing."""


def test_a_save_of_an_asynchronous_object_names_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for imported in [name for name in sys.modules if name.startswith("ckptcore_orbax.")]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, "ckptcore_orbax", None)
    expected = r"the asynchronous Iterator\.save needs .* pip install 'ckptcore\[orbax\]'"
    with pytest.raises(MissingDistributionError, match=expected):
        ckptcore.save_checkpointables(tmp_path / "c", {"data": Iterator()})
    assert not (tmp_path / "c").exists()
