"""Objects that save themselves under a name of `save_checkpointables`."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptcore

grain = pytest.importorskip("grain")


class Position:
    """An object that writes a file in the background."""

    def __init__(self, value: int) -> None:
        self.value = value

    def save(self, directory: Path) -> Any:
        """Capture the value, and return a function that writes it."""
        text = str(self.value)

        def write() -> None:
            (directory / "deeper").mkdir()
            (directory / "deeper" / "value").write_text(text)

        return write

    def load(self, directory: Path) -> None:
        """Read the file."""
        self.value = int((directory / "deeper" / "value").read_text())


class Meter:
    """An object whose state is empty until its first use."""

    def __init__(self) -> None:
        self.history: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the history, if it exists."""
        return {} if self.history is None else {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history."""
        self.history = state.get("history")


def iterator() -> Any:
    return iter(grain.MapDataset.range(50).shuffle(seed=1).to_iter_dataset())


def objects() -> dict[str, Any]:
    return {
        "params": {"w": np.zeros(3)},
        "position": Position(0),
        "meter": Meter(),
        "data": iterator(),
        "numpy": np.random.default_rng(0),
        "python": random.Random(0),
        "torch": torch.Generator().manual_seed(0),
        "module": torch.nn.Linear(2, 2),
    }


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_all_kinds_of_objects_resume(scheme: str, tmp_path: Path) -> None:
    location = str(tmp_path / "step") if scheme == "file" else f"memory://{tmp_path.name}/step"
    state = objects()
    state["params"]["w"] += 1
    state["position"].value = 7
    state["meter"].history = np.arange(4.0)
    for _ in range(3):
        next(state["data"])
        state["numpy"].random()
        state["python"].gauss(0, 1)
        torch.rand(1, generator=state["torch"])
    weight = state["module"].weight.detach().clone()
    handle = ckptcore.save_checkpointables_async(location, state)
    state["params"]["w"] += 100
    state["position"].value = 8
    state["meter"].history += 100
    with torch.no_grad():
        state["module"].weight.zero_()
    expected = [
        list(itertools.islice(state["data"], 5)),
        state["numpy"].random(5).tolist(),
        [state["python"].gauss(0, 1) for _ in range(3)],
        torch.rand(5, generator=state["torch"]).tolist(),
    ]
    handle.result()

    targets = objects()
    params = targets.pop("params")
    loaded = ckptcore.load_checkpointables(location, {"params": params}, into=targets)
    assert {name for name in targets if loaded[name] is targets[name]} == targets.keys() and loaded[
        "params"
    ] is not params
    assert loaded["params"]["w"].tolist() == [1, 1, 1]
    assert loaded["position"].value == 7
    assert loaded["meter"].history.tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded["module"].weight, weight)
    resumed = [
        list(itertools.islice(loaded["data"], 5)),
        loaded["numpy"].random(5).tolist(),
        [loaded["python"].gauss(0, 1) for _ in range(3)],
        torch.rand(5, generator=loaded["torch"]).tolist(),
    ]
    assert resumed == expected


def test_a_single_object_can_be_loaded(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "step", objects())
    target = Position(3)
    assert ckptcore.load_checkpointables(tmp_path / "step", into={"position": target}) == {"position": target}
    assert target.value == 0
