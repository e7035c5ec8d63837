"""Covering arrays have every pair, and checks on all examples name those that failed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ckptcore_testing import LeafExample, LeafHandlerTests, bit_patterns
from ckptcore_testing.pairs import covering_pairs

from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.model import ArraySpec


@pytest.mark.parametrize(
    ("sizes", "rows"), [((4, 4, 11, 5), 60), ((4, 5, 2), 20), ((5, 5, 12, 6, 3), 80), ((3, 3, 3), 12)]
)
def test_every_pair_is_covered(sizes: tuple[int, ...], rows: int) -> None:
    parameters = [[f"{position}-{number}" for number in range(size)] for position, size in enumerate(sizes)]
    covering = covering_pairs(*parameters)
    assert len(covering) == len(set(covering)) <= rows
    for first, second in itertools.combinations(range(len(sizes)), 2):
        found = {(row[first], row[second]) for row in covering}
        assert found == set(itertools.product(parameters[first], parameters[second]))


def test_two_parameters_are_their_product() -> None:
    assert covering_pairs(["a", "b"], ["c", "d"]) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert covering_pairs(["a", "b"], ["c"], []) == []


def test_each_example_that_fails_is_named() -> None:
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
