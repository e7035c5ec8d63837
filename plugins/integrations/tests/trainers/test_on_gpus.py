"""Tests that need GPUs: scaled losses in float16, and FSDP as Accelerate sets it up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_integrations.transformers import newest_sound

from plugins.integrations.tests.trainers import test_trainer_sharding as sharding
from plugins.integrations.tests.trainers import test_transformers as plain
from plugins.integrations.tests.trainers.trainer_jobs import run_job

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_run_in_float16_resumes_with_its_scale(tmp_path: Path) -> None:
    run: Any = plain.trainer(tmp_path, fp16=True, use_cpu=False)
    run.train()
    resumed: Any = plain.trainer(tmp_path, fp16=True, use_cpu=False)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    plain.assert_same(run, resumed, since=4)
    assert run.accelerator.scaler.state_dict() == resumed.accelerator.scaler.state_dict()


def resume_with_fsdp(directory: str, version: int) -> None:
    """Train, and resume from the middle. Runs in each process of a job."""
    run = sharding.trainer(Path(directory), version, ddp_backend="nccl", use_cpu=False)
    run.train()
    assert newest_sound(directory) == str(Path(directory, "checkpoint-8"))
    assert run.accelerator.device.type == "cuda" and run.is_fsdp_enabled
    resumed = sharding.trainer(Path(directory), version, ddp_backend="nccl", use_cpu=False)
    resumed.train(resume_from_checkpoint=str(Path(directory, "checkpoint-4")))
    assert run.seen[4:] == resumed.seen
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_of_accelerate(tmp_path: Path, version: int) -> None:
    call = f"import test_on_gpus; test_on_gpus.resume_with_fsdp({str(tmp_path / 'run')!r}, {version})"
    assert run_job(call, 2, tmp_path) == [0, 0]
