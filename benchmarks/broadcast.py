"""Loads of one whole state by four processes of torchrun, compared with methods of PyTorch.

The state is 16 matrices of 4096 x 4096 bfloat16, 0.5 GB, saved as ``dcp`` by one process. A round takes as long as the
slowest process. All processes are on one host, and the checkpoint is in its page cache: reading it four times is cheap,
and messages use the same memory and processors. So this measures the cost of sending, not the time saved if the storage
is slower than the network.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import numpy as np

import ckptcore
from benchmarks.alternating import Contender
from benchmarks.in_jobs import joined_rows, measure_rank, torchrun
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.builtin import SingleProcess

_PROCESSES: Final = 4
_MATRICES: Final = 16
_SIDE: Final = 4096


def rows(setting: Setting) -> Iterator[Row]:
    """Measure loads of a job of torchrun."""
    side, processes = setting.side(_SIDE), setting.count(_PROCESSES, least=2)
    results = setting.directory / "results"
    results.mkdir()
    torchrun(processes, "benchmarks.broadcast", setting.directory, side, setting.rounds)
    name, nbytes = f"broadcast: {processes} processes load the whole", _MATRICES * side * side * 2
    yield from joined_rows(name, results, nbytes=nbytes, targets={})


def _job(directory: Path, side: int, rounds: int) -> None:
    """Measure in one process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    location = directory / "saved"

    def model(fill: Callable[[int], torch.Tensor]) -> torch.nn.Module:
        module = torch.nn.Module()
        for number in range(_MATRICES):
            module.register_parameter(f"w{number}", torch.nn.Parameter(fill(number), requires_grad=False))
        return module

    if rank == 0:
        whole = model(lambda number: torch.from_numpy(_elements(number, side)).view(torch.bfloat16))
        alone = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=SingleProcess()))
        ckptcore.save(location, dict(whole.state_dict()), layout="dcp", context=alone)
        del whole
    dist.barrier()
    target = model(lambda number: torch.zeros(side, side, dtype=torch.bfloat16))
    state = dict(target.state_dict())

    def dcp_broadcast() -> None:
        """Read on rank 0; torch sends tensor after tensor."""
        full = dict(state) if rank == 0 else {}
        if rank == 0:
            dcp_load(full, checkpoint_id=location, no_dist=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(target, full, options=options)

    def ours(reads: Literal["all", "broadcast"]) -> Contender:
        context = ckptcore.Context(job=ckptcore.context.JobOptions(reads=reads))
        return Contender(
            f"ckptcore.load_into, reads {reads}", lambda: ckptcore.load_into(location, state, context=context)
        )

    contenders = [
        ours("broadcast"),
        Contender("dcp.load on 0, broadcast_from_rank0", dcp_broadcast),
        Contender("dcp.load on all", lambda: dcp_load(dict(state), checkpoint_id=location)),
        ours("all"),
    ]
    measure_rank(contenders, rounds, directory / "results", rank=rank, barrier=dist.barrier)
    # Compare bits, because some elements are NaN.
    assert torch.equal(state["w3"].view(torch.int16), torch.from_numpy(_elements(3, side)))
    dist.destroy_process_group()


def _elements(number: int, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """Return a matrix, as the bits of its elements."""
    return np.random.default_rng(number).integers(0, 1 << 15, (side, side), np.int16)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
