"""Jobs for `random_kills`: our own saves, and the replacements for torch.distributed.checkpoint and Orbax."""

from __future__ import annotations

import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from random_kills import Process, digest

import ckptcore


def numbers(*seed: int) -> dict[str, Any]:
    """Return an array that is larger than one checksum block, and a smaller one."""
    chance = np.random.default_rng(seed)
    return {"large": chance.random((600, 500), np.float32), "small": chance.random(37, np.float32)}


class Careless:
    """A job that deletes the old checkpoint before it writes the new one. `random_kills` must detect this."""

    size, keeps, has_savers = 1, 1, False

    def run(self, directory: Path, process: Process) -> None:
        """Save three times."""
        for number in range(3):
            step, arrays = 3 * process.attempt + number, numbers(process.attempt, number)
            process.begin(step, digest(arrays))
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            np.savez(directory / f"{step}.npz", **arrays)
            process.saved(step)
            if number == 0:
                process.settled()

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load with NumPy."""
        return {int(path.stem): digest(dict(np.load(path))) for path in directory.glob("*.npz")}


class _TorchJob(ABC):
    """A job whose processes use PyTorch and shard the large array."""

    size, keeps, has_savers = 2, 1, False

    def __init__(self) -> None:
        # Imported here, because other jobs do not need these libraries.
        import ckptcore_integrations.torch_dcp as dcp
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as original
        import torch.distributed.tensor as tensors

        torch.set_num_threads(1)
        self.torch, self.dist, self.tensors, self.dcp, self.original = torch, dist, tensors, dcp, original

    def run(self, directory: Path, process: Process) -> None:
        """Save three times."""
        store = join(process, self.size)  # noqa: F841  # must exist until the job ends
        self.dist.init_process_group("gloo")
        self.mesh = self.dist.device_mesh.init_device_mesh("cpu", (self.size,))
        first = 3 * process.attempt
        self.save(directory, process, [first])
        self.dist.barrier()
        process.settled()
        self.save(directory, process, [first + 1, first + 2])
        self.dist.barrier()

    def save(self, directory: Path, process: Process, steps: list[int]) -> None:
        """Save steps one after another."""
        for step in steps:
            state = self.state(process, step)
            self.save_one(directory, state)
            process.saved(step)

    @abstractmethod
    def save_one(self, directory: Path, state: dict[str, Any]) -> None:
        """Save a step, and wait until it is committed."""

    def state(self, process: Process, step: int) -> dict[str, Any]:
        """Record that a step is saved, and return its state."""
        arrays = numbers(process.attempt, step)
        process.begin(step, digest(arrays))
        large, small = map(self.torch.from_numpy, arrays.values())
        sharded = self.tensors.distribute_tensor(large, self.mesh, [self.tensors.Shard(0)])
        return {"large": sharded, "small": small, "step": step, f"rank_{process.rank}": step}

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load with ckptcore, the replacement and PyTorch.

        PyTorch may load the previous step. If a save is killed between the renames of the root and the index, the old
        index remains until the next save replaces it.
        """
        digests = []
        assert ckptcore.verify(directory).ok
        loaded = ckptcore.load(directory)
        digests.append((loaded["step"], digest({name: np.asarray(loaded[name]) for name in ("large", "small")})))
        for library in (self.dcp, self.original):
            target = {"large": self.torch.zeros(600, 500), "small": self.torch.zeros(37), "step": 0}
            library.load(target, checkpoint_id=directory)
            step = target.pop("step")
            digests.append((step, digest({name: value.numpy() for name, value in target.items()})))
        assert digests[0] == digests[1] >= digests[2], digests
        return dict(digests)


def join(process: Process, size: int) -> Any:
    """Set the environment of a process as torchrun does. Return the store of the job, which the caller must keep."""
    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(process.listener)) as bound:
        port = bound.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "RANK": process.rank}
    more = {"LOCAL_RANK": process.rank, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in {**job, **more}.items()})
    if process.rank:
        os.close(process.listener)
        return None
    return TCPStore("127.0.0.1", port, size, True, wait_for_workers=False, master_listen_fd=process.listener)


class CoreSave(_TorchJob):
    """A job that calls `ckptcore.save` and overwrites its checkpoint."""

    def save_one(self, directory: Path, state: dict[str, Any]) -> None:
        """Save a step."""
        ckptcore.save(directory, state, layout="dcp", overwrite=True)


