"""Quantised weights load as DTensors in a job. Each process loads its own shards, equal to slices of the whole."""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plugins.transforms.tests.quantizing import fp8_blocks, mxfp4_experts, publish, turned_back

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("quantised_job.py")


@pytest.mark.slow
def test_processes_of_torchrun_load_dtensors(tmp_path: Path) -> None:
    """The arrays have 448 rows. The fourth block of 128 rows is smaller, and shards begin in the middle of blocks."""
    generator = torch.Generator().manual_seed(0)
    values, scales = fp8_blocks(torch.randn(448, 2048, generator=generator))
    name = "fp8.weight"
    publish(
        tmp_path / "fp8",
        {name: values, f"{name}_scale_inv": scales},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
    blocks, exponents = mxfp4_experts(torch.randn(8, 512, 256, generator=generator))
    stored = {"mxfp4.up_blocks": blocks, "mxfp4.up_scales": exponents}
    publish(tmp_path / "mxfp4", stored, {"quant_method": "mxfp4"})
    expected = {
        name: (values.float() * wide).to(torch.bfloat16),
        "mxfp4.up": turned_back(blocks, exponents).contiguous(),
    }
    save_file(expected, tmp_path / "expected.safetensors")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(PROGRAM),
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.glob("done.*")) == [f"done.{rank}" for rank in range(4)]
