"""Four processes of torchrun that load one state which all of them want whole, beside torch's own way.

32 matrices of 4096 x 4096 bfloat16, a GB, saved as ``dcp`` by one process. The contenders load in turn; a round takes as long as the slowest
process. All processes are on one host, and the checkpoint is in its page cache: what is read four times there costs next to
nothing, and what is sent goes through the same memory and processors. So this shows what sending costs, and not what it saves where
storage is slower than the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

import ckptcore
from benchmarks.alternating import outcomes_of_ranks
from ckptcore.protocols import Coordinator

__all__ = ["rows"]

_PROCESSES: Final = 4
_MATRICES: Final = 32
_SIDE: Final = 4096
_ROUNDS: Final = 5


def rows(scratch: Path) -> Iterator[tuple[str, bool]]:
    """Rows to print; the first is what the others are compared with, and none is a target."""
    directory = scratch / "broadcast"
    (directory / "results").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_PROCESSES)]
    done = subprocess.run(
        [*command, "-m", "benchmarks.broadcast", str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-4000:])
    nbytes = _MATRICES * _SIDE * _SIDE * 2
    case = f"broadcast: {_PROCESSES} processes load the whole"
    for found in outcomes_of_ranks(directory / "results"):
        row = f"{case:42} {found.name:36} {found.median * 1e3:7.0f} ms {found.ratio:7.2f}"
        yield f"{row}  {nbytes / found.median / 1e9:.2f} GB/s", True
    shutil.rmtree(directory)


def _job(directory: Path) -> None:
    """What each process does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    location = directory / "saved"

    def model(fill: Callable[[int], torch.Tensor]) -> torch.nn.Module:
        made = torch.nn.Module()
        for number in range(_MATRICES):
            made.register_parameter(f"w{number}", torch.nn.Parameter(fill(number), requires_grad=False))
        return made

    if rank == 0:
        whole = model(lambda number: torch.from_numpy(_elements(number)).view(torch.bfloat16))
        ckptcore.save(location, dict(whole.state_dict()), layout="dcp", context=ckptcore.Context(coordinator=_alone()))
        del whole
    dist.barrier()
    target = model(lambda number: torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16))
    state = dict(target.state_dict())

    def dcp_broadcast() -> None:
        """Rank 0 reads; torch sends tensor after tensor."""
        full = dict(state) if rank == 0 else {}
        if rank == 0:
            dcp_load(full, checkpoint_id=location, no_dist=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(target, full, options=options)

    contexts = {name: ckptcore.Context(reads=name) for name in ("all", "broadcast")}
    loads: dict[str, Callable[[], object]] = {
        "dcp.load on 0, broadcast_from_rank0": dcp_broadcast,
        "dcp.load on all": lambda: dcp_load(dict(state), checkpoint_id=location),
        "ckptcore.load_into, reads all": lambda: ckptcore.load_into(location, state, context=contexts["all"]),
        "ckptcore.load_into, reads broadcast": lambda: ckptcore.load_into(
            location, state, context=contexts["broadcast"]
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(_ROUNDS + 1):  # the first is not counted: it reads modules, too
        for name, load in loads.items():
            dist.barrier()
            start = time.perf_counter()
            load()
            taken = time.perf_counter() - start
            dist.barrier()
            if number:
                seconds[name].append(taken)
    assert torch.equal(state["w3"].view(torch.int16), torch.from_numpy(_elements(3)))  # as bits: some are no numbers
    (directory / "results" / f"{rank}.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def _alone() -> Coordinator:
    """The coordinator of a process that saves alone."""
    from ckptcore.builtin.single_process import SingleProcess

    return SingleProcess()


def _elements(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """A matrix, as the bits of its elements."""
    return np.random.default_rng(number).integers(0, 1 << 15, (_SIDE, _SIDE), np.int16)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _job(Path(sys.argv[1]))
