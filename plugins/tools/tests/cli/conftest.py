"""Checkpoints for commands, and fixtures that run commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing.commands import runner
from click.testing import Result

import ckptcore
from plugins.tools.tests.cli.documents import problems

Run = Callable[..., Result]
RunJson = Callable[..., tuple[int, dict[str, Any]]]


def state() -> dict[str, Any]:
    """Return a tree with every kind of container and leaf that reports show."""
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "params": {"w": weight, "tied": weight, "half": np.ones(5, ml_dtypes.bfloat16)},
        "moments": [(np.int64(3), np.zeros((0, 2))), {}],
        "step": 5,
        "rate": float("nan"),
        "name": "run",
        "missing": None,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of ckptcore."""
    location = tmp_path / "checkpoint"
    ckptcore.save(location, state(), metadata={"accuracy": 0.5})
    return location


@pytest.fixture
def run() -> Run:
    """Return a function that runs a command in this process."""

    def invoke(*arguments: object) -> Result:
        from ckptcore_tools.cli.application import application

        return runner().invoke(application, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Return a function that runs a command with ``--json`` and validates its document.

    The function returns the exit code and the document.
    """

    def invoke(kind: Any, *arguments: object) -> tuple[int, dict[str, Any]]:
        result = run(*arguments, "--json")
        document = json.loads(result.stdout)
        assert problems(document, kind) == []
        return result.exit_code, document

    return invoke


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def read_terminal(master: int, *, question: bytes = b"", answer: bytes = b"") -> str:
    """Return what a program writes to a terminal. Answer one question, and close `master` when the program ends."""
    seen = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # Linux raises this error when the program closes its end
            break
        if not piece:
            break
        seen += piece
        if answer and question in seen:
            os.write(master, answer)
            answer = b""
    os.close(master)
    return seen.decode()
