"""Checkpoints that are opened repeatedly. Their roots are read and compared each time, but parsed only once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Context
from ckptcore.commit.root import ROOT_KEY, Root
from ckptcore.commit.stored_root import ParsedRoots, parse_root
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckptcore.model import Box
from ckptcore.model.metadata import TreeMetadata, ValueRecord
from ckptcore.model.tree import LEAF
from ckptcore.protocols import StorageBackend


@pytest.fixture
def context() -> Context:
    return Context(durability="none")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that receives the bytes of every parsed root."""
    seen: list[bytes] = []

    def noting(store: StorageBackend, data: bytes, display: str = "") -> Any:
        seen.append(data)
        return parse_root(store, data, display)

    monkeypatch.setattr("ckptcore.opening.open_checkpoints.parse_root", noting)
    return seen


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_the_root_of_a_checkpoint_that_is_opened_again_is_parsed_once(
    tmp_path: Path, context: Context, parsed: list[bytes], layout: str
) -> None:
    array = np.arange(40).reshape(8, 5)
    ckptcore.save(tmp_path / "c", {"w": array, "step": 3}, layout=layout, context=context)
    for row in range(4):
        with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"][row : row + 2], array[row : row + 2])
            assert checkpoint["step"] == 3
        box = Box((row, 0), (row + 1, 5))
        with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"][box.slices], array[box.slices])
    assert len(parsed) == 1
    with ckptcore.open(tmp_path / "c", context=Context()) as checkpoint:
        assert checkpoint["step"] == 3
    assert len(parsed) == 2  # each Context has its own cache


def test_the_root_of_another_save_is_parsed(tmp_path: Path, context: Context, parsed: list[bytes]) -> None:
    for number in range(3):
        ckptcore.save(tmp_path / "c", {"w": np.full(9, number)}, overwrite=True, context=context)
        for _ in range(2):
            with ckptcore.open(tmp_path / "c", context=context) as checkpoint:
                assert checkpoint["w"][:].tolist() == [number] * 9
    assert len(parsed) == 3
    ckptcore.delete(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.open(tmp_path / "c", context=context)


def test_a_cached_root_that_is_damaged_later_is_refused(tmp_path: Path, context: Context) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(9)}, context=context)
    ckptcore.open(tmp_path / "c", context=context).close()
    root = tmp_path / "c" / ROOT_KEY
    data = bytearray(root.read_bytes())
    data[len(data) // 2] ^= 1
    root.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        ckptcore.open(tmp_path / "c", context=context)


def test_a_copy_shares_the_cached_root_but_not_elements(tmp_path: Path, context: Context, parsed: list[bytes]) -> None:
    array = np.arange(9)
    ckptcore.save(tmp_path / "c", {"w": array}, context=context)
    (tmp_path / "d").mkdir()
    for file in (tmp_path / "c").iterdir():
        data = file.read_bytes()
        (tmp_path / "d" / file.name).write_bytes(data if file.name == ROOT_KEY else data[:-1] + b"\x01")
    with (
        ckptcore.open(tmp_path / "c", context=context) as first,
        ckptcore.open(tmp_path / "d", context=context) as second,
    ):
        np.testing.assert_array_equal(first["w"][:], array)
        with pytest.raises(CorruptCheckpointError, match="/d"):
            second["w"][:]
    assert len(parsed) == 1


def test_root_with_parts_is_read_and_verified_each_time(tmp_path: Path, context: Context, parsed: list[bytes]) -> None:
    ckptcore.save(tmp_path / "c", {f"w{number:0500}": np.full(2, number) for number in range(600)}, context=context)
    parts = [file for file in (tmp_path / "c").iterdir() if file.name.endswith(".tree.json")]
    assert len(parts) == 1
    for _ in range(2):
        ckptcore.open(tmp_path / "c", context=context).close()
    assert len(parsed) == 2
    parts[0].unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        ckptcore.open(tmp_path / "c", context=context)


def root_of(value: Any = 0, parts: tuple[str, ...] = ()) -> Root:
    tree = TreeMetadata(LEAF, (ValueRecord("told", value),))
    return Root(
        save_id="0" * 16,
        created="",
        writer={},
        layout="safetensors",
        state=None,
        tree=tree,
        objects={},
        parts=parts,
    )


def is_kept(known: ParsedRoots[ckptcore.SafetensorsLayout], data: bytes, root: Root) -> bool:
    """Return True if a root is not parsed a second time."""
    parsed: list[bytes] = []

    def parse() -> Root:
        parsed.append(data)
        return root

    for _ in range(2):
        known.keep(data, known.root(data, parse), ckptcore.SafetensorsLayout)  # type: ignore[arg-type]  # the value is a Root
    return len(parsed) == 1


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_roots_with_mutable_values_are_parsed_each_time(value: list[int] | Mapping[str, int]) -> None:
    assert is_kept(ParsedRoots(), b"a", root_of("text"))
    assert not is_kept(ParsedRoots(), b"a", root_of(value))
    assert not is_kept(ParsedRoots(), b"a", root_of(parts=("b",)))
    assert not is_kept(ParsedRoots(), bytes(2 << 20), root_of())


def test_the_cache_keeps_four_roots() -> None:
    known = ParsedRoots[ckptcore.SafetensorsLayout]()
    for number in range(6):
        assert is_kept(known, b"%d" % number, root_of())

    def refuse() -> Root:
        raise AssertionError("it is known")

    for number in range(2, 6):
        known.root(b"%d" % number, refuse)
    with pytest.raises(AssertionError):
        known.root(b"1", refuse)
