"""Runs, checkpoints and documents for the tests of the viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_view.documents import Request, document_of, panels
from ckptcore_view.viewed import Viewed

import ckptcore
from ckptcore.context import default_context

Load = Callable[..., Any]


def state(scale: float = 1.0) -> dict[str, Any]:
    """A tree with dotted names, values and arrays of several shapes."""
    weight = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) * np.float32(scale)
    return {
        "model": {
            "layers.0.weight": weight,
            "layers.0.bias": np.zeros(48, np.float32),
            "layers.1.weight": weight[:2] + 1,
            "layers.1.bias": np.full(48, np.nan, np.float32),
            "head": weight,
        },
        "step": 5,
        "name": "a run",
        "cube": np.ones((2, 3, 4), np.int16),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one tree."""
    ckptcore.save(tmp_path / "checkpoint", state(), metadata={"note": "for tests"})
    return tmp_path / "checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 10, 20 and 30, and metrics."""
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state(step), metrics={"loss": 1 / step})
    return tmp_path / "run"


def damage(file: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def documents() -> Callable[..., Load]:
    """Return a function that loads the documents of a location."""

    def of(location: object, **options: Any) -> Load:
        viewed = Viewed(str(location), default_context(), **options)

        def load(name: str, **parameters: object) -> Any:
            return document_of(viewed, name, Request({key: str(value) for key, value in parameters.items()}))

        return load

    return of


PANELS = """
from itertools import count

numbers = count(1)

def bars(location, context):
    return {
        "title": "Time",
        "lines": ["<b>first</b>", "second"],
        "bars": {
            "title": "Time of each job",
            "parts": ["steps", "saves"],
            "rows": [{"name": "job 1", "seconds": [90.5, 9.5]}, {"name": "job 2", "seconds": [0, 50]}],
        },
        "table": {"headings": ["job", "#failures"], "rows": [["job 1", "3"], ["job 2", "0"]]},
    }

def text(location, context):
    return {"title": f"Text of {location}"}

def nothing(location, context):
    return None

def broken(location, context):
    raise ValueError("in https://user:secret@host/x")

def no_json(location, context):
    return {"title": object()}

def no_panel(location, context):
    return ["Time"]

def no_rows(location, context):
    return {"title": "Time", "table": {"headings": ["job"], "rows": "none"}}

def too_long(location, context):
    return {"title": "Time", "bars": {"title": "", "parts": ["a"], "rows": [{"name": "1", "seconds": [1, 2]}]}}

def counted(location, context):
    return {"title": str(next(numbers))}
"""
"""Panels of a distribution."""


def add_panels(directory: Path, monkeypatch: pytest.MonkeyPatch, **functions: str) -> None:
    """Install a distribution with entry points for functions of `PANELS`, by name."""
    information = directory / "guest-1.0.dist-info"
    information.mkdir(parents=True)
    module = f"panels_of_{directory.parent.name}"
    (directory / f"{module}.py").write_text(PANELS, encoding="utf-8")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n", encoding="utf-8")
    entries = "".join([f"{name} = {module}:{function}\n" for name, function in functions.items()])
    (information / "entry_points.txt").write_text(f"[ckptcore.panels]\n{entries}", encoding="utf-8")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setattr(panels, "installed_panels", panels.installed_panels.__wrapped__)  # not those of before
