"""A process of a job whose process group is destroyed, and created again with another process as rank 1.

Arguments: ``rejoined_job.py WHO DIRECTORY PORT PORT``. WHO is ``stays`` for rank 0 of both groups,
``leaves`` for rank 1 of the first group, and ``comes`` for rank 1 of the second group.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch.distributed as dist

import ckptcore

_LIVES: Final = {"stays": (0, 1), "leaves": (0,), "comes": (1,)}


def main(who: str, directory: Path, ports: list[str]) -> None:
    for life in _LIVES[who]:
        rank = 0 if who == "stays" else 1
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[life]}", rank=rank, world_size=2)
        # All saves use one location. If the ranks counted saves differently, they would wait for
        # each other until the timeout.
        for step in range(2):
            ckptcore.save(directory / "run", {"life": np.full(3, life), "step": step}, overwrite=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
