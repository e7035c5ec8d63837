"""Values that are easily altered by a round trip. Each is loaded exactly as it was, or its save is refused."""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore import Matching
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import float_from_json, float_to_json

QUICK = ckptcore.Context(durability="none")
LAYOUTS = ("safetensors", "ocdbt", "zarr3", "dcp")
NANS = ("7ff8000000000000", "fff8000000000000", "fff8000000000123", "7ff0000000000123", "ffffffffffffffff")


class Empty(NamedTuple):
    """A named tuple without fields."""


class Number(enum.IntEnum):
    """A subclass of int."""

    ONE = 1


class Quantity(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


class Measured(float):
    """A subclass of float."""


def _float(bits: str) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(number)


def _bits(number: float) -> str:
    return struct.pack(">d", number).hex()


def _characters(text: Any) -> tuple[type, list[Any]]:
    """Return the type and the list of characters. NumPy drops trailing NULs when it prints or compares text."""
    return type(text), list(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_nan_keeps_its_bits(layout: str, tmp_path: Path) -> None:
    numbers = [_float(bits) for bits in NANS]
    saved = {"f": numbers, "c": [complex(number, -0.0) for number in numbers], "d": complex(-0.0, numbers[2])}
    ckptcore.save(tmp_path / "c", saved, layout=layout, context=QUICK)
    for loaded in (ckptcore.load(tmp_path / "c"), ckptcore.load(tmp_path / "c", saved)):
        assert [_bits(number) for number in loaded["f"]] == list(NANS)
        assert [_bits(number.real) for number in loaded["c"]] == list(NANS)
        assert (_bits(loaded["d"].real), _bits(loaded["d"].imag)) == (_bits(-0.0), NANS[2])


@pytest.mark.parametrize(
    "text", ["nan:", "nan:7ff", "nan:3ff0000000000000", "nan:7ff80000000000zz", "NaN", True, None, [1.0]]
)
def test_invalid_encodings_of_floats_are_refused(text: Any) -> None:
    with pytest.raises(ValueError):  # with one of several messages
        float_from_json(text)


def test_floats_are_json_numbers_if_json_has_them() -> None:
    numbers = [0.1, float("inf"), float("-inf"), float("nan"), -float("nan")]
    assert [float_to_json(number) for number in numbers] == [0.1, "inf", "-inf", "nan", "nan:fff8000000000000"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_scalars_keep_trailing_nuls(layout: str, tmp_path: Path) -> None:
    texts = [b"x\0", b"\0", b"\0x", b"ab\0\0", "a\0", "\0\0", "\ud800\0", "\U0001f600"]
    saved = [np.bytes_(text) if isinstance(text, bytes) else np.str_(text) for text in texts]
    ckptcore.save(tmp_path / "c", saved, layout=layout, context=QUICK)
    for loaded in (ckptcore.load(tmp_path / "c"), ckptcore.load(tmp_path / "c", saved)):
        assert list(map(_characters, loaded)) == list(map(_characters, saved))
        assert [list(text) for text in loaded] == [list(text) for text in texts]


def test_text_with_invalid_code_points_is_damage(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", np.str_("ab"), context=QUICK)
    file = tmp_path / "c" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4] + b"\xff" * 4)
    with pytest.raises(CorruptCheckpointError, match="UTF-32"):
        ckptcore.load(tmp_path / "c", context=ckptcore.Context(io=ckptcore.context.IOOptions(verify=False)))


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((1, 2)).view(np.matrix),
        np.zeros(2).view(Quantity),
        np.char.array(["a ", "b"]),
        np.zeros(2, [("a", "i4"), ("b", "f8")]).view(np.recarray),
        np.ma.masked_array([1, 2], [True, False]),
        np.array([None]),
        Measured(1),
        type("Text", (str,), {})("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_save_refuses_values_that_would_load_as_another_type(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="^v: |^v is a "):
        ckptcore.save(tmp_path / "c", {"v": value}, context=QUICK)
    assert not (tmp_path / "c").exists()


def test_a_memory_mapped_array_loads_as_a_plain_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", dtype=np.float32, mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    ckptcore.save(tmp_path / "c", {"v": mapped}, context=QUICK)
    loaded = ckptcore.load(tmp_path / "c")["v"]
    assert type(loaded) is np.ndarray and loaded.tolist() == [1, 2, 3]


@pytest.mark.parametrize("asked", [{}, OrderedDict(), [], (), None])
@pytest.mark.parametrize("stored", [{}, OrderedDict(), [], (), None])
@pytest.mark.parametrize("within", [lambda value: {"v": value}, lambda value: {"a": [value]}])
def test_an_empty_container_keeps_its_type(stored: Any, asked: Any, within: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", within(stored), context=QUICK)
    if isinstance(stored, type(asked)) or isinstance(asked, type(stored)):  # either type of dict can be requested
        assert ckptcore.load(tmp_path / "c", within(asked)) == within(asked)
        return
    with pytest.raises(TreeMismatchError):
        ckptcore.load(tmp_path / "c", within(asked), matching=Matching(values="error"))
    if {type(stored), type(asked)} == {list, tuple}:
        assert ckptcore.load(tmp_path / "c", within(asked), matching=Matching(sequences="either")) == within(asked)
    elif stored is not None and asked is not None:
        with pytest.raises(TreeMismatchError, match="an empty .* is requested, an empty .* is stored"):
            ckptcore.load(tmp_path / "c", within(asked), matching=Matching(sequences="either", values="error"))
    if {type(stored), type(asked)} != {list, tuple}:
        loaded = ckptcore.load(tmp_path / "c", within(asked))
        assert loaded == within(stored)


def test_an_empty_named_tuple_may_be_requested_as_an_empty_dict(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": Empty()}, context=QUICK)
    assert ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract) == ckptcore.load(tmp_path / "c")
    assert ckptcore.load(tmp_path / "c", {"v": Empty()}) == {"v": Empty()}
    assert ckptcore.load(tmp_path / "c", {"v": {}}) == {"v": {}}
