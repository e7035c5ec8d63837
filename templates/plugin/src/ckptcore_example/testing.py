"""The sample with which the tests of ckptcore combine quantities with every layout, storage and framework."""

from __future__ import annotations

import numpy as np
from ckptcore_testing import FrameworkSample

from ckptcore.model import ArraySpec
from ckptcore_example.quantities import Quantity, QuantitySpec

__all__ = ["SAMPLE"]


def make_quantity(elements: np.ndarray) -> Quantity:
    """Return a quantity with these elements."""
    return Quantity(elements.copy(), "m")


def make_spec(spec: ArraySpec) -> QuantitySpec:
    """Return the abstract quantity for an array."""
    return QuantitySpec(spec.shape, spec.numpy_dtype, "m")


SAMPLE = FrameworkSample(
    name="quantity",
    dtypes=("bool", "int8", "int64", "float16", "float32", "float64", "bfloat16"),
    make=make_quantity,
    abstract=make_spec,
    elements=lambda quantity: quantity.values,
    array_type=Quantity,
    fills=True,
)
