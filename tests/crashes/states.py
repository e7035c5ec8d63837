"""States with a version. Each leaf depends on the version, so that tests detect a mix of two states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CompositeCheckpointError

SMALL: Final = 200
"""Elements of an array of a state whose files are written in one piece."""

LARGE: Final = 1_900_000
"""Elements of an array of a state whose files are allocated first and written in several pieces."""


def make_state(version: int, elements: int = SMALL) -> dict[str, Any]:
    """Return the state of a version. Two versions have no leaf in common."""
    random = np.random.default_rng(version)
    return {
        "version": version,
        "elements": elements,
        "layers": [
            {"weight": random.integers(0, 255, elements, np.uint8), "bias": random.standard_normal(7 + number)}
            for number in range(3)
        ],
        "counts": (np.full((2, 3), version, np.int64), np.float32(version)),
        "name": f"version {version}",
        "long": f"{version:08d}" * 3000,
    }


class _Files:
    """An object that writes some files at once, and the others in the second phase."""

    def __init__(self, version: int) -> None:
        self.version = version

    def save(self, directory: Path) -> Callable[[], None]:
        """Write a file, and return the second phase."""
        files = _files(self.version)
        (directory / "early").write_bytes(files["early"])

        def go_on() -> None:
            (directory / "a" / "b").mkdir(parents=True)
            for key, content in files.items():
                (directory / key).write_bytes(content)

        return go_on

    def load(self, directory: Path) -> None:
        """Fail, because the tests do not call this method."""
        raise NotImplementedError


def _files(version: int) -> dict[str, bytes]:
    return {"a/b/late": b"%08d" % version * 100, "a/empty": b"", "early": b"%d" % version}


def make_composite(version: int) -> dict[str, object]:
    """Return the composite of a version: a tree, a tree of each process, and files."""
    return {
        "state": make_state(version),
        "own": ckptcore.PerProcess({"version": np.full(3, version)}),
        "files": _Files(version),
    }


def _version_of_composite(composite: dict[str, Any]) -> int:
    version = version_of(composite["state"])
    expected = {"state": composite["state"], "own": {"version": np.full(3, version)}, "files": _files(version)}
    assert same_value(composite, expected), f"a mix of composites, with leaves of {version}"
    return version


def version_of(value: Any) -> int:
    """Return the version of a state. Assert that the state is complete."""
    version = value["version"]
    assert type(version) is int
    assert same_value(value, make_state(version, value["elements"])), f"a mix of states, with leaves of {version}"
    return version


def version_at(location: str, **options: Any) -> int | None:
    """Return the version of the state or composite at a location, or None. Assert that it is complete and valid."""
    try:
        version = version_of(ckptcore.load(location, **options))
    except CompositeCheckpointError:
        version = _version_of_composite(ckptcore.load_checkpointables(location, **options))
    except CheckpointNotFoundError:
        return None
    report = ckptcore.verify(location, **options)
    assert report.ok, report.problems
    return version
