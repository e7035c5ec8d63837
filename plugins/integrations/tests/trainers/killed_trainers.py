"""Jobs for `random_kills`: trainers that continue from their newest checkpoint, and are killed during later saves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from killed_jobs import join
from random_kills import Process, digest

import ckptcore


class KerasOnJax:
    """A job that trains a Keras model with `CkptcoreCheckpoint`. It keeps two epochs, in a layout that Keras loads."""

    size, keeps, has_savers = 1, 2, False
    backend, layout = "jax", "ocdbt"

    def __init__(self) -> None:
        # Keras and JAX read these variables at import. Without the cache, each job would compile for seconds.
        os.environ.update(
            JAX_COMPILATION_CACHE_DIR=str(Path("compiled").absolute()),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            KERAS_BACKEND=self.backend,
        )
        import keras_program

        self.program = keras_program

    def run(self, directory: Path, process: Process) -> None:
        """Train an epoch, and then two."""
        model = self.program.make()
        step = self.program.resume(str(directory), model)
        began = 0 if step is None else step + 1
        self.fit(directory, model, process, began, began + 1)
        process.settled()
        self.fit(directory, model, process, began + 1, began + 3)

    def fit(self, directory: Path, model: Any, process: Process, began: int, ended: int) -> None:
        """Train some epochs. Every second job saves in the background."""
        in_background = process.attempt % 2 == 1
        saver = self.program.CkptcoreCheckpoint(
            str(directory), max_to_keep=2, layout=self.layout, save_on_background=in_background
        )
        save = saver._save_checkpoint  # Keras calls this callback last, so no other callback can observe its save

        def save_and_say(step: int, logs: Any = None) -> None:
            process.begin(step, self.digest(model))
            save(step, logs)
            if not in_background:
                process.saved(step)

        saver._save_checkpoint = save_and_say
        model.fit(
            self.program.Batches(began),
            initial_epoch=began,
            epochs=ended,
            shuffle=False,
            verbose=0,
            callbacks=[saver],
        )
        for epoch in range(began, ended):
            process.saved(epoch)

    def digest(self, model: Any) -> str:
        """Return a digest of the weights and the state of the optimizer."""
        to_numpy = self.program.keras.ops.convert_to_numpy
        variables = (*model.variables, *model.optimizer.variables)
        return digest({variable.path: to_numpy(variable.value) for variable in variables})

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load each step, and the newest one with Keras."""
        digests = {}
        model = self.program.make(1)
        with ckptcore.CheckpointReader(directory) as reader:
            for step in reader.steps:
                assert ckptcore.verify(directory / str(step)).ok
                reader.load_checkpointables(step, into={"pytree": model})
                digests[step] = self.digest(model)
        if self.layout == "ocdbt":
            expected = model.get_weights()
            model.set_weights([np.zeros_like(array) for array in expected])
            model.load_weights(directory)
            assert all(map(np.array_equal, model.get_weights(), expected))
        return digests


class KerasOnTorch(KerasOnJax):
    """The job `KerasOnJax`, but with PyTorch and our own layout."""

    backend, layout = "torch", "safetensors"


