"""Covering arrays contain every pair or triple, and checks of several examples name those that fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ckptcore_testing import LeafExample, LeafHandlerTests, bit_patterns
from ckptcore_testing.covering import covering

from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.model import ArraySpec


@pytest.mark.parametrize(
    ("sizes", "strength", "rows"),
    [
        ((4, 4, 11, 5), 2, 60),
        ((4, 5, 2), 2, 20),
        ((5, 5, 12, 6, 3), 2, 80),
        ((3, 3, 3), 2, 12),
        ((4, 4, 5, 5, 39), 3, 1100),
        ((3, 3, 3, 3), 3, 40),
    ],
)
def test_every_choice_of_values_is_covered(sizes: tuple[int, ...], strength: int, rows: int) -> None:
    parameters = [[f"{position}-{number}" for number in range(size)] for position, size in enumerate(sizes)]
    combinations = covering(*parameters, strength=strength)
    assert len(combinations) == len(set(combinations)) <= rows
    for positions in itertools.combinations(range(len(sizes)), strength):
        covered = {tuple(row[position] for position in positions) for row in combinations}
        assert covered == set(itertools.product(*(parameters[position] for position in positions)))


def test_few_parameters_give_their_product() -> None:
    assert covering(["a", "b"], ["c", "d"], strength=2) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert covering(["a", "b"], ["c", "d"], strength=3) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert covering(["a", "b"], ["c"], [], strength=2) == []


def test_the_error_names_each_example_that_fails() -> None:
    def example(name: str, dtype: str, described: str) -> LeafExample:
        elements = bit_patterns(ArraySpec((2,), dtype))
        return LeafExample(name, lambda: elements, elements.view(described), np.asarray)

    class Suite(LeafHandlerTests):
        handler = HostArrayHandler()
        examples = (
            example("right", "int32", "int32"),
            example("first", "int16", "uint16"),
            example("second", "int8", "uint8"),
        )

    with pytest.raises(AssertionError) as caught:
        Suite().test_describe_returns_the_record_of_the_leaf()
    failures = caught.value.__cause__
    assert isinstance(failures, ExceptionGroup)
    assert [failure.__notes__ for failure in failures.exceptions] == [["with first"], ["with second"]]
