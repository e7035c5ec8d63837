"""Train on the digits of scikit-learn with PyTorch, save in the background, and resume bit for bit.

    python examples/train_torch.py --directory runs/torch

Stop the program at any time, also with `kill -9`, and start it again. It resumes from the last committed step, and
prints the same losses as a run that was not stopped.
"""

# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckptcore
from ckptcore.policies import AnyPreservation, AnySave, BestN, FixedInterval, LatestN, PreemptionCheckpointing


def load_data(batch_size: int) -> StatefulDataLoader[tuple[torch.Tensor, ...]]:
    """Return batches of images, shuffled in each epoch. The position of a `StatefulDataLoader` can be saved."""
    digits = load_digits()
    images = torch.from_numpy(digits.images.reshape(-1, 64).astype(np.float32) / 16)
    dataset = TensorDataset(images, torch.from_numpy(digits.target))
    # The order and the loader have generators of their own; the loader draws a number for each iteration. Otherwise
    # both would draw from the global generator, also when a run resumes, and dropout would get other numbers.
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():  # torchdata calls a deprecated function of PyTorch
        warnings.simplefilter("ignore", UserWarning)
        return StatefulDataLoader(dataset, batch_size, sampler=order, generator=torch.Generator())


def epoch_after_epoch(loader: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield batches without end."""
    while True:
        yield from loader


def train(directory: str, *, steps: int, save_every: int) -> None:
    """Train up to a number of steps, from the last step of the run in the directory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = load_data(batch_size=64)
    noise = np.random.default_rng(0)

    # The next step depends on all of these. Each object is saved with its own methods, and restored in place.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "torch_rng": torch.default_generator,  # dropout draws from it
        "numpy_rng": noise,
    }
    with ckptcore.Checkpointer(
        directory,
        save_policy=AnySave([FixedInterval(save_every), PreemptionCheckpointing()]),  # also saves at SIGTERM
        preservation_policy=AnyPreservation([LatestN(3), BestN(1, "loss", "min")]),
        if_in_use="take over",  # only from a job that does not renew its lease
    ) as checkpointer:
        step = 0
        if checkpointer.latest is not None:
            checkpointer.load_checkpointables(into=state)  # the newest valid step
            assert checkpointer.restored_step is not None
            step = checkpointer.restored_step
            print(f"resumed from step {step}", flush=True)

        for images, labels in epoch_after_epoch(loader):
            if step >= steps or checkpointer.preempted:
                break
            step += 1
            images = images + torch.from_numpy(noise.normal(0, 0.1, images.shape).astype(np.float32))
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            value = float(loss.detach())
            print(f"step {step} loss {value:.4f} {value.hex()}", flush=True)

            # The call returns at once if the policy does not want the step, and otherwise once the state is copied. The
            # next step may change the state while the copy is written. An error of the previous save is raised here.
            checkpointer.save_checkpointables(step, state, metrics={"loss": value}, force=step == steps)
    # The `with` block has waited for the last save.


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="directory of the run, which is created or resumed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # one thread is faster for so little work
    train(options.directory, steps=options.steps, save_every=options.save_every)


if __name__ == "__main__":
    main()
