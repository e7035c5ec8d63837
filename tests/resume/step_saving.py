"""A program that saves one step and deletes older steps. It waits at a gate until it is traced."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.policies import LatestN
from tests.resume.numpy_training import Batches

KEPT: Final = 2
"""The number of steps that the process keeps."""


def make_state(step: int) -> dict[str, object]:
    """Return the state of a step. Every leaf depends on the step."""
    batches = Batches(step)
    next(batches)
    return {"params": {"w": np.full(1000, step), "names": [f"step {step}"] * 3}, "data": batches}


def step_at(reader: ckptcore.CheckpointReader, step: int) -> int:
    """Return the step to which a stored state belongs. Assert that the state is complete."""
    loaded: dict[str, Any] = reader.load_checkpointables(step)
    stored = int(loaded["params"]["w"][0])
    assert (loaded["params"]["w"] == stored).all() and loaded["params"]["names"] == [f"step {stored}"] * 3
    assert loaded["data"] == {"position": 1, "seed": stored}
    return stored


def main(arguments: Sequence[str]) -> None:
    """Save a step when a named pipe has a byte. The arguments are the directory, the step and the pipe."""
    directory, step, gate = arguments
    descriptor = os.open(gate, os.O_RDWR)
    print("ready", flush=True)
    os.read(descriptor, 1)
    # One thread, so that every run makes the same system calls.
    context = ckptcore.Context(io=ckptcore.context.IOOptions(threads=1))
    with ckptcore.Checkpointer(Path(directory), preservation_policy=LatestN(KEPT), context=context) as checkpointer:
        checkpointer.save_checkpointables(int(step), make_state(int(step)))
