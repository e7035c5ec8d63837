"""The layout puts the data files of very many processes into hashed subdirectories. All readers find them."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_dcp.writing import data_file_name
from ckptcore_testing import ThreadJob
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptcore
from ckptcore.model import Box
from ckptcore.protocols import Coordinator

pytestmark = [
    # torch warns that it assumes a single process if there is no process group.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
]

RANKS = 3


def saved(location: Path, layout: DcpLayout) -> list[str]:
    """Save a sharded state in a job, and return the names of its files."""

    def job(coordinator: Coordinator) -> None:
        whole = np.arange(24, dtype=np.float32).reshape(6, 4)
        rows = slice(coordinator.rank * 2, coordinator.rank * 2 + 2)
        shard = ckptcore.ArrayShard(Box((rows.start, 0), (rows.stop, 4)), whole[rows].copy())
        part = ckptcore.ShardedArray((6, 4), "float32", [shard])
        ckptcore.save(
            location,
            {"w": part, "step": 7},
            layout=layout,
            context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator)),
        )

    ThreadJob(RANKS, timeout_seconds=60).run(job)
    return sorted(str(path.relative_to(location)) for path in location.rglob("*.distcp"))


@pytest.mark.parametrize("spread_from", [1, RANKS])
def test_all_readers_find_files_in_subdirectories(tmp_path: Path, spread_from: int) -> None:
    location = tmp_path / "c"
    files = saved(location, DcpLayout(spread_from=spread_from))
    assert files == sorted(data_file_name(rank, spread=True) for rank in range(RANKS))
    assert all("/" in file for file in files)
    expected = np.arange(24, dtype=np.float32).reshape(6, 4)
    assert np.array_equal(ckptcore.load(location)["w"], expected)
    assert ckptcore.verify(location).ok
    for reader in (
        dcp.FileSystemReader(location),
        FsspecReader(fsspec.filesystem("file").unstrip_protocol(str(location))),
    ):
        target = {"w": torch.zeros(6, 4), "step": 0}
        dcp.load(target, storage_reader=reader)
        assert np.array_equal(target["w"].numpy(), expected)
        assert target["step"] == 7
    (location / "checkpoint.json").unlink()  # the files that torch would have written
    assert np.array_equal(ckptcore.load(location)["w"], expected)


@pytest.mark.parametrize("spread_from", [RANKS + 1, None])
def test_files_of_few_processes_have_the_names_of_torch(tmp_path: Path, spread_from: int | None) -> None:
    assert saved(tmp_path / "c", DcpLayout(spread_from=spread_from)) == [f"__{rank}_0.distcp" for rank in range(RANKS)]


def test_the_option_is_pickled_with_the_layout() -> None:
    layout = DcpLayout(spread_from=5)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert DcpLayout().spread_from == 1024


def test_thousands_of_files_are_evenly_distributed() -> None:
    count = Counter(data_file_name(rank, spread=True).partition("/")[0] for rank in range(8192))
    assert len(count) == 256
    assert max(count.values()) < 64
