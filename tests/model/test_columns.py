"""Values stored as columns: exact round trips, and errors for damaged records."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest
from ckptcore_testing.trees import comparable
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import ValueRecord, column_array, column_summary, column_value
from ckptcore.model.columns import COLUMN_VALUES, column_record, is_column, is_plain

_INTS = st.integers() | st.sampled_from([2**63 - 1, -(2**63), 2**63, 127, 128, -128, -129, 0])
_VALUES = st.none() | st.booleans() | _INTS | st.floats() | st.text(max_size=5)
_LISTS = st.lists(_VALUES) | st.lists(_INTS) | st.lists(st.floats()) | st.lists(st.booleans()) | st.lists(st.none())
_NESTED = st.lists(_VALUES | _LISTS | _LISTS.map(tuple) | st.lists(_LISTS, max_size=3), max_size=6)


def through_json(record: ValueRecord) -> ValueRecord:
    """Return a record after a round trip through JSON, as in a root."""
    return ValueRecord(record.kind, json.loads(json.dumps(record.value, allow_nan=False)))


@given(_NESTED | _LISTS | _LISTS.map(tuple) | _NESTED.map(tuple))
def test_lists_and_tuples_have_exact_round_trips(value: list[Any] | tuple[Any, ...]) -> None:
    assert comparable(column_value(through_json(column_record(value)))) == comparable(value)


@given(st.dictionaries(st.text() | _INTS, _VALUES))
def test_dicts_have_exact_round_trips(value: dict[Any, Any]) -> None:
    assert comparable(column_value(through_json(column_record(value)))) == comparable(value)


def test_floats_keep_their_bits() -> None:
    patterns = [0x8000000000000000, 0x7FF8000000000123, 0xFFF8000000000001, 0x7FF0000000000000, 1]
    value = [struct.unpack("<d", struct.pack("<Q", pattern))[0] for pattern in patterns]
    assert comparable(column_value(through_json(column_record(value)))) == comparable(value)


def test_numbers_are_stored_in_as_few_bytes_as_possible() -> None:
    small, large = column_record(list(range(100))), column_record([1 << 40] * 100)
    assert small.value == {"items": {"int": [1, base64.b64encode(bytes(range(100))).decode()]}}
    assert large.value["items"]["int"][0] == 6  # type: ignore[index,call-overload]  # the value is JSON


def test_rows_of_the_same_structure_are_one_run() -> None:
    record = column_record([[1, 2], [3, 4], [5, 6], (7,), []])
    assert record.value["runs"] == [["list", [2], 3], ["tuple", [1], 1], ["list", [], 1]]  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    "value",
    [
        [0] * COLUMN_VALUES,
        (0.5,) * COLUMN_VALUES,
        dict.fromkeys(range(COLUMN_VALUES), "a"),
        [[0, (1, 2)]] * COLUMN_VALUES,
        [None, True, "a", 1.5, 2] * COLUMN_VALUES,
    ],
)
def test_long_containers_of_plain_values_are_columns(value: Any) -> None:
    assert is_column(value)
    assert is_plain(value)
    first = next(iter(value))
    short = {first: value[first]} if isinstance(value, dict) else value[:3]
    assert not is_column(short)
    assert is_plain(short)


@pytest.mark.parametrize(
    "value",
    [
        [1] * COLUMN_VALUES + [b"bytes"],
        [1] * COLUMN_VALUES + [1j],
        [1] * COLUMN_VALUES + ["long" * 2000],
        [[1]] * COLUMN_VALUES + [["long" * 2000]],
        [1] * COLUMN_VALUES + [{}],
        [{"a": 1}] * COLUMN_VALUES,
        {key: [] for key in range(COLUMN_VALUES)},
        {number / 3: 1 for number in range(COLUMN_VALUES)},
        {number > 0: 1 for number in range(2)} | dict.fromkeys(range(2, COLUMN_VALUES), 1),
        [[[[[1]]]]] * COLUMN_VALUES,
        type("Numbers", (list,), {})([1] * COLUMN_VALUES),
    ],
)
def test_other_containers_are_no_columns(value: Any) -> None:
    assert not is_column(value)


def test_a_list_that_contains_itself_is_no_column() -> None:
    value: list[Any] = [1] * COLUMN_VALUES
    value.append(value)
    assert not is_column(value)
    assert not is_plain(value)


def test_columns_have_arrays_and_summaries() -> None:
    assert column_array(column_record([1, 2])).tolist() == [1, 2]  # type: ignore[union-attr]
    assert column_array(column_record((True,))).dtype == bool  # type: ignore[union-attr]
    assert column_array(column_record([1, 2.5])) is None
    assert column_array(column_record([1 << 70])) is None
    assert column_array(column_record([[1], [2]])) is None
    assert column_summary(column_record([1, 2.5, None])) == "3 none or int or float"
    assert column_summary(column_record({"a": 1})) == "1 int"
    assert column_summary(ValueRecord("int", 1)) is None
    assert column_summary(ValueRecord("list", 1)) == "damaged"


_FOUR = base64.b64encode(bytes(4)).decode()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"items": {}},
        {"items": {"int": [0, _FOUR]}},
        {"items": {"int": [9, _FOUR]}},
        {"items": {"int": [3, _FOUR]}},
        {"items": {"int": [-1, _FOUR]}},
        {"items": {"float": _FOUR}},
        {"items": {"float": "!"}},
        {"items": {"other": _FOUR}},
        {"items": {"str": [1]}},
        {"items": {"long": [1]}},
        {"items": {"int": [1, _FOUR], "bool": _FOUR}},
        {"items": {"types": _FOUR, "int": [1, _FOUR]}},
        {"items": {"types": base64.b64encode(b"\x02\x09").decode(), "int": [1, _FOUR]}},
        {"items": {"types": base64.b64encode(b"\x02" * 5).decode(), "int": [1, _FOUR]}},
        {"items": {"int": [1, _FOUR]}, "runs": [5]},
        {"items": {"int": [1, _FOUR]}, "runs": [3]},
        {"items": {"int": [1, _FOUR]}, "runs": [-4]},
        {"items": {"int": [1, _FOUR]}, "runs": [["list", [1], 10**12]]},
        {"items": {"int": [1, _FOUR]}, "runs": [4, ["list", [], 10**12]]},
        {"items": {"int": [1, _FOUR]}, "runs": [["list", [["list", [["list", [["list", [4], 1]], 1]], 1]], 1]]},
        {"items": {"int": [1, _FOUR]}, "runs": [["dict", [4], 1]]},
    ],
)
def test_damaged_lists_are_refused(value: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="a saved list of plain values cannot be read"):
        column_value(ValueRecord("list", value))


@pytest.mark.parametrize("keys", [{"int": [1, _FOUR]}, {"str": ["a", "b", "c"]}, {"float": _FOUR * 8}, {"bool": _FOUR}])
def test_damaged_dicts_are_refused(keys: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="a saved dict of plain values cannot be read"):
        column_value(ValueRecord("dict", {"keys": keys, "items": {"int": [1, _FOUR]}}))


def test_infinite_numbers_are_allowed() -> None:
    assert column_value(through_json(column_record([math.inf, -math.inf]))) == [math.inf, -math.inf]
