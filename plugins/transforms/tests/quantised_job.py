"""A job of torchrun in which four processes load quantised weights as DTensors on a 2 x 2 mesh.

Run it as ``quantised_job.py DIRECTORY``. It raises an error if a result is wrong.

The directory contains the checkpoints ``fp8`` and ``mxfp4``, as Hugging Face's tools write them, and the values that
these tools restore, in ``expected.safetensors``.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ckptcore_transforms import DequantizeAsConfigured, Transpose
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckptcore

PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
]


def _check(checkpoint: Path, name: str, whole: torch.Tensor, mesh: DeviceMesh, stored_bytes: int) -> None:
    """Load one weight with several placements. The ranks together read little more than their shards need."""
    for placements in PLACEMENTS:
        target = distribute_tensor(torch.zeros_like(whole), mesh, placements)
        expected = distribute_tensor(whole, mesh, placements).to_local()
        for wanted in ({name: target}, ckptcore.abstract({name: target})):
            report = ckptcore.results.LoadReport()
            loaded = ckptcore.load(checkpoint, wanted, transforms=[DequantizeAsConfigured()], report=report)[name]
            assert isinstance(loaded, DTensor) and loaded.placements == placements
            assert loaded.to_local().dtype == torch.bfloat16
            assert torch.equal(loaded.to_local().view(torch.int16), expected.view(torch.int16))
            read = torch.tensor(report.bytes_read)
            dist.all_reduce(read)
            copies = 4 * expected.numel() // whole.numel()
            if Shard(1) in placements:
                copies *= 2  # rows are short, so the bytes between two parts of a column shard are read too
            assert read.item() <= 1.1 * copies * stored_bytes, (placements, read, stored_bytes)
        ckptcore.load_into(checkpoint, {name: target}, transforms=[DequantizeAsConfigured()])
        assert torch.equal(target.to_local(), expected)
    turned = distribute_tensor(torch.zeros_like(whole.mT.contiguous()), mesh, (Shard(0), Shard(1)))
    loaded = ckptcore.load(checkpoint, {name: turned}, transforms=[DequantizeAsConfigured(), Transpose(name)])[name]
    assert torch.equal(loaded.full_tensor(), whole.mT)


def main(directory: Path) -> None:
    """Check every checkpoint of the directory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for name, whole in load_file(directory / "expected.safetensors").items():
        checkpoint = directory / name.partition(".")[0]
        stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        _check(checkpoint, name, whole, mesh, stored)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    (Path(sys.argv[1]) / f"done.{dist.get_rank()}").touch()
    dist.destroy_process_group()
    os._exit(0)  # see tests/launchers/torch_mesh.py
