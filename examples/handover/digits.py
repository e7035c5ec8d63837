"""Batches of the digits of scikit-learn, and the sizes of the network, without a framework."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import grain
import numpy as np
from sklearn.datasets import load_digits

STEPS: Final = 120
SAVE_EVERY: Final = 10
LEARNING_RATE: Final = 3e-4

_HIDDEN: Final = 4096

SHAPES: Final = {
    "hidden.weight": (_HIDDEN, 64),
    "hidden.bias": (_HIDDEN,),
    "output.weight": (10, _HIDDEN),
    "output.bias": (10,),
}
"""The names of the parameters in both frameworks, in the order of their numbers in the optimizer of PyTorch."""


def batches() -> Iterator[dict[str, Any]]:
    """Return an endless iterator of shuffled batches, as NumPy arrays. Its position can be saved."""
    digits = load_digits()
    examples = [
        {"image": image.reshape(64).astype(np.float32) / 16, "label": label}
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    dataset = grain.MapDataset.source(examples).seed(0).shuffle().repeat().batch(64)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))
