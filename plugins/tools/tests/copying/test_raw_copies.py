"""Copies by tools that know nothing of checkpoints, and copy every object to another kind of storage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOptions

_names = itertools.count()


def _open(directory: str) -> StorageBackend:
    scheme = directory.partition("://")[0]
    return installed_plugins().storage(scheme)(directory, StorageOptions())


def _copy(source: str, destination: str, keys: Callable[[list[str]], list[str]] = sorted) -> None:
    """Copy every object unchanged, in any order, as such a tool does."""
    origin, target = _open(source), _open(destination)
    for key in keys(list(origin.list())):
        target.put(key, origin.get(key))


def _shuffled(keys: list[str]) -> list[str]:
    return random.Random(7).sample(keys, len(keys))


def _state(version: int) -> dict[str, Any]:
    return {"w": np.full((40, 3), version, np.float32), "b": np.arange(9) + version, "deep": {"step": version}}


def _places(tmp_path: Path) -> list[str]:
    """Return new locations in memory and on a disk. Copies go from each to the next one."""
    number = next(_names)
    kinds = ["memory", "file", "memory", "memory", "file", "file"]
    return [
        f"file://{tmp_path}/{number}-{place}" if kind == "file" else f"memory://raw-{tmp_path.name}-{number}-{place}/a"
        for place, kind in enumerate(kinds)
    ]


def _save_tree(layout: str) -> Callable[[str], None]:
    return lambda directory: ckptcore.save(f"{directory}/step", _state(1), layout=layout)


def _expect_tree(directory: str) -> None:
    loaded = ckptcore.load(f"{directory}/step")
    np.testing.assert_array_equal(loaded["w"], _state(1)["w"])
    assert loaded["deep"] == {"step": 1}
    assert ckptcore.verify(f"{directory}/step").ok


def _save_composite(directory: str) -> None:
    ckptcore.save_checkpointables(f"{directory}/step", {"model": _state(1), "data": _state(2)})


def _expect_composite(directory: str) -> None:
    loaded = ckptcore.load_checkpointables(f"{directory}/step")
    for version, name in ((1, "model"), (2, "data")):
        np.testing.assert_array_equal(loaded[name]["b"], _state(version)["b"])
    assert ckptcore.verify(f"{directory}/step").ok


def _save_run(directory: str) -> None:
    with Checkpointer(directory) as run:
        for step in (1, 2, 3):
            run.save(step, _state(step))


def _expect_run(directory: str) -> None:
    with Checkpointer(directory) as run:
        assert run.steps == (1, 2, 3)
        np.testing.assert_array_equal(run.load()["w"], _state(3)["w"])
        run.save(4, _state(4))
        run.wait()
        assert run.latest == 4


_KINDS: Mapping[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
    "safetensors": (_save_tree("safetensors"), _expect_tree),
    "ocdbt": (_save_tree("ocdbt"), _expect_tree),
    "dcp": (_save_tree("dcp"), _expect_tree),
    "composite": (_save_composite, _expect_composite),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_a_copy_needs_no_commit(kind: str, tmp_path: Path) -> None:
    save, expect = _KINDS[kind]
    places = _places(tmp_path)
    save(places[0])
    for source, destination in itertools.pairwise(places):
        _copy(source, destination, _shuffled)
        expect(destination)


def test_a_copied_run_can_be_continued(tmp_path: Path) -> None:
    places = _places(tmp_path)[:3]
    _save_run(places[0])
    for source, destination in itertools.pairwise(places):
        _copy(source, destination, lambda keys: [key for key in _shuffled(keys) if not key.startswith(".ckptcore")])
    for place in places[1:]:
        _expect_run(place)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_partial_copy_is_refused_or_reports_missing_files(kind: str, tmp_path: Path) -> None:
    """If any one object is missing, `verify` reports it or raises an error."""
    save, expect = _KINDS[kind]
    places = _places(tmp_path)
    save(places[0])
    keys = list(_open(places[0]).list())
    for number, missing in enumerate(keys):
        copy = f"{places[2]}-{number}"
        _copy(places[0], copy, lambda listed, missing=missing: [key for key in listed if key != missing])  # type: ignore[misc]  # binds the current value of the loop
        if missing == "step/checkpoint.json":
            continue  # without the root, the directory is like one of other software
        try:
            report = ckptcore.verify(f"{copy}/step")
        except CheckpointError:
            continue
        if report.ok:
            expect(copy)  # only other software needs this object, for example an empty marker file
        else:
            assert missing.removeprefix("step/") in str(report.problems), missing


def test_a_copied_claim_is_not_a_checkpoint(tmp_path: Path) -> None:
    source, destination = _places(tmp_path)[:2]
    _save_tree("safetensors")(source)
    _copy(source, destination)
    store = _open(destination)
    claim = b'{"format":"ckptcore","version":1,"state":"claimed"'
    store.put("step/checkpoint.json", claim)
    with pytest.raises(CheckpointError):
        ckptcore.load(f"{destination}/step")
    store.delete(["step/checkpoint.json", *[key for key in store.list("step") if key.endswith(".safetensors")]])
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(f"{destination}/step")
