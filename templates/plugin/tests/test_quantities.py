"""The plugin passes the conformance tests of ckptcore."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ckptcore_example.handler import QuantityHandler
from ckptcore_example.quantities import Quantity
from ckptcore_testing import SHAPES, LeafExample, LeafHandlerTests, PluginTests, bit_patterns

import ckptcore
from ckptcore.model import ArraySpec


def example(spec: ArraySpec) -> LeafExample:
    """Return the example of a quantity, with an abstract one and a change that a snapshot must not see."""
    elements = bit_patterns(spec)
    return LeafExample(
        str(spec),
        make=lambda: Quantity(elements.copy(), "m"),
        expected=elements,
        elements=lambda leaf: leaf.values,
        abstracts=[lambda: Quantity(elements, "m").spec],
        mutate=lambda leaf: leaf.values.fill(0),
    )


class TestHandler(LeafHandlerTests):
    handler = QuantityHandler()
    examples = (
        *[example(ArraySpec((4, 3), dtype)) for dtype in ("bool", "int16", "float32", "bfloat16")],
        *[example(ArraySpec(shape, "float64")) for shape in SHAPES],
    )
    unsupported = (lambda: Quantity(np.array([None]), "m"),)


class TestPlugin(PluginTests):
    entry_point = "example"
    heavy = ("ckptcore_example.quantities", "ckptcore_example.handler")


def test_a_quantity_keeps_its_unit(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "flight", {"speed": Quantity(np.array([1.0, 2.0]), "m/s")})
    loaded = ckptcore.load(tmp_path / "flight", {"speed": Quantity(np.zeros(2), "m/s").spec})
    assert loaded["speed"].unit == "m/s"
    assert loaded["speed"].values.tolist() == [1.0, 2.0]
