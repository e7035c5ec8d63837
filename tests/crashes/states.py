"""States to save, every leaf of which tells which one it belongs to."""

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
    """The state number `version`; no two states have a leaf in common."""
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
    """Writes files of a state, some at once and some later."""

    def __init__(self, version: int) -> None:
        self.version = version

    def save(self, directory: Path) -> Callable[[], None]:
        """Write."""
        files = _files(self.version)
        (directory / "early").write_bytes(files["early"])

        def go_on() -> None:
            (directory / "a" / "b").mkdir(parents=True)
            for key, content in files.items():
                (directory / key).write_bytes(content)

        return go_on

    def load(self, directory: Path) -> None:
        """Not called by these tests."""
        raise NotImplementedError


def _files(version: int) -> dict[str, bytes]:
    return {"a/b/late": b"%08d" % version * 100, "a/empty": b"", "early": b"%d" % version}


def make_composite(version: int) -> dict[str, object]:
    """The composite number `version`: two trees, one of which may differ from process to process, and files."""
    return {
        "state": make_state(version),
        "own": ckptcore.PerProcess({"version": np.full(3, version)}),
        "files": _Files(version),
    }


def _version_of_composite(found: dict[str, Any]) -> int:
    version = version_of(found["state"])
    expected = {"state": found["state"], "own": {"version": np.full(3, version)}, "files": _files(version)}
    assert same_value(found, expected), f"a mix of composites, with leaves of {version}"
    return version


def version_of(value: Any) -> int:
    """Which state a value is; fails if it is none whole."""
    version = value["version"]
    assert type(version) is int
    assert same_value(value, make_state(version, value["elements"])), f"a mix of states, with leaves of {version}"
    return version


def version_at(location: str, **options: Any) -> int | None:
    """Which state or composite is saved at a location, whole and verified; None if there is no checkpoint."""
    try:
        version = version_of(ckptcore.load(location, **options))
    except CompositeCheckpointError:
        version = _version_of_composite(ckptcore.load_checkpointables(location, **options))
    except CheckpointNotFoundError:
        return None
    report = ckptcore.verify(location, **options)
    assert report.ok, report.problems
    return version
