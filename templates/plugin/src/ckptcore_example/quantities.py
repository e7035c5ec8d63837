"""Arrays with a unit. This module does not know ckptcore."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Quantity", "QuantitySpec"]


@dataclass(frozen=True)
class QuantitySpec:
    """The shape, dtype and unit of a quantity: an abstract quantity, without values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    unit: str


@dataclass
class Quantity:
    """An array with a unit."""

    values: np.ndarray
    unit: str

    @property
    def spec(self) -> QuantitySpec:
        """The shape, dtype and unit."""
        return QuantitySpec(self.values.shape, self.values.dtype, self.unit)
