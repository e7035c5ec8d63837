"""Items read with a template give the same result as the general reader."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_dcp.item_reading import TemplateCache
from ckptcore_dcp.zips import ZipMember, read_member, read_zip, torch_members
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptcore
from ckptcore.errors import ChecksumError, CorruptCheckpointError


def _item(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _members(item: bytes) -> Mapping[str, ZipMember]:
    return torch_members(read_zip(lambda start, stop: item[start:stop], 0, len(item), key="item"))


def _general(item: bytes, name: str) -> bytes | None:
    """Return a member's content, read by the general reader. Return None if that reader rejects the item."""
    try:
        members = _members(item)
        parts = [read_member(lambda start, stop: item[start:stop], members[part], key="item") for part in _READ]
        content = read_member(lambda start, stop: item[start:stop], members[name], key="item")
    except (CorruptCheckpointError, KeyError):
        return None
    return content if parts == [b"little"] else None


_READ = ("byteorder",)


def _templates(item: bytes, name: str) -> TemplateCache[None, str]:
    known: TemplateCache[None, str] = TemplateCache()
    known.add(None, memoryview(item), 0, _members(item), name, "first")
    return known


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (torch.arange(16.0), torch.arange(16.0) + 1, "data/0"),
        (torch.zeros(3, 5, dtype=torch.bfloat16), torch.ones(3, 5, dtype=torch.bfloat16), "data/0"),
        (5, 6, "data.pkl"),
        ("text", "more", "data.pkl"),
    ],
)
def test_an_item_with_equal_structure_matches(first: Any, second: Any, name: str) -> None:
    other = _item(second)
    matched = _templates(_item(first), name).match(None, memoryview(other))
    assert matched is not None and matched[1] == "first"
    assert bytes(matched[0]) == _general(other, name)


@pytest.mark.parametrize(("first", "second", "name"), [(torch.zeros(3), torch.ones(3), "data/0"), (5, 6, "data.pkl")])
def test_a_match_never_hides_a_flipped_bit(first: Any, second: Any, name: str) -> None:
    known = _templates(_item(first), name)
    good = bytearray(_item(second))
    content = _general(bytes(good), name)
    let_through = 0
    for place in range(len(good)):
        good[place] ^= 1 << place % 8
        matched = known.match(None, memoryview(good))
        if matched is not None:
            let_through += 1
            assert bytes(matched[0]) == content == _general(bytes(good), name), place
        good[place] ^= 1 << place % 8
    # Some bytes may differ, because no reader uses them: the 40 digits of the serialization id, its two checksums, and
    # the checksum that follows the content.
    assert let_through == 40 + 4 + 4 + 4


def test_items_with_another_structure_do_not_match() -> None:
    known = _templates(_item(torch.zeros(16)), "data/0")
    for other in (torch.zeros(15), torch.zeros(4, 4), torch.zeros(16, dtype=torch.int32), torch.zeros(32)[::2], 5):
        assert known.match(None, memoryview(_item(other))) is None
    assert known.match(None, memoryview(_item(torch.zeros(16))[:-1])) is None
    assert known.match(None, memoryview(b"")) is None


def test_pickles_of_different_lengths_in_items_of_equal_length() -> None:
    known = _templates(_item(5), "data.pkl")
    for value in (300, 70_000):
        item = _item(value)
        assert len(item) == len(_item(5)) and known.match(None, memoryview(item)) is None
        known.add(None, memoryview(item), 0, _members(item), "data.pkl", "other")
    for value in (6, 301, 70_001):
        item = _item(value)
        matched = known.match(None, memoryview(item))
        assert matched is not None and bytes(matched[0]) == _general(item, "data.pkl")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_finds_a_flipped_bit_after_the_first_item(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((16,), float(number)) for number in range(4)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "torch"), no_dist=True)
    file = tmp_path / "torch" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(state["t3"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        ckptcore.load(tmp_path / "torch")