class Titan:
    """A job with a Trainer of TorchTitan and `CkptcoreManager`, which keeps two steps.

    Every second job saves asynchronously.
    """

    size, keeps, has_savers = 2, 2, False

    def __init__(self) -> None:
        # Imported here, because other jobs do not need these libraries.
        import titan_program
        import torch
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        self.program, self.torch = titan_program, torch
        self.planner, self.reader, self.load = _EmptyStateDictLoadPlanner, FileSystemReader, _load_state_dict

    def run(self, directory: Path, process: Process) -> None:
        """Train until three steps are saved."""
        store = join(process, self.size)  # noqa: F841  # must exist until the job ends
        mode = "async" if process.attempt % 2 else "disabled"
        trainer = self.program.build(directory, interval=1, keep_latest_k=2, async_mode=mode, steps=10**6)
        manager = trainer.checkpointer
        save, steps = manager.save, []

        def save_and_say(step: int, last_step: bool = False) -> None:
            steps.append(step)
            process.begin(step, self.digest(manager._state(manager.states)))
            save(step, last_step)
            if mode == "disabled":
                process.saved(step)
            if len(steps) == 1:
                manager.maybe_wait_for_saving()
                manager._writer.wait()
                process.saved(step)
                self.torch.distributed.barrier()
                process.settled()
            if len(steps) == 3:
                raise _EnoughError

        manager.save = save_and_say
        try:
            trainer.train()
        except _EnoughError:
            trainer.close()
        for step in steps:
            process.saved(step)

    def digest(self, state: Any) -> str:
        """Return a digest of the tensors in a state."""
        leaves, _ = self.torch.utils._pytree.tree_flatten_with_path(state)
        arrays = {}
        for path, value in leaves:
            tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
            if isinstance(tensor, (self.torch.Tensor, np.ndarray)):
                arrays[".".join(str(key.key) for key in path)] = np.asarray(tensor)
        return digest(arrays)

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load each step with ckptcore and PyTorch."""
        by_step = {}
        for path in directory.glob("checkpoint/step-*"):
            assert ckptcore.verify(path).ok
            theirs: dict[str, Any] = {}
            self.load(theirs, storage_reader=self.reader(path), planner=self.planner(), no_dist=True)
            digests = {self.digest(ckptcore.load(path)), self.digest(theirs)}
            assert len(digests) == 1
            by_step[int(path.name.removeprefix("step-"))] = digests.pop()
        return by_step


class Accelerate:
    """A job with an Accelerator and `CheckpointMixin` that replaces its checkpoint.

    Every second job saves in the background.
    """

    size, keeps, has_savers = 1, 1, False

    def __init__(self) -> None:
        # Imported here, because other jobs do not need these libraries.
        import torch
        from accelerate import Accelerator
        from ckptcore_integrations.accelerate import CheckpointMixin

        torch.set_num_threads(1)
        self.torch = torch
        self.kind = type("Checkpointed", (CheckpointMixin, Accelerator), {})

    def make(self, seed: int) -> tuple[Any, Any, Any]:
        """Return an accelerator, a model and an optimizer with state."""
        self.torch.manual_seed(seed)
        model = self.torch.nn.Linear(300, 200)
        optimizer = self.torch.optim.AdamW(model.parameters(), lr=1e-2)
        accelerator = self.kind(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        self.train(accelerator, model, optimizer)
        return accelerator, model, optimizer

    def train(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        """Train one step."""
        accelerator.backward(model(self.torch.rand(4, 300)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def run(self, directory: Path, process: Process) -> None:
        """Train and save three times."""
        accelerator, model, optimizer = self.make(process.attempt)
        accelerator.save_in_background = process.attempt % 2 == 1
        if directory.exists():
            accelerator.load_state(directory)
        for number in range(3):
            self.train(accelerator, model, optimizer)
            step = self.step(optimizer)
            process.begin(step, self.digest(model, optimizer))
            accelerator.save_state(directory)
            accelerator.wait_for_checkpoint()
            process.saved(step)
            if number == 0:
                process.settled()
        accelerator.end_training()

    def step(self, optimizer: Any) -> int:
        """Return the number of steps of the optimizer."""
        return int(next(iter(optimizer.state.values()))["step"])

    def digest(self, model: Any, optimizer: Any) -> str:
        """Return a digest of the weights and the state of the optimizer."""
        state = {
            f"{key}.{name}": value for key, row in enumerate(optimizer.state.values()) for name, value in row.items()
        }
        return digest({name: value.detach().numpy() for name, value in {**model.state_dict(), **state}.items()})

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load the checkpoint into another accelerator."""
        assert ckptcore.verify(directory).ok
        accelerator, model, optimizer = self.make(0)
        accelerator.load_state(directory)
        return {self.step(optimizer): self.digest(model, optimizer)}


class _EnoughError(Exception):
    """Raised to end a training."""
