"""Jobs whose DTensors contain quantised tensors of torchao, as under FSDP2 and tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("composed_job.py")


def run(processes: int, tasks: str, directory: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(PROGRAM), tasks, str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_states_load_on_every_mesh_that_splits_no_block(tmp_path: Path) -> None:
    run(4, "save,cut_blocks,weights", tmp_path)
    run(2, "load,small_shards", tmp_path)
    run(1, "alone", tmp_path)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.brings("quantised optimizers under FSDP2 and tensor parallelism", "torchao", "same")
def test_optimizers_continue_under_fsdp_and_tensor_parallelism(processes: int, tmp_path: Path) -> None:
    run(processes, "resumed", tmp_path)
