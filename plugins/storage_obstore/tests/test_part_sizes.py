"""Parts of uploads are contiguous and large enough, and their number is limited."""

from __future__ import annotations

import pytest
from ckptcore_obstore.uploads import MAX_PARTS, MIN_PART_BYTES
from ckptcore_obstore.writer import PartSizes
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20
MAX_BYTES = 5 << 40  # the maximum size of an object in S3


@given(
    size=st.one_of(st.none(), st.integers(1, MAX_BYTES)),
    least=st.integers(5, 64).map(lambda number: number * MIB),
    data=st.data(),
)
def test_parts_are_contiguous(size: int | None, least: int, data: st.DataObject) -> None:
    sizes = PartSizes(size, least)
    end = min(MAX_BYTES, 1023 * 1000 * least) if size is None else size  # 4.9 TiB or more
    position = data.draw(st.integers(0, end - 1))
    part = sizes.at(position)
    assert part.start <= position < part.stop
    assert 1 <= part.number <= MAX_PARTS
    assert sizes.at(part.start) == sizes.at(part.stop - 1) == part
    if part.stop < end:
        assert part.stop - part.start >= MIN_PART_BYTES
        assert part.start % least == 0, "what is written at multiples of it is not copied"
        following = sizes.at(part.stop)
        assert (following.number, following.start) == (part.number + 1, part.stop)
    assert sizes.at(0).number == 1
    assert sizes.is_one == (size is not None and size <= least)


@pytest.mark.parametrize("size", [1, 16 * MIB])
def test_a_small_object_is_one_part(size: int) -> None:
    sizes = PartSizes(size, 16 * MIB)
    assert sizes.is_one
    assert sizes.at(size - 1).stop == size
