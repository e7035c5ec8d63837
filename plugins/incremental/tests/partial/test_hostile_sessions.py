"""Damaged or hostile session tables and records raise an error. They never cause a crash or a wrong checkpoint."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from ckptcore_incremental.session_tables import decode_session
from ckptcore_testing.hostile_json import sealed, tampered
from ckptcore_testing.locations import new_place, objects_at, store_at

import ckptcore
from ckptcore.commit.root import Session
from ckptcore.commit.root_json import decode_root
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedVersionError
from ckptcore.model import JSON

_LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr3"]


def _place(directory: Path, layout: str = "safetensors") -> str:
    place = new_place("memory", directory)
    ckptcore.partial(place, layout=layout).save({"a": {"w": np.arange(6.0).reshape(2, 3)}, "n": 1})
    part = ckptcore.ShardedArray.part(np.ones(2), (0,), (4,), cuts=((2,),))
    ckptcore.partial(place, layout=layout).save({"a": {"v": part}})
    return place


def _finalize(place: str) -> None:
    ckptcore.partial(place).finalize()


def _no_part(key: str, size: int) -> bytes:
    raise AssertionError("a partial save has no parts")


def test_a_tampered_root_is_an_error(tmp_path: Path) -> None:
    place = _place(tmp_path)
    store = store_at(place)
    document = json.loads(store.get("checkpoint.json"))
    objects = objects_at(place)
    for changed in tampered(document, 400):
        data = sealed(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
        try:
            decode_root(data, _no_part)
        except (CorruptCheckpointError, UnsupportedVersionError):
            continue
        for do in (ckptcore.load, _finalize, ckptcore.verify):
            for key, content in {**objects, "checkpoint.json": data}.items():
                store.put(key, content)
            with suppress(CheckpointError):
                do(place)
                assert do is _finalize, "it was never committed"
                assert ckptcore.verify(place).ok


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_damaged_session_table_is_found(layout: str, tmp_path: Path) -> None:
    place = _place(tmp_path, layout)
    store = store_at(place)
    (key, _) = sorted(name for name in store.list() if ".session-" in name)
    data = store.get(key)
    choices = random.Random(0)
    for _ in range(30):
        changed = bytearray(data)
        changed[choices.randrange(len(data))] ^= 1 << choices.randrange(8)
        store.put(key, bytes(changed))
        with pytest.raises(CorruptCheckpointError, match=r"session-0 is damaged"):
            ckptcore.partial(place, layout=layout).save({"z": 1})
        with pytest.raises(CorruptCheckpointError, match=r"session-0 is damaged"):
            ckptcore.partial(place).finalize()
    store.delete([key])
    with pytest.raises(CorruptCheckpointError, match="missing"):
        ckptcore.partial(place).finalize()
    ckptcore.delete(place)
    ckptcore.save(place, {"a": 1})


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_hostile_session_table_raises_only_checkpoint_errors(layout: str, tmp_path: Path) -> None:
    """The checksum of the table is valid, because an attacker can update it, too."""
    place = _place(tmp_path, layout)
    store = store_at(place)
    document = json.loads(store.get("checkpoint.json"))
    row = document["sessions"][0]
    data = store.get(row[5])
    head, receipts, rest = data.split(b"\n", 2)
    changes: list[bytes] = [
        *[_line(altered) + b"\n" + receipts + b"\n" + rest for altered in tampered(json.loads(head), 150)],
        *[head + b"\n" + _line(altered) + b"\n" + rest for altered in tampered(json.loads(receipts), 250)],
    ]
    rest_of_array = {"a": {"v": ckptcore.ShardedArray.part(np.ones(2), (2,), (4,), cuts=((2,),))}}
    objects = objects_at(place)
    refused = 0
    for changed in changes:
        session = Session(
            row[0], row[1], row[2], row[3], row[4], row[5], len(changed), f"xxh3_64:{xxhash.xxh3_64_hexdigest(changed)}"
        )
        try:
            decode_session(changed, session)
        except (CorruptCheckpointError, UnsupportedVersionError):
            refused += 1
            continue
        row[6:8] = session.key_bytes, session.checksum
        for goes_on in (True, False):
            for key, data in {**objects, row[5]: changed, "checkpoint.json": sealed(document)}.items():
                store.put(key, data)
            with suppress(CheckpointError):
                if goes_on:
                    ckptcore.partial(place, layout=layout).save(rest_of_array)
                ckptcore.partial(place).finalize()
                ckptcore.load(place)
    assert refused > 50


def test_a_session_without_its_files_is_refused(tmp_path: Path) -> None:
    """The other session has its files. A commit of only that session would lack arrays."""
    place = new_place("memory", tmp_path)
    for name in "ab":
        ckptcore.partial(place, layout="safetensors").save({name: np.arange(3.0)})
    store = store_at(place)
    document = json.loads(store.get("checkpoint.json"))
    row = document["sessions"][1]
    head, receipts, rest = store.get(row[5]).split(b"\n", 2)
    decoded = json.loads(receipts)
    del decoded["receipts"][0]["state"]["files"]
    changed = head + b"\n" + _line(decoded) + b"\n" + rest
    row[6:8] = len(changed), f"xxh3_64:{xxhash.xxh3_64_hexdigest(changed)}"
    store.put(row[5], changed)
    store.put("checkpoint.json", sealed(document))
    with pytest.raises(CorruptCheckpointError):
        _finalize(place)


def _table_problems(place: str) -> dict[str, bytes | None]:
    """Return damaged contents of the first table by error text. None means that the table is missing."""
    store = store_at(place)
    data = store.get(json.loads(store.get("checkpoint.json"))["sessions"][0][5])
    head, receipts, rest = data.split(b"\n", 2)
    decoded = json.loads(receipts)
    problems: dict[str, bytes | None] = {"is missing, which lists the data": None, "is not a valid table of a": b"{}\n"}
    key = json.dumps(decoded).partition('.safetensors"')[0].rpartition('"')[2]
    assert key
    changed = receipts.replace(key.encode(), b"../" + key.encode())
    return {**problems, "has an invalid object name": head + b"\n" + changed + b"\n" + rest}


@pytest.mark.parametrize("remedy", ["restore it from a copy", "remove this partial save, with all its sessions, by"])
def test_remedies_for_an_unreadable_session_table(tmp_path: Path, remedy: str) -> None:
    rest_of_array = {"a": {"v": ckptcore.ShardedArray.part(np.ones(2), (2,), (4,), cuts=((2,),))}}
    for text, changed in _table_problems(_place(tmp_path)).items():
        place = _place(tmp_path)
        store = store_at(place)
        document = json.loads(store.get("checkpoint.json"))
        key = document["sessions"][0][5]
        copies = {name: store.get(name) for name in (key, "checkpoint.json")}
        if changed is None:
            store.delete([key])
        else:
            store.put(key, changed)
            document["sessions"][0][6:8] = len(changed), f"xxh3_64:{xxhash.xxh3_64_hexdigest(changed)}"
            store.put("checkpoint.json", sealed(document))
        with pytest.raises(CorruptCheckpointError, match=rf"session-0 {text}.*{remedy}"):
            _finalize(place)
        if remedy.startswith("restore"):
            for name, data in copies.items():
                store.put(name, data)
            ckptcore.partial(place).save(rest_of_array)
        else:
            ckptcore.delete(place)
            ckptcore.partial(place).save({"a": {"w": np.arange(6.0).reshape(2, 3), "v": np.ones(4)}, "n": 1})
        _finalize(place)
        loaded = ckptcore.load(place)
        assert loaded["n"] == 1 and loaded["a"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert loaded["a"]["v"].tolist() == [1] * 4


def _line(document: JSON) -> bytes:
    return json.dumps(document).encode()
