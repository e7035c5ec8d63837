"""Receipts reach the leader unchanged, in few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.commit.root import Root
from ckptcore.commit.root_json import decode_root, encode_root
from ckptcore.errors import PluginError, UnsupportedVersionError
from ckptcore.job.receipts import decode_receipts, encode_receipts
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    ArraySpec,
    Box,
    IntegerColumn,
    ItemColumns,
    Node,
    ObjectRecord,
    Receipt,
    TreeMetadata,
    WriteItem,
)

_SHAPES = ((), (1 << 40,), (300, 70_000), (5, 0, 3))
_TREE = TreeMetadata(
    Node("dict", tuple(map(str, range(len(_SHAPES)))), (LEAF,) * len(_SHAPES)),
    tuple(ArrayRecord(ArraySpec(shape, "int8")) for shape in _SHAPES),
)


def _box(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    bounds = [st.tuples(st.integers(0, extent), st.integers(0, extent)).map(sorted) for extent in shape]
    return st.tuples(*bounds).map(lambda axes: Box(tuple(low for low, _ in axes), tuple(high for _, high in axes)))


_ITEMS = st.lists(
    st.integers(0, len(_SHAPES) - 1).flatmap(
        lambda leaf: st.lists(_box(_SHAPES[leaf]), max_size=4).map(
            lambda boxes: WriteItem(leaf, ArraySpec(_SHAPES[leaf], "int8"), tuple(boxes))
        )
    ),
    max_size=12,
).map(tuple)
_NUMBERS = st.lists(
    st.one_of(st.integers(0, 200), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(1 << 63, 1 << 70)), max_size=40
)
_STATES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False), _NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=12), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
_OBJECTS = st.lists(
    st.builds(ObjectRecord, st.text(min_size=1, max_size=9), st.integers(0, 1 << 60), st.binary(max_size=40)),
    max_size=12,
).map(tuple)


@given(st.lists(st.builds(Receipt, st.integers(0, 1 << 24), _ITEMS, _STATES, _OBJECTS), max_size=3))
def test_receipts_come_back_as_they_were(receipts: list[Receipt]) -> None:
    trees = [_TREE] * len(receipts)
    for decoded, receipt in zip(decode_receipts(trees, encode_receipts(trees, receipts)), receipts, strict=True):
        assert decoded.rank == receipt.rank
        assert tuple(decoded.items) == receipt.items
        assert _plain(decoded.state) == receipt.state
        assert decoded.objects == receipt.objects


def _plain(state: Any) -> Any:
    """Return the state with lists in place of columns."""
    if isinstance(state, dict):
        return {name: _plain(inner) for name, inner in state.items()}
    return [_plain(inner) for inner in state] if isinstance(state, list | IntegerColumn) else state


@pytest.mark.parametrize(
    "numbers", [[7] * 20, list(range(0, 10_000_000, 1000)), [-(1 << 63), (1 << 63) - 1] * 9, [0, 255] * 9, [-1, 3] * 9]
)
def test_columns_iterate_as_lists_of_numbers(numbers: list[int]) -> None:
    (decoded,) = decode_receipts([_TREE], encode_receipts([_TREE], [Receipt(0, (), {"column": numbers}, ())]))
    assert isinstance(decoded.state, dict)
    column = decoded.state["column"]
    assert isinstance(column, IntegerColumn)
    assert list(column) == numbers and column == numbers and column[3] == numbers[3] and column[1:4] == numbers[1:4]
    assert {type(number) for number in column} == {int}
    assert np.array(column, np.int64).tolist() == numbers and len(column) == len(numbers)
    assert np.asarray(column).dtype == np.int64


def test_other_lists_do_not_become_columns() -> None:
    state: JSON = {
        "mixed": [1, True] * 9,
        "floats": [1.0] * 9,
        "few": [1, 2, 3],
        "large": [1 << 64] * 9,
        "": [[0] * 9] * 2,
    }
    (decoded,) = decode_receipts([_TREE], encode_receipts([_TREE], [Receipt(0, (), state, ())]))
    assert _plain(decoded.state) == state
    assert isinstance(decoded.state, dict) and type(decoded.state["mixed"]) is list
    assert [type(number) for number in decoded.state["mixed"]] == [int, bool] * 9


def test_a_chunk_takes_few_bytes() -> None:
    """The receipt has a grid of rows, such as the chunks of one process."""
    boxes = [Box((number, 0), (number + 1, 70_000)) for number in range(300)]
    items = tuple([WriteItem(2, ArraySpec(_SHAPES[2], "int8"), (box,)) for box in boxes])
    state = {"offset": list(range(0, 300 << 20, 1 << 20)), "leaf": [2] * 300}
    assert len(encode_receipts([_TREE], [Receipt(3, items, state, ())])) < 300 * 26


def test_decoded_columns_can_be_encoded_again() -> None:
    receipt = Receipt(0, (WriteItem(1, ArraySpec(_SHAPES[1], "int8"), (Box((1,), (9,)),)),), [5] * 20, ())
    (once,) = decode_receipts([_TREE], encode_receipts([_TREE], [receipt]))
    (twice,) = decode_receipts([_TREE], encode_receipts([_TREE], [once]))
    assert isinstance(twice.items, ItemColumns) and tuple(twice.items) == receipt.items and twice.state == [5] * 20


def test_another_version_is_refused() -> None:
    encoded = encode_receipts([_TREE], [Receipt(0, (), None, ())])
    with pytest.raises(UnsupportedVersionError, match="same version of ckptcore in all"):
        decode_receipts([_TREE], encoded.replace(b'"version":1', b'"version":2', 1))


def test_a_state_that_is_not_json_is_refused() -> None:
    with pytest.raises(PluginError, match="not JSON"):
        encode_receipts([_TREE], [Receipt(0, (), {"set": object()}, ())])  # type: ignore[dict-item]  # not JSON


def test_a_layout_may_store_columns_of_receipts_in_the_root() -> None:
    (receipt,) = decode_receipts([_TREE], encode_receipts([_TREE], [Receipt(0, (), [list(range(20))], ())]))
    root = Root(save_id="0" * 16, created="", writer={}, layout="rows", state=receipt.state, tree=_TREE, objects={})
    data, parts = encode_root(root)
    decoded = decode_root(data, lambda key, size: parts[key])
    assert isinstance(decoded, Root) and decoded.state == [list(range(20))]
