"""Kill and resume a run with each sampler, and compare it with a run that was not killed.

Prints a line for each sampler and step at which the run was killed: whether batches are equal, whether random numbers
are equal, and the number of warnings.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # ships no types
from torchdata.stateful_dataloader.sampler import RandomSampler as KeptSampler  # type: ignore[import-untyped]  # likewise

import ckptcore

STEPS = 15
KILLED_AT = (3, 8)
"""Steps at which runs are killed: one in the first epoch, which has 6 batches, and one in the second."""

NUMBERS: Any = list(range(12))


def seeded() -> torch.Generator:
    """Return a generator for a sampler."""
    return torch.Generator().manual_seed(3)


def loader(sampler: Any) -> Any:
    """Return a loader with its own generator."""
    return StatefulDataLoader(NUMBERS, batch_size=2, sampler=sampler, generator=torch.Generator())


LOADERS: dict[str, Callable[[], Any]] = {
    "torchdata": lambda: loader(KeptSampler(NUMBERS, generator=seeded())),
    "torch": lambda: loader(RandomSampler(NUMBERS, generator=seeded())),
    "subset": lambda: loader(SubsetRandomSampler(NUMBERS, generator=seeded())),
    "weighted": lambda: loader(WeightedRandomSampler([1.0] * 12, 12, generator=seeded())),
    "batches": lambda: StatefulDataLoader(
        NUMBERS,
        batch_sampler=BatchSampler(KeptSampler(NUMBERS, generator=seeded()), 2, drop_last=False),
        generator=torch.Generator(),
    ),
    "one generator": lambda: StatefulDataLoader(NUMBERS, batch_size=2, shuffle=True, generator=seeded()),
    "no generator": lambda: StatefulDataLoader(NUMBERS, batch_size=2, shuffle=True),
}


class Count(logging.Handler):
    """A handler that counts warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning."""
        self.found += 1


def train(name: str, directory: Path, *, killed_at: int | None) -> None:
    """Train to the end, or until the process kills itself. Write the batches and random numbers to a file."""
    torch.manual_seed(0)
    count = Count()
    logging.getLogger("ckptcore.torch").addHandler(count)
    state = {"data": LOADERS[name](), "random": torch.default_generator}
    run = directory / name / "run"
    first = 0
    if run.exists() and killed_at is None:
        ckptcore.load_checkpointables(run, into=state)
        first = json.loads((directory / name / "first").read_text())
    seen = []
    step = first
    while step < STEPS:
        for batch in state["data"]:
            step += 1
            seen.append([batch.tolist(), float(torch.rand(()))])
            if step == killed_at:
                ckptcore.save_checkpointables(run, state, overwrite=True)
                (directory / name / "first").write_text(json.dumps(step))
                (directory / name / "warnings").write_text(json.dumps(count.found))
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break
    (directory / name / "seen").write_text(json.dumps(seen))


def process(name: str, directory: Path, *, killed_at: int | None) -> None:
    """Train in a new process, and wait for its end."""
    child = os.fork()
    if child == 0:
        try:
            train(name, directory, killed_at=killed_at)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if killed_at is None else -signal.SIGKILL), (name, status)


def main(directory: Path) -> None:
    """Compare runs with each loader."""
    warnings.simplefilter("ignore", UserWarning)  # torchdata calls deprecated functions of PyTorch
    torch.set_num_threads(1)  # forked processes must not have other threads
    for name in LOADERS:
        (directory / name).mkdir()
        process(name, directory, killed_at=None)
        whole = json.loads((directory / name / "seen").read_text())
        for step in KILLED_AT:
            process(name, directory, killed_at=step)
            process(name, directory, killed_at=None)
            resumed = json.loads((directory / name / "seen").read_text())
            assert len(resumed) == STEPS - step, name
            batches, numbers = (
                [batch[part] for batch in resumed] == [batch[part] for batch in whole[step:]] for part in (0, 1)
            )
            logged = json.loads((directory / name / "warnings").read_text())
            print(f"{name} {step}: {batches} {numbers} {logged}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
