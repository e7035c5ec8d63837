"""Jobs whose DTensors contain quantised tensors of torchao, as under FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.torch_backend.tests.conftest import Torchrun

pytestmark = [pytest.mark.system, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("composed_job.py")


def test_states_load_on_every_mesh_that_splits_no_block(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun(4, PROGRAM, "save,cut_blocks,weights", tmp_path)
    torchrun(2, PROGRAM, "load,small_shards", tmp_path)
    torchrun(1, PROGRAM, "alone", tmp_path)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.brings("quantised optimizers under FSDP2 and tensor parallelism", "torchao", "same")
def test_optimizers_continue_under_fsdp_and_tensor_parallelism(
    torchrun: Torchrun, processes: int, tmp_path: Path
) -> None:
    torchrun(processes, PROGRAM, "resumed", tmp_path)
