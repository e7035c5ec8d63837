"""Sizes of blocks: small checkpoints have small blocks, and the number of checksums gives the size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.far_storage import FarStorage
from hypothesis import given
from hypothesis import strategies as st

import ckptcore
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context, PluginOptions
from ckptcore.errors import CorruptCheckpointError
from ckptcore.hookspecs import hookimpl
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.model import BLOCK_BYTES, Box, ObjectRecord
from ckptcore.model import metadata as model_metadata
from ckptcore.model.metadata import CHECKSUM_BYTES, block_bytes_for, block_bytes_of
from ckptcore.protocols import StorageOpener

FAST = Context(durability="none")
GIB = 1 << 30

SIZES = [BLOCK_BYTES >> shift for shift in range(5)]


def test_the_blocks_of_a_small_checkpoint_are_small() -> None:
    assert [block_bytes_for(nbytes) for nbytes in (0, 1, GIB, GIB + 1, 2 * GIB, 8 * GIB, 8 * GIB + 1, 10**13)] == [
        64 << 10, 64 << 10, 64 << 10, 128 << 10, 128 << 10, 512 << 10, BLOCK_BYTES, BLOCK_BYTES
    ]  # fmt: skip


@given(st.integers(0, 1 << 45), st.sampled_from(SIZES))
def test_the_number_of_checksums_gives_the_size_of_the_blocks(size: int, block: int) -> None:
    blocks = -(-size // block)
    found = block_bytes_of(size, blocks)
    assert found == block if blocks > 1 else found == BLOCK_BYTES  # one block is the same bytes by every size
    assert block_bytes_of(size, -(-size // SIZES[-1]) + 1) == 0


@pytest.mark.parametrize("count", [0, 1, 4, 33, 47, 49])
def test_an_impossible_number_of_checksums_is_refused(count: int) -> None:
    record = ObjectRecord("a", 3 << 20, bytes(CHECKSUM_BYTES * count))
    assert record.block_bytes == (BLOCK_BYTES if count == 0 else 0)  # no checksums are valid: nothing is verified
    with pytest.raises(CorruptCheckpointError, match="the checksums of 'a' are damaged"):
        RecordedChecksums(record)


def test_checkpoints_with_blocks_of_any_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3 << 18, dtype=np.int32)
    read = []
    for number, most in enumerate((1 << 14, 24, 12, 6, 3)):
        location = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(model_metadata, "_MOST_SMALL_BLOCKS", most)
            ckptcore.save(location, {"w": array}, context=FAST)
        assert np.array_equal(ckptcore.load(location, context=FAST)["w"], array)
        assert ckptcore.verify(location, context=FAST).state == "sound"
        with ckptcore.open(location, context=FAST) as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"][5000:5010], array[5000:5010])
            read.append(checkpoint.bytes_read)
        file = location / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[1_500_000] ^= 1
        file.write_bytes(content)
        (problem,) = ckptcore.verify(location, context=FAST).problems
        block = SIZES[4 - number]
        assert (problem.start, problem.stop) == (1_500_000 // block * block, 1_500_000 // block * block + block)
    assert read == SIZES[::-1]


class _Far:
    """A plugin with a remote storage for URLs ``far://``."""

    def __init__(self) -> None:
        self.storage = FarStorage()

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"far": lambda url, options: subdirectory(self.storage, url.removeprefix("far://"))}


def test_each_damaged_block_on_a_remote_storage_is_reported_once() -> None:
    far = _Far()
    context = Context(plugins=PluginOptions(extra=(far,)))
    ckptcore.save("far://runs/one", {"w": np.arange(3 << 18, dtype=np.int32)}, context=context)
    (key,) = [key for key in far.storage.list("runs/") if key.endswith(".safetensors")]
    content = bytearray(far.storage.get(key))
    damaged = [1_500_000, 1_600_000]
    for position in damaged:
        content[position] ^= 1
    far.storage.put(key, bytes(content))
    block = SIZES[-1]
    problems = ckptcore.verify("far://runs/one", context=context).problems
    assert [problem.start for problem in problems] == [position // block * block for position in damaged]


def test_the_types_of_a_shape_do_not_reach_other_boxes() -> None:
    Box.whole((np.int64(7), np.int64(3)))  # as a handler of a plugin may pass it
    assert [type(extent) for extent in Box.whole((7, 3)).stop] == [int, int]


def test_columns_of_an_array_share_the_blocks_that_were_read(tmp_path: Path) -> None:
    array = np.arange(256_000, dtype=np.int32).reshape(1000, 256)
    ckptcore.save(tmp_path / "a", {"w": array}, context=FAST)
    with ckptcore.open(tmp_path / "a", context=FAST) as checkpoint:
        rows, before = checkpoint["w"], checkpoint.bytes_read
        for column in range(30):
            np.testing.assert_array_equal(rows[0:200, column], array[0:200, column])
        assert checkpoint.bytes_read - before < 600_000
