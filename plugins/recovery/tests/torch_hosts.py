"""Programs of torch.distributed with steps in memory: each process is a host."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptcore import Checkpointer
from ckptcore.policies import SpecificSteps
from tests.jobs.processes import Place
from tests.jobs.torch_program import run as run_torch

run: Final = run_torch
JOB: Final = "torch-hosts"
_SHAPE: Final = (1200, 500)


def hosts_of(directory: Path) -> list[str]:
    """Return the host of each rank."""
    path = directory / "hosts.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def state(step: int) -> dict[str, Any]:
    """Return the state of a step: sharded and replicated arrays."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(_SHAPE[0] * _SHAPE[1], dtype=torch.float32).reshape(_SHAPE) + step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole[:100], mesh, [Replicate()]),
        "step": step,
    }


def open_run(place: Place) -> tuple[Checkpointer, PeerMemory]:
    """Open the run on the host of this process. Only step 10 is uploaded."""
    hosts = hosts_of(place.directory) or [f"host-{rank}" for rank in range(place.size)]
    os.environ[DIRECTORY_VARIABLE] = str(place.directory / hosts[place.rank])
    memory = PeerMemory(
        place.directory / "far",
        job=JOB,
        memory_bytes=1 << 28,
        upload_policy=SpecificSteps([10]),
    )
    layout = place.layouts[0] if place.layouts else "safetensors"
    return Checkpointer(memory, layout=layout, if_in_use="take over"), memory


def expect_state(loaded: Mapping[str, Any], step: int) -> None:
    """Check every element of this process."""
    expected = state(step)
    assert loaded["step"] == step
    for name in ("sharded", "replicated"):
        tensor = loaded[name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.to_local(), expected[name].to_local())


def _save_and_die(place: Place) -> None:
    """Save three steps, and be killed."""
    run, _ = open_run(place)
    for step in (1, 2, 3):
        run.save(step, state(step))
        run.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_save(place: Place) -> None:
    """Upload step 10, and save more until timers kill the processes. Record the steps that were reported."""
    delay = random.Random(f"{place.directory.name} {place.rank}").uniform(0.0, 0.4)
    run, memory = open_run(place)
    run.save(10, state(10))
    run.wait()
    memory.wait_for_uploads()
    (place.directory / f"reported-{place.rank}").write_text("10\n")
    dist.barrier()
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(11, 100):
        run.save(step, state(step))
        run.wait()
        with (place.directory / f"reported-{place.rank}").open("a") as file:
            file.write(f"{step}\n")


def _load(place: Place) -> int:
    """Load the newest step, and save one more."""
    run, _ = open_run(place)
    with run:
        loaded = run.load_into(state(0))
        step = run.restored_step
        assert step is not None
        expect_state(loaded, step)
        run.save(step + 10, state(step + 10))
        run.wait()
        return step


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {
    "save and die": _save_and_die,
    "die in a save": _die_in_a_save,
    "load": _load,
}
