"""Objects of each kind that the core saves: with a state tree, with a state, and with files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Linear:
    """A module: its state is a tree of arrays that can be filled in place."""

    def __init__(self, version: int) -> None:
        self.weight = np.full((3, 4), version, np.float32)
        self.bias = np.arange(4.0) + version

    def get_state_tree(self) -> dict[str, Any]:
        """Return the arrays."""
        return {"weight": self.weight, "bias": self.bias}

    def set_state_tree(self, state_tree: dict[str, Any]) -> None:
        """Set the arrays."""
        self.weight, self.bias = state_tree["weight"], state_tree["bias"]


class Counter:
    """An iterator with a state that differs between processes."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.seen: list[int] = list(range(position))

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.seen.append(self.position)
        self.position += 1
        return self.position - 1

    def get_state(self) -> dict[str, Any]:
        """Return the state, including a list that later calls change."""
        return {"position": self.position, "seen": self.seen}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a stored position."""
        self.position, self.seen = state["position"], list(state["seen"])


class Files:
    """An object that writes its files in the background. It can fail in each method."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.files = dict(files or {})
        self.save_error: Exception | None = None
        self.late_error: Exception | None = None
        self.load_error: Exception | None = None
        self.then: Callable[[Path], None] | None = None

    def save(self, directory: Path) -> Callable[[], None]:
        """Return a function that writes the current files."""
        files = dict(self.files)
        (directory / "early").write_bytes(b"before the continuation")
        if self.save_error is not None:
            raise self.save_error

        def go_on() -> None:
            (directory / "early").unlink()
            for key, content in files.items():
                path = directory / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if self.then is not None:
                self.then(directory)
            if self.late_error is not None:
                raise self.late_error

        return go_on

    def load(self, directory: Path) -> None:
        """Replace the files by those in the directory."""
        self.files = {}
        if self.load_error is not None:
            raise self.load_error
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.files[path.relative_to(directory).as_posix()] = path.read_bytes()


def staged() -> set[str]:
    """Return the temporary directories of files."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ckptcore-")}
