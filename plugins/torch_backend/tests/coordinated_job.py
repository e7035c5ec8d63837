"""A job whose processes save and load together without a Context.

``torchrun --nproc-per-node N coordinated_job.py DIRECTORY``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore
from ckptcore.errors import RankFailedError

ROWS = torch.arange(42.0).reshape(7, 6)


def main(directory: Path) -> None:
    """Save and load in every way, and after a failed save. At the end, each process creates ``DIRECTORY/RANK``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def state(step: int) -> dict[str, object]:
        return {"rows": distribute_tensor(ROWS + step, mesh, [Replicate()]), "step": step}

    def check(location: Path, step: int) -> None:
        blank = {"rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)]), "step": 0}
        loaded = ckptcore.load(location, blank)
        rows = loaded["rows"]
        assert isinstance(rows, DTensor) and rows.placements == (Shard(1),) and loaded["step"] == step
        assert torch.equal(rows.redistribute(placements=[Replicate()]).to_local(), ROWS + step)

    saved = state(0)
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    ckptcore.save(directory / "blocking", saved)
    handle = ckptcore.save_async(directory / "async", saved)
    handle.result()
    with ckptcore.Checkpointer(directory / "run") as checkpointer:
        checkpointer.save(1, saved)
        checkpointer.save(2, saved)
    alone = ckptcore.PerProcess({"position": 10 + rank})
    ckptcore.save_checkpointables(directory / "parts", {"data": alone})
    for _ in range(3):  # a new Context for each save
        ckptcore.save(directory / "again", saved, overwrite=True, context=ckptcore.Context(durability="none"))
    assert group._get_sequence_number_for_group() == before, "the job's own group was used"
    assert ckptcore.metadata(directory / "blocking").abstract["step"] == 0  # type: ignore[index]  # it is a dict
    for location in ("blocking", "async", "again", "run/2"):
        check(directory / location, 0)
    parts = ckptcore.load_checkpointables(directory / "parts", {"data": ckptcore.PerProcess({"position": 0})})
    assert parts["data"] == {"position": 10 + rank}, parts
    try:
        ckptcore.save(directory / "failed", {"step": object() if rank else 1})
    except ckptcore.errors.CheckpointError as error:
        assert isinstance(error, RankFailedError) == (rank == 0)
    else:
        raise AssertionError("a state that cannot be saved was saved")
    assert not (directory / "failed").exists()
    ckptcore.save(directory / "after", state(3))
    check(directory / "after", 3)
    (directory / str(rank)).touch()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]))
    finally:
        dist.destroy_process_group()
