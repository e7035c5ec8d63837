"""The sizes of a small network, and data that it learns: without a framework."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INPUTS = 64
HIDDEN = 1024
CLASSES = 10
VERSIONS = 6
STEPS = 2
"""Steps of training from one version to the next."""

SHAPES = {
    "hidden.weight": (HIDDEN, INPUTS),
    "hidden.bias": (HIDDEN,),
    "output.weight": (CLASSES, HIDDEN),
    "output.bias": (CLASSES,),
}
"""The shapes of the weights by name. The weights that are published are bfloat16."""


def examples(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inputs and their classes, which depend on a fixed direction for each class."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(count, INPUTS)).astype(np.float32)
    directions = np.random.default_rng(0).normal(size=(INPUTS, CLASSES))
    return inputs, (inputs @ directions).argmax(axis=1)


def questions() -> NDArray[np.float32]:
    """Return the inputs that the server answers with each version."""
    return examples(32, seed=1)[0]
