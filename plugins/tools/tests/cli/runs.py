"""Runs and checkpoints of several checkpointables for commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckptcore


class Iterator:
    """An object with a state."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Notes:
    """An object that writes its own files."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts

    def save(self, directory: Path) -> None:
        (directory / "deep").mkdir()
        for name, text in self.texts.items():
            (directory / "deep" / f"{name}.txt").write_text(text)

    def load(self, directory: Path) -> None:
        self.texts = {path.stem: path.read_text() for path in (directory / "deep").iterdir()}


def checkpointables() -> dict[str, Any]:
    """One checkpointable of each kind."""
    return {
        "model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)},
        "data": Iterator(3),
        "notes": Notes(a="hello", b="x" * 100),
    }


def save_run(directory: Path | str, losses: dict[int, float]) -> None:
    """Save a run. Step `n` has `n` float64 elements, and its loss as a metric."""
    with ckptcore.Checkpointer(directory) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, {"w": np.ones(step)}, metrics={"loss": loss})
