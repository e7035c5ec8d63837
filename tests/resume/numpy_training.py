"""A training run with NumPy only. It starts quickly, saves every step, and writes a journal of commits.

A state depends only on a seed and the step, so a test can compute the expected state of each step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.policies import AnyPreservation, BestN, LatestN, PreservationPolicy
from ckptcore.results import SaveHandle

POLICY: Final[PreservationPolicy] = AnyPreservation([LatestN(3), BestN(2, "loss", "min")])

_ELEMENTS: Final = 20_000


class Batches:
    """An iterator over data, with a position and the seed of its run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position * self.seed

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the seed."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position and the seed."""
        self.position, self.seed = state["position"], state["seed"]


class Training:
    """The state of a run."""

    def __init__(self, seed: int) -> None:
        self.batches = Batches(seed)
        self.random = np.random.default_rng(seed)
        self.params: dict[str, Any] = {"weight": np.zeros(_ELEMENTS), "bias": np.zeros(7, np.float32), "seed": seed}
        self.loss = 0.0

    def checkpointables(self) -> dict[str, object]:
        """Return everything on which the next step depends."""
        return {"params": self.params, "data": self.batches, "random": self.random}

    def advance(self) -> None:
        """Train one step."""
        batch = next(self.batches)
        self.params["weight"] += self.random.standard_normal(_ELEMENTS) * batch
        self.params["bias"][:] = batch
        self.loss = float(self.random.random())

    def restore(self, checkpointer: ckptcore.Checkpointer) -> None:
        """Load the newest valid step."""
        loaded = checkpointer.load_checkpointables(
            abstract={"params": None}, into={"data": self.batches, "random": self.random}
        )
        self.params = loaded["params"]


def states(seed: int) -> Iterator[Training]:
    """Yield the states of an uninterrupted run, beginning before the first step. Every state is the same object."""
    training = Training(seed)
    while True:
        yield training
        training.advance()


def digest(training: Training) -> str:
    """Return a digest of the whole state."""
    state = training.params, training.batches.state_dict(), training.random.bit_generator.state
    params, data, random = state
    text = f"{params['weight'].tobytes().hex()} {params['bias'].tobytes().hex()} {params['seed']} {data} {random}"
    return hashlib.sha256(text.encode()).hexdigest()


class _Journal:
    """A file of lines that survive a kill and a power loss."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, step: int) -> None:
        """Append a line with one system call, so that the file has the whole line or nothing of it."""
        os.write(self._file, f"{what} {step}\n".encode())
        os.fsync(self._file)


def main(arguments: Sequence[str]) -> None:
    """Train, and resume from the newest step in the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--journal", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True, help="a resumed run keeps its own")
    parser.add_argument(
        "--ahead", type=int, default=0, help="how many steps the loop goes on before it asks about a save"
    )
    options = parser.parse_args(arguments)
    journal = _Journal(options.journal)
    training = Training(options.seed)
    with ckptcore.Checkpointer(options.directory, preservation_policy=POLICY) as checkpointer:
        if checkpointer.latest is not None:
            training.restore(checkpointer)
        first = checkpointer.restored_step or 0
        journal.write("resumed", first)
        print(f"resumed {first}", flush=True)
        saving: list[tuple[int, SaveHandle]] = []
        for step in range(first + 1, options.steps + 1):
            training.advance()
            handle = checkpointer.save_checkpointables(
                step, training.checkpointables(), metrics={"loss": training.loss}
            )
            assert handle is not None
            journal.write("begun", step)
            saving.append((step, handle))
            while len(saving) > (options.ahead if step < options.steps else 0):
                told, oldest = saving.pop(0)
                oldest.result()
                journal.write("committed", told)
                print(f"committed {told}", flush=True)
