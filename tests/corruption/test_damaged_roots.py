"""Damaged roots: any changed bit is refused, and the error has the path and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed

import ckptcore
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim, is_claim, is_partial, summarize_root
from ckptcore.errors import CorruptCheckpointError, UnsupportedVersionError
from ckptcore.model import JSON

_QUICK = ckptcore.Context(durability="none")


def _save_tree(at: Path) -> Path:
    ckptcore.save(at, {"w": np.ones(3)}, context=_QUICK)
    return at / "checkpoint.json"


def _save_composite(at: Path) -> Path:
    ckptcore.save_checkpointables(at, {"model": {"w": np.ones(3)}}, context=_QUICK)
    return at / "checkpoint.json"


def _save_member(at: Path) -> Path:
    ckptcore.save_checkpointables(at.parent, {at.name: {"w": np.ones(3)}}, context=_QUICK)
    return at / "checkpoint.json"


def _save_update(at: Path) -> Path:
    _save_tree(at.with_name("base"))
    ckptcore.save(at, {"b": np.zeros(2)}, strategy=ckptcore.Update(at.with_name("base")), context=_QUICK)
    return at / "checkpoint.json"


def _save_partial(at: Path) -> Path:
    ckptcore.partial(at, context=_QUICK).save({"w": np.ones(3)})
    return at.with_name(f".{at.name}.partial.ckptcore") / "checkpoint.partial.json"


def _put_claim(at: Path) -> Path:
    at.mkdir()
    root = at / "checkpoint.json"
    root.write_bytes(encode_claim(Claim("0123456789abcdef", "2026-01-02T03:04:05.678+00:00")))
    return root


@pytest.mark.parametrize("save", [_save_tree, _save_composite, _save_member, _save_update, _save_partial, _put_claim])
def test_a_changed_bit_anywhere_is_refused(save: Callable[[Path], Path], tmp_path: Path) -> None:
    location = tmp_path / "run" / "c"
    location.parent.mkdir()
    root = save(location)
    data = root.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        root.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError):
            summarize_root(bytes(damaged))
        assert not is_claim(bytes(damaged)) and not is_partial(bytes(damaged))
        if position % 7:
            continue  # loads take longer
        with pytest.raises(CorruptCheckpointError) as caught:
            ckptcore.load(location)
        assert str(location) in str(caught.value), position
        assert "restore it from a copy, or load another checkpoint" in str(caught.value), position


@pytest.mark.parametrize("length", [0, 1, 40, 100, -41, -40, -1])
def test_a_partly_written_root_is_refused(length: int, tmp_path: Path) -> None:
    root = _save_tree(tmp_path / "c")
    root.write_bytes(root.read_bytes()[:length])
    with pytest.raises(CorruptCheckpointError, match="truncated or damaged"):
        ckptcore.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kind": "later"}, UnsupportedVersionError, "has the kind 'later', which this version.*upgrade ckptcore"),
        ({"kind": ["files"]}, UnsupportedVersionError, "has the kind .*upgrade ckptcore"),
        ({"layout": ""}, CorruptCheckpointError, "its layout has no name"),
    ],
)
@pytest.mark.parametrize("has_files", [False, True])
def test_only_the_kind_of_a_root_decides_that_it_is_of_files(
    has_files: bool, fields: dict[str, JSON], error: type[Exception], message: str, tmp_path: Path
) -> None:
    root = _save_tree(tmp_path / "c")
    document = json.loads(root.read_bytes())
    if has_files:
        document["tables"]["files"] = None
    root.write_bytes(sealed({**document, **fields}))
    with pytest.raises(error, match=message):
        ckptcore.load(tmp_path / "c")
    root.write_bytes(sealed({**document, "kind": "tree"}))
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [1, 1, 1]


def test_user_metadata_is_not_parsed_as_a_root(tmp_path: Path) -> None:
    """User metadata and names of arrays may look like the head of a root."""
    text = '{"format":"ckptcore","version":1,"state":"claimed","role":"member","save_id":"0123456789abcdef",'
    for number, member in enumerate(("role", "state", "member", "owned", "bases")):
        at = tmp_path / str(number)
        ckptcore.save(at, {member: np.ones(3), text: 1}, metadata={member: "member", "text": text}, context=_QUICK)
        assert (ckptcore.load(at)[member] == 1).all()
        ckptcore.copy(at, at.with_name(f"copy-{number}"))
        assert ckptcore.verify(at.with_name(f"copy-{number}")).ok
