"""Open checkpoints that are deleted without `close`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import ckptcore


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_no_file_stays_open_after_the_whole_tree_was_used(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.arange(6.0)})
    gc.collect()
    gc.disable()  # reference counts alone must close the files
    try:
        before = descriptors()
        for _ in range(5):
            checkpoint = ckptcore.open(tmp_path / "c")
            np.testing.assert_array_equal(checkpoint[()]["a"][0:2], [0, 1])
            del checkpoint
        assert descriptors() == before
    finally:
        gc.enable()


def test_the_whole_tree_is_not_the_open_checkpoint(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.arange(6.0)})
    with ckptcore.open(tmp_path / "c") as checkpoint:
        whole = checkpoint[()]
        assert whole is not checkpoint and not hasattr(whole, "close") and list(whole) == ["a"]
