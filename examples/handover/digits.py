"""Scikit-learn's digits as batches, and the sizes of the network that reads them. Neither belongs to a framework."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import grain
import numpy as np
from sklearn.datasets import load_digits

__all__ = ["LEARNING_RATE", "SAVE_EVERY", "SHAPES", "STEPS", "batches"]

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
"""The parameters, by the names that they have in both frameworks and in the order in which PyTorch's optimizer numbers them."""


def batches() -> Iterator[dict[str, Any]]:
    """Shuffled batches without an end. Grain gives NumPy arrays to whoever asks, and knows where it is."""
    digits = load_digits()
    examples = [
        {"image": image.reshape(64).astype(np.float32) / 16, "label": label}
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    dataset = grain.MapDataset.source(examples).seed(0).shuffle().repeat().batch(64)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))
