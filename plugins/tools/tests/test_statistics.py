"""Statistics of arrays, compared with NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_tools.statistics import ArrayStatistics, Histogram, read_statistics, statistics_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ckptcore
from ckptcore.context import Context, MemoryOptions
from ckptcore.model import HostArray, TreePath

DTYPES = ["bool", "int8", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "int4"]


def random(dtype: str, size: int) -> HostArray:
    numbers = np.random.default_rng(1).standard_normal(size) * 3
    return numbers.astype(getattr(ml_dtypes, dtype, dtype))


def edges(histogram: Histogram) -> HostArray:
    return np.linspace(histogram.start, histogram.stop, len(histogram.counts) + 1)


def counts(array: HostArray) -> tuple[int, ...]:
    """Return NumPy's counts for the bins of our histogram."""
    statistics = statistics_of([array])
    assert statistics is not None
    assert statistics.histogram is not None
    inner = edges(statistics.histogram)
    return tuple(np.histogram(array.astype(np.float64), np.append(inner[:-1], np.nextafter(inner[-1], -np.inf)))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_equal_those_of_numpy(dtype: str) -> None:
    array = random(dtype, 10_000)
    statistics = statistics_of([array[:100].reshape(10, 10), array[100:]])
    wide = array.astype(np.float64)
    assert statistics is not None
    assert (statistics.elements, statistics.nan, statistics.infinite) == (10_000, 0, 0)
    assert statistics.zeros == int((wide == 0).sum())
    assert (statistics.minimum, statistics.maximum) == (wide.min(), wide.max())
    expected = (wide.mean(), wide.std(), np.linalg.norm(wide))
    assert (statistics.mean, statistics.deviation, statistics.norm) == pytest.approx(expected, rel=1e-12)
    assert statistics.histogram is not None
    assert sum(statistics.histogram.counts) == 10_000
    assert statistics.histogram.counts == counts(array)


@given(
    st.lists(
        arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(allow_nan=False, allow_infinity=False)),
        min_size=1,
        max_size=5,
    )
)
def test_a_histogram_counts_every_element(boxes: list[HostArray]) -> None:
    statistics = statistics_of(boxes)
    assert statistics is not None
    assert statistics.histogram is not None
    whole = np.concatenate(boxes)
    histogram = statistics.histogram
    assert sum(histogram.counts) == whole.size
    assert len(histogram.counts) <= 128
    assert histogram.start <= whole.min()
    assert whole.max() <= histogram.stop
    assert histogram.counts[0]
    assert histogram.counts[-1]
    assert statistics_of([whole]).histogram == histogram  # type: ignore[union-attr]
    assert statistics.minimum is not None and statistics.mean is not None and statistics.deviation is not None
    assert math.isfinite(statistics.mean)
    assert not math.isnan(statistics.deviation)


@pytest.mark.parametrize("first", [0.0, 1e-4])
def test_equal_elements_at_the_start_leave_the_bins_narrow(first: float) -> None:
    boxes = [np.full(1000, first), random("float64", 1000) * 1e-4]
    statistics = statistics_of(boxes)
    assert statistics is not None
    assert statistics.histogram is not None
    assert len(statistics.histogram.counts) >= 64
    assert statistics_of(boxes[::-1]).histogram == statistics.histogram  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [1e-5, -3e-200, 1.0, 100.0])
def test_the_bin_of_equal_elements_is_near_them(number: float) -> None:
    statistics = statistics_of([np.full(5, number)])
    assert statistics is not None
    assert statistics.histogram is not None
    assert abs(number) / 128 < statistics.histogram.stop - statistics.histogram.start <= abs(number) / 32


@given(st.permutations(range(8)))
def test_the_order_of_boxes_does_not_change_a_histogram(order: list[int]) -> None:
    boxes = [np.full(3, 10.0**number) for number in range(8)]
    assert statistics_of([boxes[number] for number in order]).histogram == statistics_of(boxes).histogram  # type: ignore[union-attr]


def test_bins_of_integers_have_at_least_the_width_one() -> None:
    statistics = statistics_of([np.array([3, 4, 4, 7], np.int16)])
    assert statistics is not None
    assert statistics.histogram == Histogram(3.0, 8.0, (1, 2, 0, 0, 1))


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -2.5, 1e308, -1.7e308, 5e-324, 2.0**53 + 2])
def test_equal_elements_are_in_one_bin(number: float) -> None:
    statistics = statistics_of([np.full(5, number)])
    assert statistics is not None
    assert statistics.histogram is not None
    assert statistics.histogram.counts == (5,)
    assert statistics.histogram.start <= number <= statistics.histogram.stop
    assert (statistics.minimum, statistics.maximum) == (number, number)


