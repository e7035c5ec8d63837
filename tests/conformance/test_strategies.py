"""The Hypothesis strategies of the testing kit give valid examples."""

from __future__ import annotations

from ckptcore_testing import assert_same_bits, bit_patterns, strategies
from ckptcore_testing.coverage import assert_covers, assert_inside
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import ArraySpec, name_of_dtype


@given(data=st.data())
def test_partitions_cover_the_array(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    assert_covers(data.draw(strategies.partitions(shape)), shape, "a partition")


@given(data=st.data())
def test_boxes_are_inside_the_array(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    box = data.draw(strategies.boxes(shape))
    assert_inside(box, shape, "a box")
    assert box.size or not ArraySpec(shape, "int8").size


@given(spec=strategies.specs())
def test_bit_patterns_match_their_spec_and_are_deterministic(spec: ArraySpec) -> None:
    array = bit_patterns(spec)
    assert array.shape == spec.shape
    assert name_of_dtype(array.dtype) == spec.dtype
    assert array.flags.writeable
    assert_same_bits(bit_patterns(spec), array, "again")
