"""Damaged or hostile references in a root raise an error. No file outside of the allowed bases is read."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed, tampered
from ckptcore_testing.locations import new_place, store_at

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, InvalidLocationError
from ckptcore.model import JSON


@pytest.fixture
def run(tmp_path: Path) -> str:
    run = new_place("memory", tmp_path)
    ckptcore.save(f"{run}/1", {"a": np.ones((2, 3)), "b": np.arange(4), "n": 1})
    ckptcore.save(f"{run}/2", {"b": np.zeros(2)}, strategy=ckptcore.Update(f"{run}/1"))
    ckptcore.save(f"{run}/3", {"b": np.zeros(2), "c": np.ones(7)}, strategy=ckptcore.Update(f"{run}/1"))
    return run


def _root(run: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(store_at(f"{run}/{name}").get("checkpoint.json"))
    return document


def _forge(run: str, name: str, **changes: JSON) -> None:
    """Change members of a root, or columns of its references, and write the root with a valid checksum."""
    document = _root(run, name)
    for member, value in changes.items():
        within = document if member in document else document["tables"]["references"]
        assert member in within
        within[member] = value
    store_at(f"{run}/{name}").put("checkpoint.json", sealed(document))


def test_invalid_references_are_refused(run: str) -> None:
    document = _root(run, "2")
    save_id = document["bases"][0][1]
    assert document["version"] == 1 and document["tables"]["references"] == {"leaf": [0], "base": [0], "stored": [0]}
    for changes in (
        {"leaf": [1]},
        {"leaf": [2]},
        {"leaf": [0, 0], "base": [0, 0], "stored": [0, 0]},
        {"leaf": [1 << 60]},
        {"leaf": ["0"]},
        {"base": [1]},
        {"base": [-1]},
        {"stored": [1]},
        {"stored": [2]},
        {"stored": [1 << 60]},
        {"stored": []},
        {"bases": []},
        {"bases": [["1", save_id], *[[f"x{number}", save_id] for number in range(1000)]]},
        {"bases": [["1", "0123456789abcdef"]]},
        {"bases": [["nothing", save_id]]},
        {"bases": [["1", save_id], ["1", save_id]]},
        *[
            {"bases": [[path, save_id]]}
            for path in (
                "",
                "/",
                "/etc",
                ".",
                "..",
                "../..",
                "a/../1",
                "./1",
                "1/",
                "a//b",
                "\0",
                ".1",
                "a/.1",
                7,
                None,
            )
        ],
    ):
        store_at(f"{run}/2").put("checkpoint.json", sealed(document))
        assert ckptcore.load(f"{run}/2")["n"] == 1
        _forge(run, "2", **changes)  # type: ignore[arg-type]  # JSON
        for look in (ckptcore.load, ckptcore.metadata):
            with pytest.raises(CorruptCheckpointError):
                look(f"{run}/2")


def test_a_base_outside_of_the_directory_is_not_read(run: str) -> None:
    save_id = _root(run, "2")["bases"][0][1]
    for path in ("../other/1", "sub/1", "../../../etc/1"):
        _forge(run, "2", bases=[[path, save_id]])
        with pytest.raises(InvalidLocationError, match=r'bases="anywhere"'):
            ckptcore.load(f"{run}/2")
    with pytest.raises(CheckpointError):
        ckptcore.load(f"{run}/2", context=ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere")))


def test_references_cannot_form_a_cycle(run: str) -> None:
    """A reference is one level deep: it must not lead to an array that the base itself only refers to."""
    second, third = _root(run, "2")["save_id"], _root(run, "3")["save_id"]
    _forge(run, "2", bases=[["3", third]])
    _forge(run, "3", bases=[["2", second]])
    for name in ("2", "3"):
        with pytest.raises(CorruptCheckpointError, match="which does not store it"):
            ckptcore.load(f"{run}/{name}")
    _forge(run, "2", bases=[["2", second]])
    with pytest.raises(CorruptCheckpointError, match="which does not store it"):
        ckptcore.load(f"{run}/2")


def test_a_tampered_root_raises_an_error_or_loads_the_saved_arrays(run: str) -> None:
    document = _root(run, "3")
    for changed in tampered({"bases": document["bases"], "references": document["tables"]["references"]}, 300):
        if not isinstance(changed, dict):
            continue
        forged = {**document, "tables": {**document["tables"]}}
        for member, into in (("bases", forged), ("references", forged["tables"])):
            if member in changed:
                into[member] = changed[member]
            else:
                del into[member]
        store_at(f"{run}/3").put("checkpoint.json", sealed(forged))
        for context in (ckptcore.Context(), ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere"))):
            with suppress(CheckpointError):
                loaded = ckptcore.load(f"{run}/3", context=context)
                assert np.array_equal(loaded["a"], np.ones((2, 3))) and np.array_equal(loaded["c"], np.ones(7))
            with suppress(CheckpointError):
                ckptcore.verify(f"{run}/3", context=context)
        with suppress(CheckpointError):
            ckptcore.save(f"{run}/4", {"d": 1}, strategy=ckptcore.Update(f"{run}/3"), overwrite="non-atomic")
