"""Options of `ckptcore.copy` and `ckptcore.plan` that exclude each other, and errors without this distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError

COPY: Any = ckptcore.copy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": "once"}, "needs a subtree"),
        ({"files": ["config.json"], "layout": "safetensors"}, "needs a subtree"),
        ({"verify": "read-back", "layout": "safetensors"}, "byte for byte"),
        ({"verify": "read-back", "subtree": "w"}, "byte for byte"),
        ({"transforms": [object()]}, "needs a layout"),
        ({"transforms": [object()], "layout": "safetensors", "subtree": ()}, "accepts transforms or a subtree"),
        ({"layout": "memory-of-elephants", "subtree": ()}, "omit the subtree"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", {"w": np.ones(3)})
    with pytest.raises(ValueError, match=message):
        COPY(tmp_path / "source", tmp_path / "copy", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_plan_takes_one_state_or_a_function_of_the_rank() -> None:
    state = {"w": ckptcore.AbstractArray((8, 4), "float32")}
    whole = ckptcore.plan(state, processes=2)
    assert whole.array_bytes == ckptcore.plan(lambda rank: state, processes=2).array_bytes == 128
    assert len(whole.processes) == 2


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with only the core."""
    for name in ("ckptcore_tools", "ckptcore_tools.copies", "ckptcore_tools.dry_run"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_tools")
@pytest.mark.parametrize("name", ["copy", "copy_steps", "plan"])
def test_the_core_alone_names_the_distribution(name: str) -> None:
    with pytest.raises(MissingDistributionError, match=rf"ckptcore\.{name} .* pip install 'ckptcore\[tools\]'"):
        getattr(ckptcore, name)
