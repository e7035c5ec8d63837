"""A worker: its examples, its part of the gradient, and its saved state."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ckptcore_ray.coordinator import RayCoordinator

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.policies import LatestN

FEATURES = 16
EXAMPLES = 4096
BATCH = 32


class Worker:
    """One rank of the run. The driver calls its methods; workers do not call each other."""

    def __init__(self, rank: int, disk: Path) -> None:
        """Create the file of examples on the disk of the worker.

        Args:
            rank: the rank of the worker.
            disk: a directory of this worker, which is not saved.
        """
        self.rank = rank
        self.disk = disk
        disk.mkdir()
        source = np.random.default_rng([7, rank])
        inputs = source.standard_normal((EXAMPLES, FEATURES))
        np.savez(
            disk / "examples.npz",
            inputs=inputs,
            targets=inputs @ np.arange(FEATURES) + source.standard_normal(EXAMPLES),
        )
        self.examples = np.load(disk / "examples.npz")
        self.model = {"weights": np.zeros(FEATURES), "momentum": np.zeros(FEATURES)}
        self.draw = np.random.default_rng(rank)
        self.run: ckptcore.Checkpointer | None = None

    def join(self, job: str, size: int, directory: Path) -> int:
        """Join the job, or join it again, and load the newest checkpoint. Return its step; 0 without a checkpoint."""
        if self.run is not None:
            with contextlib.suppress(CheckpointError):  # the driver has this error already
                self.run.close()
        # A coordinator and a Context count the exchanges of one incarnation of the job. So both are new, and so is the
        # Checkpointer.
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=RayCoordinator(job, self.rank, size)))
        self.run = ckptcore.Checkpointer(directory, context=context, preservation_policy=LatestN(2))
        if self.run.latest is None:
            return 0
        loaded = self.run.load_checkpointables(abstract={"model": self.model}, into={"draw": self.draw})
        self.model = loaded["model"]  # arrays are built; the generator is restored in place
        return self.run.restored_step or 0

    def gradient(self) -> tuple[float, npt.NDArray[np.float64]]:
        """Return the loss of a batch, and its gradient."""
        batch = self.draw.integers(EXAMPLES, size=BATCH)
        inputs, targets = self.examples["inputs"][batch], self.examples["targets"][batch]
        error = inputs @ self.model["weights"] - targets
        return float(np.mean(error**2)), 2 * inputs.T @ error / BATCH

    def update(self, gradient: npt.NDArray[np.float64]) -> None:
        """Run a step of gradient descent with momentum."""
        self.model["momentum"][:] = 0.9 * self.model["momentum"] + gradient
        self.model["weights"][:] -= 0.01 * self.model["momentum"]

    def save(self, step: int) -> None:
        """Save the model, which is the same on all ranks, and the generator of this rank."""
        assert self.run is not None, "join comes first"
        checkpointables: dict[str, Any] = {"model": self.model, "draw": self.draw}
        self.run.save_checkpointables(step, checkpointables)
        self.run.wait()

    def close(self) -> None:
        """Close the Checkpointer, which releases the directory of the run."""
        if self.run is not None:
            self.run.close()

    def die(self) -> None:
        """End the process, as an accident would."""
        os.kill(os.getpid(), signal.SIGKILL)
