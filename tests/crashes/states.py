"""States to save, every leaf of which tells which one it belongs to."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.errors import CheckpointNotFoundError

__all__ = ["LARGE", "SMALL", "make_state", "same_value", "version_at", "version_of"]

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


def version_of(value: Any) -> int:
    """Which state a value is; fails if it is none whole."""
    version = value["version"]
    assert type(version) is int
    assert same_value(value, make_state(version, value["elements"])), f"a mix of states, with leaves of {version}"
    return version


def version_at(location: str, **options: Any) -> int | None:
    """Which state is saved at a location, whole and verified; None if there is no checkpoint."""
    try:
        value = ckptcore.load(location, **options)
    except CheckpointNotFoundError:
        return None
    report = ckptcore.verify(location)
    assert report.ok, report.problems
    return version_of(value)


def same_value(found: Any, expected: Any) -> bool:
    """Whether two trees are the same to the last bit, types included."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same_value(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(expected, np.ndarray | np.generic):
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return False
        return bytes(found.tobytes()) == bytes(expected.tobytes())
    return bool(found == expected)
