"""The earlier owners in the record of the current owner. The record shows which of them were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore.commit.leases import EarlierOwner, Holder, decode_holder, new_holder
from ckptcore.commit.location import resolve_location
from ckptcore.commit.locks import OWNER_LEASE, OWNER_RECORD
from ckptcore.context import default_context
from ckptcore.runtime import runtime_of


def record(run: str, key: str) -> Holder:
    """Return the record of the owner of a run."""
    store = resolve_location(f"{run}/x", runtime_of(default_context()).storages).parent
    holder = decode_holder(store.get(key))
    assert holder is not None
    return holder


def own(run: str) -> None:
    with ckptcore.Checkpointer(run) as checkpointer:
        checkpointer.save(len(checkpointer.steps) + 1, {"w": 1})


@pytest.mark.parametrize("kind", ["files", "objects"])
def test_earlier_owners_are_recorded(kind: str, tmp_path: Path) -> None:
    run, key = (str(tmp_path / "run"), OWNER_RECORD) if kind == "files" else ("memory://earlier-owners", OWNER_LEASE)
    for _ in range(3):
        own(run)
    assert [(owner.number, owner.released) for owner in record(run, key).earlier] == [(0, True), (1, True)]


def test_a_killed_owner_is_recorded_as_not_released(tmp_path: Path) -> None:
    own(str(tmp_path))
    path = tmp_path / OWNER_RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "released": False}))  # as after a kill
    own(str(tmp_path))
    [first] = record(str(tmp_path), OWNER_RECORD).earlier
    assert (first.number, first.released) == (0, False)


def test_the_record_stays_small() -> None:
    holder = new_holder()
    for number in range(100):
        holder = new_holder(number=number + 1).after(Holder(**{**_fields(holder), "since": "x" * 256}))
    assert len(holder.earlier) == 16
    assert decode_holder(holder.encode()) == holder


def _fields(holder: Holder) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in holder.__dataclass_fields__}


@pytest.mark.parametrize(
    "earlier",
    [3, [3], [[1, "x"]], [["1", "x", True]], [[1, "\x1b", True]], [[True, "x", True]], [[1, "x", True]] * 17],
)
def test_invalid_earlier_owners_are_dropped(earlier: Any) -> None:
    """Invalid entries of earlier owners are dropped, and the rest of the record is used."""
    data = json.dumps({**json.loads(new_holder(number=5).encode()), "earlier": earlier}).encode()
    decoded = decode_holder(data)
    assert decoded is not None
    assert (decoded.number, decoded.earlier) == (5, ())
    assert EarlierOwner(1, "x", True).released
