"""The geometry of boxes in C order, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ckptcore_testing.strategies import boxes
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.io.elements import bytes_of, c_strides, run_axis, runs, spans
from ckptcore.model import Box
from ckptcore.planning import boxes_of_range

full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def counted(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


@given(full_shapes)
def test_strides_equal_those_of_numpy(shape: tuple[int, ...]) -> None:
    assert c_strides(shape) == tuple([stride // 8 for stride in np.zeros(shape, np.int64).strides])


@given(full_shapes, st.data())
def test_the_boxes_of_a_flat_range_contain_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = counted(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    pairs = boxes_of_range(shape, start, stop)
    elements = [element for low, high in pairs for element in array[Box(low, high).slices].ravel().tolist()]
    assert elements == list(range(start, stop))
    assert len(pairs) <= max(1, 2 * len(shape) - 1)


@given(full_shapes, st.data())
def test_runs_are_the_contiguous_ranges_of_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes(shape))
    array = counted(shape)
    wanted = array[box.slices].ravel().tolist()
    least = run_axis(shape, box)
    for axis in range(least, len(shape) + 1):
        length = int(np.prod(box.shape[axis:]))
        starts = list(runs(shape, box, axis))
        assert [flat + step for _, flat in starts for step in range(length)] == wanted
        assert [int(array[index]) for index, _ in starts] == [flat for _, flat in starts]
    assert least == 0 or box.shape[least] < shape[least]  # the outermost axis with contiguous runs


@given(full_shapes, st.integers(0, 20), st.data())
def test_spans_cover_a_box_and_its_small_gaps(shape: tuple[int, ...], most_gap: int, data: st.DataObject) -> None:
    box = data.draw(boxes(shape))
    wanted = counted(shape)[box.slices].ravel().tolist()
    expected = [[wanted[0], wanted[0] + 1]]
    for element in wanted[1:]:
        if element - expected[-1][1] <= most_gap:
            expected[-1][1] = element + 1
        else:
            expected.append([element, element + 1])
    assert [list(span) for span in spans(shape, box, most_gap)] == expected


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
        np.arange(12, dtype=np.uint8).reshape(3, 4)[:, ::2],
        np.array([None]),
        np.zeros(2, [("a", "<i4"), ("b", object)]),
    ],
)
def test_only_the_memory_of_contiguous_numbers_is_bytes(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="expected a C-contiguous array of numbers"):
        bytes_of(array)


@pytest.mark.parametrize(
    "array", [np.array(3.0), np.empty((0, 3)), np.asfortranarray(np.ones((1, 3))), np.ones(3, ">i4")]
)
def test_bytes_of_an_array_are_its_memory(array: np.ndarray[Any, Any]) -> None:
    assert bytes_of(array).tobytes() == array.tobytes()
    assert array.size == 0 or np.shares_memory(np.frombuffer(bytes_of(array), np.uint8), array)
