"""Worker processes of a PyTorch data loader read an open checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointNotFoundError

pytestmark = pytest.mark.system


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of an array of an open checkpoint."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.array = checkpoint["rows"]

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, number: int) -> Any:
        return self.array[number] + self.checkpoint["offset"][...]


@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_workers_read_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.arange(40.0).reshape(10, 4)
    ckptcore.save("data", {"rows": rows, "offset": np.full(4, 0.5)})
    with ckptcore.open("data") as checkpoint:
        assert checkpoint["rows"][0, 1] == 1  # opens the data file before the workers start
        dataset = Rows(checkpoint)
        loader = torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=1, multiprocessing_context=start)
        read = torch.cat(list(loader))
    assert np.array_equal(read.numpy(), rows + 0.5)


def test_a_worker_reports_a_checkpoint_that_was_replaced(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "data", {"rows": np.ones((4, 2)), "offset": np.zeros(2)})
    with ckptcore.open(tmp_path / "data") as checkpoint:
        loader = torch.utils.data.DataLoader(Rows(checkpoint), num_workers=1, multiprocessing_context="spawn")
        ckptcore.save(tmp_path / "data", {"rows": np.zeros((4, 2)), "offset": np.zeros(2)}, overwrite=True)
        with pytest.raises(CheckpointNotFoundError, match="data was replaced or deleted after it was opened"):
            list(loader)
