"""A job of four processes with shared loads: one process reads the data, and sends it to the others over gloo.

``torchrun --nproc-per-node 4 broadcast_job.py DIRECTORY``, where ``DIRECTORY/saved`` is a
checkpoint of `state`. Raises an error on a wrong result, and writes the number of array bytes that
each load read to ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from ckptcore_testing import FaultPlan, FaultyStorage
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore
from ckptcore import Context
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import IOOptions, JobOptions, PluginOptions, ReadGroups
from ckptcore.errors import CheckpointError
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

READS: Final[Mapping[str, Any]] = {
    "all": "all",
    "broadcast": "broadcast",
    "per_node": "per_node",
    "pairs": ReadGroups([(0, 1), (2, 3)]),
}
KINDS: Final = ("plain", "fsdp2", "hsdp")


def state() -> dict[str, torch.Tensor]:
    """Small and large tensors that every process loads."""
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(1024, 1024, generator=generator),
        "v": torch.randn(1024, 2048, generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, generator=generator),
        "i": torch.arange(5) << 40,
    }


class Counting(FaultyStorage):
    """A storage that counts the bytes read from arrays. If `fails` is set, reads of arrays raise an error."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner, FaultPlan())
        self.lock = threading.Lock()
        self.nbytes = 0
        self.fails = False

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if key.endswith(".safetensors"):
            if self.fails:
                raise CheckpointError(f"the disk under {key} is gone")
            with self.lock:
                self.nbytes += sum([len(buffer) for _, buffer in ranges])
        super().get_into(key, ranges)


class CountedStorage:
    """A plugin: ``counted:///PATH`` is a local directory whose reads are counted."""

    def __init__(self) -> None:
        self.storages: list[Counting] = []
        self.fails = False

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"counted": self.open}

    def open(self, url: str, options: StorageOptions) -> Counting:
        self.storages.append(Counting(LocalStorage(url.removeprefix("counted://"), options)))
        self.storages[-1].fails = self.fails
        return self.storages[-1]

    def taken(self) -> int:
        """Return the number of bytes read since the previous call."""
        nbytes = sum(storage.nbytes for storage in self.storages)
        self.storages.clear()
        return nbytes


def abstract(kind: str) -> dict[str, torch.Tensor]:
    """Return targets filled with zeros: plain tensors, a module under FSDP2, or DTensors on a mesh of 2 x 2."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    if kind == "fsdp2":
        module = torch.nn.Module()
        for name in "wvb":
            module.register_parameter(name, torch.nn.Parameter(tensors[name]))
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
        return {**module.state_dict(), "i": tensors["i"]}
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded = {name: distribute_tensor(tensors[name], mesh, [Replicate(), Shard(0)]) for name in "wvb"}
        return {**sharded, "i": tensors["i"]}
    return tensors


def check(loaded: Mapping[str, Any]) -> None:
    """Assert that the loaded tensors equal the state."""
    for name, expected in state().items():
        whole = loaded[name].full_tensor() if isinstance(loaded[name], DTensor) else loaded[name]
        assert whole.dtype == expected.dtype and torch.equal(whole, expected), name


def check_failure(directory: Path) -> None:
    """Check that a read error in one process fails the load on all processes, and that the next load succeeds."""
    storage = CountedStorage()
    storage.fails = dist.get_rank() == 2
    context = Context(job=JobOptions(reads="broadcast"), plugins=PluginOptions(extra=[storage]))
    wanted = abstract("fsdp2")  # every process reads a part
    try:
        ckptcore.load(f"counted://{directory}/saved", wanted, context=context)
    except CheckpointError as error:
        message = str(error)
        assert "the disk under" in message and "is gone" in message, message
        assert (dist.get_rank() == 2) != ("rank 2" in message), message
    else:
        raise AssertionError("the load succeeded although rank 2 could not read")
    storage.fails = False
    check(ckptcore.load(f"counted://{directory}/saved", wanted, context=context))


def main(directory: Path) -> None:
    """Load with every way to read, and record the bytes read."""
    read: dict[str, dict[str, int]] = {}
    for name, reads in READS.items():
        storage = CountedStorage()
        # Without checksums, because verification reads whole blocks.
        context = Context(
            job=JobOptions(reads=reads), plugins=PluginOptions(extra=[storage]), io=IOOptions(verify=False)
        )
        read[name] = {}
        for kind in KINDS:
            location = f"counted://{directory}/saved"
            check(ckptcore.load(location, abstract(kind), context=context))
            read[name][kind] = storage.taken()
            check(ckptcore.load_into(location, abstract(kind), context=context))
            assert storage.taken() == read[name][kind]
    check_failure(directory)
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
