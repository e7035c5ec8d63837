"""The files of a version in a cache: whole arrays as Hugging Face names them, and boxes of sharded arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
import safetensors
from ckptcore_versions import follow
from ckptcore_versions.following import local_files
from ckptcore_versions.following.follower import FOLLOWED_NAMES
from ckptcore_versions.following.local_files import PIECE_BYTES, pieces
from safetensors.numpy import load_file

import ckptcore
from ckptcore import ShardedArray
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.model import Box


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [((), 8), ((5,), 2), ((0, 3), 4), ((3, 1 << 19), 4), ((700, 1000), 4), ((1, 7, 1 << 17), 8), ((2, 3, 1 << 20), 4)],
)
def test_pieces_are_contiguous_small_and_make_up_the_box(shape: tuple[int, ...], itemsize: int) -> None:
    counts = np.zeros(shape, np.int8)
    stop = 0
    for piece in pieces(Box.whole(shape), itemsize):
        counts[piece.slices] += 1
        first = int(np.ravel_multi_index(piece.start, shape)) if shape else 0
        last = int(np.ravel_multi_index([end - 1 for end in piece.stop], shape)) + 1 if shape else 1
        assert first == stop and last - first == piece.size and piece.size * itemsize <= PIECE_BYTES
        stop = last
    assert (counts == 1).all()


def test_several_files_have_an_index_like_those_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "SafetensorsLayout", lambda **options: SafetensorsLayout(4000, **options))
    weights = {f"layer{number}": np.full((900,), number, np.float32) for number in range(3)}
    with ckptcore.Checkpointer(tmp_path / "weights", step_names=FOLLOWED_NAMES) as checkpointer:
        checkpointer.save_blocking(1, weights)
        with follow(tmp_path / "weights", cache=tmp_path / "cache") as follower:
            version = follower.next_version(0)
            assert version is not None
            directory = Path(version.directory)
            index = json.loads((directory / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == 3 * 3600
            for name, file in index["weight_map"].items():
                np.testing.assert_array_equal(load_file(directory / file)[name], weights[name])
            loaded = ckptcore.load(directory)
            assert set(loaded) == set(weights)


def test_tied_arrays_are_stored_once_and_have_both_names(tmp_path: Path) -> None:
    array = np.arange(5.0)
    with ckptcore.Checkpointer(tmp_path / "weights", step_names=FOLLOWED_NAMES) as checkpointer:
        checkpointer.save_blocking(1, {"input": array, "output": array})
        with follow(tmp_path / "weights", cache=tmp_path / "cache") as follower:
            version = follower.next_version(0)
            assert version is not None and set(version.changed) == set(version.arrays) == {"input", "output"}
            with safetensors.safe_open(Path(version.directory) / "model.safetensors", "numpy") as file:
                assert file.keys() == ["input"] and file.metadata() == {"output": "input", "format": "pt"}


@pytest.mark.parametrize("dtype", ["complex128", "int4", "float8_e3m4", "bool", "datetime64[s]"])
def test_dtypes_that_safetensors_lacks_are_kept(tmp_path: Path, dtype: str) -> None:
    made = np.arange(6) % 2
    array = made.astype(getattr(ml_dtypes, dtype, dtype)).reshape(2, 3)
    with ckptcore.Checkpointer(tmp_path / "weights", step_names=FOLLOWED_NAMES) as checkpointer:
        checkpointer.save_blocking(1, {"array": array})
        with follow(tmp_path / "weights", cache=tmp_path / "cache") as follower:
            version = follower.next_version(0)
            assert version is not None
            assert version.arrays["array"].dtype == array.dtype
            np.testing.assert_array_equal(version.arrays["array"], array)


def test_a_follower_keeps_only_the_boxes_that_it_needs(tmp_path: Path) -> None:
    weights = {"w": np.arange(40_000, dtype=np.float32).reshape(100, 400), "b": np.arange(400.0)}
    boxes = [Box((10, 0), (30, 400)), Box((50, 100), (60, 300))]
    like = {"w": ShardedArray((100, 400), np.float32, [ArrayShard(box) for box in boxes]), "b": weights["b"]}
    with (
        ckptcore.Checkpointer(tmp_path / "weights", step_names=FOLLOWED_NAMES) as checkpointer,
        follow(tmp_path / "weights", cache=tmp_path / "cache", like=like) as follower,
    ):
        served: Any = {
            "w": ShardedArray(
                (100, 400), np.float32, [ArrayShard(box, np.zeros(box.shape, np.float32)) for box in boxes]
            ),
            "b": np.zeros(400),
        }
        for number in range(3):
            weights["w"][55] += 1
            checkpointer.save_blocking(number, weights)
            version = follower.next_version(0)
            assert version is not None
            kept = version.arrays["w"]
            assert isinstance(kept, ShardedArray) and [shard.box for shard in kept.shards] == boxes
            version.load_into(served)
            assert version.written_bytes == (8000 if number else 80 * 400 + 8000 + 3200)
            for array in (kept, served["w"]):
                for shard in array.shards:
                    np.testing.assert_array_equal(shard.elements, weights["w"][shard.box.slices])
        assert version is not None and version.changed == {"w": (boxes[1],)}
        sliced = Path(version.directory) / "shard-00001-model-00002-of-00002.safetensors"
        with safetensors.safe_open(sliced, "numpy") as file:
            assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [50, 100]}}
            np.testing.assert_array_equal(file.get_tensor("w"), weights["w"][boxes[1].slices])


_FEW_DESCRIPTORS: Final = """
import resource, sys
import numpy as np
import ckptcore
from ckptcore import ArrayShard, ShardedArray
from ckptcore.errors import StorageError
from ckptcore.model import Box
from ckptcore_versions import Publisher, follow

rows, directory = int(sys.argv[2]), sys.argv[1]
boxes = [ArrayShard(Box((row, 0), (row + 1, 5)), np.zeros((1, 5))) for row in range(rows)]
like = {"w": ShardedArray((rows, 9), np.float64, boxes)}
with Publisher(directory + "/weights") as publisher:
    publisher.publish(0, {"w": np.zeros((rows, 9))})
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    with follow(directory + "/weights", cache=directory + "/cache", like=like) as follower:
        versions = []
        for number in range(4):
            try:
                versions.append(follower.next_version(0))
            except StorageError as error:
                assert "ulimit -n" in str(error), error
                sys.exit("few descriptors")
            assert all((shard.elements == number).all() for shard in versions[-1].arrays["w"].shards)
            publisher.publish(number + 1, {"w": np.full((rows, 9), number + 1.0)})
"""


@pytest.mark.system
@pytest.mark.parametrize("rows", [12, 200])
def test_few_file_descriptors_are_enough_or_named(tmp_path: Path, rows: int) -> None:
    """A file for each box of an array, of five versions. Only from Python 3.13 on is a file mapped without one."""
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, str(tmp_path), str(rows)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    is_enough = sys.version_info >= (3, 13) or rows == 12
    assert (result.returncode, result.stderr) == ((0, "") if is_enough else (1, "few descriptors\n"))