def test_equal_elements_have_no_deviation() -> None:
    statistics = statistics_of([np.full(5, 0.1), np.full(3, 0.1)])
    assert statistics is not None
    assert (statistics.mean, statistics.deviation) == (0.1, 0.0)


def test_elements_that_are_not_finite_are_counted_separately() -> None:
    statistics = statistics_of([np.array([np.nan, np.inf, -np.inf, 0.0, 2.0], np.float32)])
    assert statistics is not None
    assert (statistics.elements, statistics.nan, statistics.infinite, statistics.zeros) == (5, 1, 2, 1)
    assert (statistics.minimum, statistics.maximum, statistics.mean, statistics.norm) == (0.0, 2.0, 1.0, 2.0)


def test_no_finite_element() -> None:
    assert statistics_of([np.array([np.nan, np.inf])]) == ArrayStatistics(2, nan=1, infinite=1)
    assert statistics_of([np.ones((0, 3))]) == ArrayStatistics(0)
    assert statistics_of([]) == ArrayStatistics(0)


def test_complex_numbers_have_the_statistics_of_their_absolute_values() -> None:
    statistics = statistics_of([np.array([3 + 4j, 0, 1j], np.complex64)])
    assert statistics is not None
    assert (statistics.minimum, statistics.maximum, statistics.zeros, statistics.norm) == (0.0, 5.0, 1, math.sqrt(26))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"a"]), np.array(["2026-01-01"], "datetime64[D]")])
def test_text_and_times_have_no_statistics(array: HostArray) -> None:
    assert statistics_of([array]) is None
    assert statistics_of([array[:0]]) is None


def test_only_the_first_box_of_a_text_is_read() -> None:
    boxes = iter([np.array(["a"]), np.array(["b"])])
    assert statistics_of(boxes) is None
    assert len(list(boxes)) == 1


def test_large_numbers_do_not_overflow_the_mean() -> None:
    statistics = statistics_of([np.array([-1.7e308, 1.7e308])])
    assert statistics is not None
    assert (statistics.mean, statistics.norm) == (0.0, math.inf)
    statistics = statistics_of([np.array([1.7e308]), np.array([-1.7e308])])
    assert statistics is not None
    assert (statistics.mean, statistics.deviation) == (0.0, math.inf)


def test_the_deviation_of_one_large_number_is_zero() -> None:
    statistics = statistics_of([np.array([1e200])])
    assert statistics is not None
    assert (statistics.mean, statistics.deviation, statistics.norm) == (1e200, 0.0, math.inf)


def test_slices_give_the_statistics_of_the_whole() -> None:
    array = random("float32", 600_000)  # more than two slices
    whole: Any = statistics_of([array])
    sliced: Any = statistics_of(np.array_split(array, 700))
    assert (sliced.minimum, sliced.maximum, sliced.histogram) == (whole.minimum, whole.maximum, whole.histogram)
    expected = (whole.mean, whole.deviation, whole.norm)
    assert (sliced.mean, sliced.deviation, sliced.norm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3"])
def test_statistics_of_some_arrays_of_a_checkpoint(tmp_path: Path, layout: str) -> None:
    tied = random("float32", 10_000).reshape(100, 100)
    state = {"a": {"w": tied, "v": tied}, "b.c": random("bfloat16", 999), "d": np.array(["text"]), "left": np.ones(9)}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    nbytes: list[int] = []
    context = Context(memory=MemoryOptions(load_bytes=4096))  # several boxes of each array
    paths: list[TreePath] = [("a", "v"), ("b.c",), ("d",)]
    with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
        statistics = read_statistics(checkpoint, paths, nbytes.append)
    assert statistics.keys() == {("a", "w"), ("a", "v"), ("b.c",), ("d",)}
    assert statistics["a", "w"] is statistics["a", "v"]
    assert statistics["d",] is None
    for path, array in ((("a", "w"), tied), (("b.c",), state["b.c"])):
        read, expected = statistics[path], statistics_of([array])
        assert read is not None and expected is not None
        assert (read.elements, read.minimum, read.histogram) == (array.size, expected.minimum, expected.histogram)
        assert read.norm == pytest.approx(expected.norm)
    assert sum(nbytes) == tied.nbytes + state["b.c"].nbytes + state["d"].nbytes
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert read_statistics(checkpoint, [], nbytes.append) == {}
