"""Loads through a cache directory equal plain loads, and read each box of a save once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toycache import CacheDirectory

import ckptcore
from ckptcore import AbstractArray, ArrayShard, Context, ShardedArray
from ckptcore.errors import CheckpointError
from ckptcore.model import Box
from ckptcore.results import LoadReport

FAST = Context(durability="none")
STATE = {"w": np.arange(12.0).reshape(3, 4), "b": np.ones(5, "int8"), "n": 3, "empty": np.zeros((0, 2))}


@pytest.fixture
def location(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "c", STATE, context=FAST)
    return tmp_path / "c"


@pytest.fixture
def cache(tmp_path: Path) -> CacheDirectory:
    return CacheDirectory(tmp_path / "cache")


def check(loaded: Any) -> None:
    assert loaded["n"] == 3
    for name in ("w", "b", "empty"):
        np.testing.assert_array_equal(loaded[name], STATE[name])
        assert loaded[name].dtype == np.asarray(STATE[name]).dtype


def lose_arrays(location: Path) -> None:
    """Overwrite or remove all elements, but keep the root."""
    for file in location.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)


def test_a_first_load_fills_the_cache(location: Path, cache: CacheDirectory) -> None:
    check(ckptcore.load(location, context=FAST, strategy=cache))
    assert cache.hits == 0 and len(list(cache.directory.iterdir())) >= 2


def test_a_second_load_reads_only_the_cache(location: Path, cache: CacheDirectory) -> None:
    ckptcore.load(location, context=FAST, strategy=cache)
    lose_arrays(location)
    report = LoadReport()
    check(ckptcore.load(location, context=FAST, strategy=cache, report=report))
    assert cache.hits >= 2 and report.bytes_read == 0
    with pytest.raises(CheckpointError):
        ckptcore.load(location, context=FAST)


def test_checksums_are_verified_before_anything_is_cached(location: Path, cache: CacheDirectory) -> None:
    lose_arrays(location)
    with pytest.raises(CheckpointError):
        ckptcore.load(location, context=FAST, strategy=cache)


def test_a_target_is_filled_in_place(location: Path, cache: CacheDirectory) -> None:
    for _ in range(2):
        target = {"w": np.zeros((3, 4)), "b": np.zeros(5, "int8"), "n": 0, "empty": np.zeros((0, 2))}
        w = target["w"]
        check(ckptcore.load_into(location, target, context=FAST, strategy=cache))
        assert target["w"] is w
    assert cache.hits >= 2


def test_a_background_load_uses_the_cache(location: Path, cache: CacheDirectory) -> None:
    for _ in range(2):
        check(ckptcore.load_async(location, context=FAST, strategy=cache).result())
    assert cache.hits >= 2


def test_parts_of_arrays_are_cached_as_they_are_read(location: Path, cache: CacheDirectory) -> None:
    rows = Box((1, 0), (3, 4))
    like = {"w": ShardedArray((3, 4), "float64", (ArrayShard(rows, None),))}
    for _ in range(2):
        loaded = ckptcore.load(location, like, context=FAST, strategy=cache, select=ckptcore.select.names("w"))
        np.testing.assert_array_equal(loaded["w"].shards[0].elements, STATE["w"][1:3])


def test_casts_use_the_cached_elements(location: Path, cache: CacheDirectory) -> None:
    like = {"w": AbstractArray((3, 4), "float32")}
    matching = ckptcore.Matching(cast="narrowing", unexpected="ignore")
    for _ in range(2):
        loaded = ckptcore.load(location, like, context=FAST, strategy=cache, matching=matching)
        np.testing.assert_array_equal(loaded["w"], np.asarray(STATE["w"], "float32"))
    assert cache.hits == 1


def test_another_save_at_the_same_location_is_read(location: Path, cache: CacheDirectory) -> None:
    ckptcore.load(location, context=FAST, strategy=cache)
    other = {**STATE, "w": np.zeros((3, 4))}
    ckptcore.save(location, other, context=FAST, overwrite=True)
    loaded = ckptcore.load(location, context=FAST, strategy=cache)
    np.testing.assert_array_equal(loaded["w"], other["w"])
    assert cache.hits == 0


def test_checkpoints_of_other_software_are_not_cached(location: Path, cache: CacheDirectory, tmp_path: Path) -> None:
    foreign = tmp_path / "model.safetensors"
    shutil.copy(next(location.glob("*.safetensors")), foreign)
    for _ in range(2):
        loaded = ckptcore.load(foreign, context=FAST, strategy=cache)
        np.testing.assert_array_equal(loaded["w"], STATE["w"])
    assert cache.hits == 0 and not cache.directory.exists()


def test_damaged_files_of_the_cache_are_not_detected_by_the_core(location: Path, cache: CacheDirectory) -> None:
    ckptcore.load(location, context=FAST, strategy=cache)
    for file in cache.directory.iterdir():
        file.unlink()
    check(ckptcore.load(location, context=FAST, strategy=cache))


def test_members_of_a_composite_are_cached_separately(tmp_path: Path, cache: CacheDirectory) -> None:
    state = {"model": {"w": np.arange(4.0)}, "average": {"w": np.arange(4.0) * 100}}
    ckptcore.save_checkpointables(tmp_path / "c", state, context=FAST)
    for _ in range(2):
        for name, tree in state.items():
            loaded = ckptcore.load(tmp_path / "c" / name, context=FAST, strategy=cache)
            np.testing.assert_array_equal(loaded["w"], tree["w"])
    assert cache.hits == 2
