"""Second saves of the replacements on file systems without an exchange of directories, and on an object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from ckptcore_integrations import orbax_v1, torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptcore
from ckptcore.builtin import local_calls

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch and Orbax warn about jobs and deprecated functions


def _dcp(location: str, number: int) -> list[float]:
    torch_dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=location)
    state: dict[str, Any] = {"w": torch.zeros(3)}
    torch_dcp.load(state, checkpoint_id=location)
    return list(state["w"].tolist())


def _orbax(location: str, number: int) -> list[float]:
    orbax_v1.save(location, {"w": np.full(3, float(number))}, overwrite=True)
    return [float(value) for value in orbax_v1.load(location)["w"]]


_SAVES: Final[dict[str, Callable[[str, int], list[float]]]] = {"dcp": _dcp, "orbax": _orbax}


@pytest.mark.parametrize("library", _SAVES)
def test_the_second_save_replaces_the_first(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_calls, "c_function", lambda *_: None)
    for number in (1, 2, 3):
        assert _SAVES[library](str(tmp_path / "c"), number) == [number] * 3


def test_an_object_store_keeps_the_first() -> None:
    location = "memory://places/dcp/c"
    assert _dcp(location, 1) == [1] * 3
    with pytest.raises(CheckpointException, match=r"or delete it with ckptcore\.delete first"):
        _dcp(location, 2)
    assert ckptcore.verify(location).ok
    ckptcore.delete(location)
    assert _dcp(location, 2) == [2] * 3
