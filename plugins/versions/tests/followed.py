"""A directory of versions for tests: weights that change from version to version in known elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from ckptcore_versions.follower import FOLLOWED_NAMES

import ckptcore

Weights = dict[str, Any]

TRAINED_SHAPE = (1200, 1000)


def first_weights(rows: int = 600) -> Weights:
    """Return weights of three arrays: 2.3 MiB of float32, a vector of bfloat16, and a number without axes."""
    rng = np.random.default_rng(0)
    return {
        "layers": {"0": {"weight": rng.normal(size=(rows, 1000)).astype(np.float32)}},
        "bias": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "scale": np.array(0.5, np.float64),
    }


def changed_weights(weights: Weights, number: int) -> Weights:
    """Return the weights of the next version: one row of a matrix changes, and the number without axes."""
    matrix = weights["layers"]["0"]["weight"].copy()
    matrix[number % len(matrix)] += 1.0
    return {**weights, "layers": {"0": {"weight": matrix}}, "scale": np.array(float(number), np.float64)}


def trained(number: int) -> Weights:
    """Return the weights of a version: 2 % of the elements of a matrix change, a vector changes, another never does."""
    elements = np.arange(TRAINED_SHAPE[0] * TRAINED_SHAPE[1], dtype=np.int64)
    changed = number - (number + elements * 7919) % 50
    return {
        "matrix": np.maximum(changed, 0).astype(np.float32).reshape(TRAINED_SHAPE) + 0.5,
        "vector": np.full(7, number, np.int32),
        "frozen": np.arange(500_000, dtype=np.float32),
    }


class Published:
    """Full versions that a `Checkpointer` writes. Close it, or use it in a ``with`` statement.

    Attributes:
        location: the directory.
        weights: the weights by version.
    """

    def __init__(self, location: str | Path, context: ckptcore.Context | None = None) -> None:
        """Open the directory."""
        self.location = str(location)
        self.weights: dict[int, Weights] = {}
        self.checkpointer = ckptcore.Checkpointer(location, step_names=FOLLOWED_NAMES, context=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory."""
        self.checkpointer.close()

    def publish(self, number: int) -> Weights:
        """Publish a version, and return its weights."""
        newest = max(self.weights, default=None)
        weights = first_weights() if newest is None else changed_weights(self.weights[newest], number)
        self.weights[number] = weights
        self.checkpointer.save_blocking(number, weights)
        return weights


def expect_equal(version: Any, weights: Weights) -> None:
    """Expect that a version has these weights, in its arrays and in its files."""
    expected = named(weights)
    assert set(version.arrays) == set(expected)
    loaded = ckptcore.load(version.directory)
    for name, array in expected.items():
        assert not version.arrays[name].flags.writeable
        for found in (version.arrays[name], loaded[name]):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(found), array, err_msg=name)


def named(weights: Weights) -> dict[str, Any]:
    """Return the arrays of weights by the names in files."""
    names: dict[str, Any] = {}
    for key, value in weights.items():
        if isinstance(value, dict):
            names.update({f"{key}.{inner}": array for inner, array in named(value).items()})
        else:
            names[key] = value
    return names
