"""Job of one or more processes that trains a model under FSDP2 and saves it, or consolidates it for Hugging Face.

``torchrun --nproc-per-node N consolidate_job.py save-torch|save-ckptcore DIRECTORY`` saves to
``DIRECTORY/torch`` or ``DIRECTORY/ckptcore``, and the full tensors to ``DIRECTORY/expected.pt``.
``... consolidate SOURCE DESTINATION`` writes the directory, and the bytes written by each process
to ``DESTINATION.RANK.txt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptcore

MAX_FILE_BYTES = 500


class Model(torch.nn.Module):
    """Model whose rows do not divide evenly among processes.

    One array has another dtype, and one is smaller than the mesh.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(101, 10)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(10, 10, dtype=torch.bfloat16) for _ in range(4)])
        self.head = torch.nn.Linear(10, 3)
        self.register_buffer("counted", torch.tensor(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embed(tokens).to(torch.bfloat16)
        for block in self.blocks:
            values = torch.tanh(block(values))
        output: torch.Tensor = self.head(values.float())
        return output


def save(by: str, directory: Path, context: ckptcore.Context) -> None:
    """Train one step and save."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.embed, *model.blocks, model.head):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 1}
    if by == "torch":
        dcp.save(state, checkpoint_id=str(directory / "torch"))
    else:
        ckptcore.save(directory / "ckptcore", state, layout="dcp", context=context)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model_state.items()}
    if dist.get_rank() == 0:
        torch.save(whole, directory / "expected.pt")


def main(task: str, first: Path, second: Path | None = None) -> None:
    """Run one task."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=StoreCoordinator(store, rank, size, timeout_seconds=60)),
        memory=ckptcore.context.MemoryOptions(load_bytes=3000),
    )
    if task != "consolidate":
        save(task.removeprefix("save-"), first, context)
        return
    assert second is not None
    told: list[int] = [0]
    ckptcore.copy(
        first,
        second,
        layout=ckptcore.SafetensorsLayout(max_file_bytes=MAX_FILE_BYTES),
        subtree="model",
        progress=lambda done, total: told.append(total),
        context=context,
    )
    Path(f"{second}.{rank}.txt").write_text(str(told[-1]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        main(sys.argv[1], *map(Path, sys.argv[2:]))
    finally:
        dist.destroy_process_group()
