"""A copy, a conversion or an update never replaces a checkpoint that it reads, wherever its bases are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed
from ckptcore_testing.locations import store_at
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import transforms
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError

_STATE: dict[str, Any] = {"a": np.ones(4), "b": np.zeros(3), "n": 1}
_ANYWHERE = ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere"))


def _copy(source: str, destination: str) -> None:
    ckptcore.copy(source, destination, overwrite="non-atomic")


def _convert(source: str, destination: str) -> None:
    ckptcore.copy(source, destination, layout="dcp", overwrite="non-atomic")


def _consolidate(source: str, destination: str) -> None:
    ckptcore.copy(source, destination, subtree=(), overwrite="non-atomic")


@pytest.mark.parametrize("write", [_copy, _convert, _consolidate])
def test_a_copy_of_an_update_does_not_replace_its_base(write: Callable[[str, str], None], run: str) -> None:
    """Without an atomic exchange, the base would be deleted before the copy reads it."""
    ckptcore.save(f"{run}/1", _STATE)
    ckptcore.save(f"{run}/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    with pytest.raises(InvalidLocationError, match=r"/1 is .*/1, which .*/2 reads arrays from.*Nothing was written"):
        write(f"{run}/2", f"{run}/1")
    assert same_value(ckptcore.load(f"{run}/1"), _STATE)
    assert same_value(ckptcore.load(f"{run}/2"), {**_STATE, "n": 2})


def test_a_conversion_does_not_replace_a_source_of_its_transforms(run: str) -> None:
    ckptcore.save(f"{run}/1", _STATE)
    ckptcore.save(f"{run}/2", {**_STATE, "a": np.full(4, 7.0)})
    with pytest.raises(InvalidLocationError, match="Nothing was written"):
        ckptcore.copy(
            f"{run}/1", f"{run}/2", layout="dcp", overwrite="non-atomic", transforms=[transforms.Average([f"{run}/2"])]
        )
    assert ckptcore.load(f"{run}/2")["a"][0] == 7


def test_an_update_does_not_replace_the_base_of_its_base(run: str) -> None:
    """This also applies if the update refers to its base by another path."""
    ckptcore.save(f"{run}/here/1", _STATE)
    ckptcore.save(f"{run}/there/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/here/1"), context=_ANYWHERE)
    with pytest.raises(InvalidLocationError, match="would replace"):
        ckptcore.save(
            f"{run}/here/1",
            {"n": 3},
            strategy=ckptcore.Update(f"{run}/there/2"),
            overwrite="non-atomic",
            context=_ANYWHERE,
        )
    assert same_value(ckptcore.load(f"{run}/here/1"), _STATE)


@pytest.mark.parametrize(
    ("base", "update"), [("1", "2"), ("x/y/1", "2"), ("1", "x/y/2"), ("x/1", "y/2"), ("x/1", "x/y/2")]
)
def test_a_base_is_found_from_anywhere_in_its_storage(base: str, update: str, run: str) -> None:
    """This includes directories that contain no other checkpoint."""
    top = run if run.startswith("file") else run.removesuffix("/step")
    ckptcore.save(f"{top}/{base}", _STATE)
    ckptcore.save(f"{top}/{update}", {"n": 2}, strategy=ckptcore.Update(f"{top}/{base}"), context=_ANYWHERE)
    assert same_value(ckptcore.load(f"{top}/{update}", context=_ANYWHERE), {**_STATE, "n": 2})


@pytest.mark.parametrize("path", ["../../1", "../../../../../../../../../1", "../../../../../../../../../etc/1"])
def test_a_base_outside_of_its_storage_is_refused(path: str, run: str) -> None:
    ckptcore.save(f"{run}/1", _STATE)
    ckptcore.save(f"{run}/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    store = store_at(f"{run}/2")
    root = json.loads(store.get("checkpoint.json"))
    root["bases"][0][0] = path
    store.put("checkpoint.json", sealed(root))
    with pytest.raises((CorruptCheckpointError, InvalidLocationError)):
        ckptcore.load(f"{run}/2", context=_ANYWHERE)


def test_a_base_in_the_same_directory_has_a_relative_path(run: str) -> None:
    """The stored path is relative to the update, although another update in another directory led to the base."""
    ckptcore.save(f"{run}/here/1", _STATE)
    ckptcore.save(f"{run}/there/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/here/1"), context=_ANYWHERE)
    ckptcore.save(f"{run}/here/3", {"n": 3}, strategy=ckptcore.Update(f"{run}/there/2"), context=_ANYWHERE)
    assert same_value(ckptcore.load(f"{run}/here/3"), {**_STATE, "n": 3})
    with pytest.raises(ckptcore.errors.CheckpointReferredError):
        ckptcore.delete(f"{run}/here/1")


def test_an_update_without_a_base_is_refused(run: str) -> None:
    """The save would otherwise store only the given arrays, and no reader could detect the missing ones."""
    for save in (ckptcore.save, ckptcore.save_async):
        with pytest.raises(InvalidLocationError):
            save(f"{run}/1", {"n": 2}, strategy=ckptcore.Update(None))  # type: ignore[arg-type]  # what is tested


def test_a_copy_of_an_update_rejects_unknown_verify_options(run: str) -> None:
    ckptcore.save(f"{run}/1", _STATE)
    ckptcore.save(f"{run}/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    with pytest.raises(ValueError, match="verify='never'"):
        ckptcore.copy(f"{run}/2", f"{run}/3", verify="never")  # type: ignore[call-overload]  # what is tested