class CoreCheckpointer(_TorchJob):
    """A job with a `Checkpointer` that keeps two steps and writes in the background."""

    keeps = 2

    def save(self, directory: Path, process: Process, steps: list[int]) -> None:
        """Save steps, and wait for all of them at the end."""
        policy = ckptcore.policies.LatestN(2)
        with ckptcore.Checkpointer(directory, preservation_policy=policy) as checkpointer:
            handles = [checkpointer.save(step, self.state(process, step)) for step in steps]
            for step, handle in zip(steps, handles, strict=True):
                handle.result()
                process.saved(step)

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load each step."""
        digests = {}
        with ckptcore.CheckpointReader(directory) as reader:
            for step in reader.steps:
                loaded = reader.load(step)
                assert loaded["step"] == step
                digests[step] = digest({name: np.asarray(loaded[name]) for name in ("large", "small")})
                assert ckptcore.verify(directory / str(step)).ok
        return digests


class DcpSave(_TorchJob):
    """A job that calls `save` of the replacement for torch.distributed.checkpoint."""

    def save_one(self, directory: Path, state: dict[str, Any]) -> None:
        """Save a step."""
        self.dcp.save(state, checkpoint_id=directory)


class DcpSaveOfFour(DcpSave):
    """The job `DcpSave` with four processes."""

    size = 4


class DcpAsyncSave(_TorchJob):
    """A job that calls `async_save` of the replacement. A thread saves."""

    options: ClassVar[dict[str, Any]] = {}

    def save_one(self, directory: Path, state: dict[str, Any]) -> None:
        """Save a step."""
        self.dcp.async_save(state, checkpoint_id=directory, **self.options).result()


class DcpProcess(DcpAsyncSave):
    """A job that calls `async_save` of the replacement. A process saves, which PyTorch starts without a fork."""

    has_savers = True

    def __init__(self) -> None:
        super().__init__()
        self.options = {"async_checkpointer_type": self.dcp.state_dict_saver.AsyncCheckpointerType.PROCESS}


class OrbaxSave:
    """A job that calls `save` of the replacement for Orbax."""

    size, keeps, has_savers = 1, 1, False

    def __init__(self) -> None:
        # Importing JAX is safe before a fork, because it does not create the backend.
        from ckptcore_integrations import orbax_v1 as ours
        from orbax.checkpoint import v1 as original

        self.ours, self.original = ours, original

    def run(self, directory: Path, process: Process) -> None:
        """Save three times."""
        first = 3 * process.attempt
        self.save(directory, process, [first])
        process.settled()
        self.save(directory, process, [first + 1, first + 2])

    def save(self, directory: Path, process: Process, steps: list[int]) -> None:
        """Save steps one after another."""
        for step in steps:
            self.ours.save(directory, self.state(process, step), overwrite=True)
            process.saved(step)

    def state(self, process: Process, step: int) -> dict[str, Any]:
        """Record that a step is saved, and return its state."""
        arrays = numbers(process.attempt, step)
        process.begin(step, digest(arrays))
        return {**arrays, "step": step}

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load with ckptcore, the replacement and Orbax."""
        return dict([self.found_at(directory)])

    def found_at(self, directory: Path) -> tuple[int, str]:
        """Return the step and the digest of a checkpoint."""
        assert ckptcore.verify(directory).ok
        trees = [ckptcore.load(directory / "state"), self.ours.load(directory), self.original.load(directory)]
        digests = {(int(tree.pop("step")), digest({name: np.asarray(tree[name]) for name in tree})) for tree in trees}
        assert len(digests) == 1, digests
        return digests.pop()


class OrbaxSaveAsync(OrbaxSave):
    """A job that calls `save_async` of the replacement for Orbax."""

    def save(self, directory: Path, process: Process, steps: list[int]) -> None:
        """Save steps one after another."""
        for step in steps:
            self.ours.save_async(directory, self.state(process, step), overwrite=True).result()
            process.saved(step)


class OrbaxCheckpointer(OrbaxSave):
    """A job with the `Checkpointer` of the replacement for Orbax, which keeps two steps."""

    keeps = 2

    def save(self, directory: Path, process: Process, steps: list[int]) -> None:
        """Save steps one after another, because Orbax skips a step while another save is running."""
        policy = self.original.training.preservation_policies.LatestN(2)
        with self.ours.training.Checkpointer(
            directory, preservation_policy=policy, cleanup_tmp_directories=True
        ) as checkpointer:
            for step in steps:
                checkpointer.save_async(step, self.state(process, step)).result()
                process.saved(step)

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load each step."""
        with self.original.training.Checkpointer(directory) as checkpointer:
            steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
        digests = [self.found_at(directory / str(step)) for step in steps]
        assert [step for step, _ in digests] == steps
        return dict(digests)
