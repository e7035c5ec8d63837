"""The trainer in PyTorch, which saves every tenth step: ``python -m examples.handover.in_torch DIRECTORY``."""

# mypy: allow-untyped-calls

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

import ckptcore
from ckptcore.policies import FixedInterval
from examples.handover.digits import LEARNING_RATE, SAVE_EVERY, SHAPES, STEPS, batches


class Training:
    """A network, its optimizer and its data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # threads would wait for each other longer than they compute
        width, inputs = SHAPES["hidden.weight"]
        outputs, _ = SHAPES["output.weight"]
        self.model = nn.ModuleDict({"hidden": nn.Linear(inputs, width), "output": nn.Linear(width, outputs)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.data = batches()

    def losses(self) -> Iterator[float]:
        """Train. Yield the loss of each step after the step."""
        for batch in self.data:
            hidden = torch.relu(self.model["hidden"](torch.from_numpy(batch["image"])))
            loss = nn.functional.cross_entropy(self.model["output"](hidden), torch.from_numpy(batch["label"]))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield float(loss.detach())


def main(directory: str) -> None:
    """Train in a directory. This program never resumes: it is killed."""
    training = Training()
    with ckptcore.Checkpointer(directory, save_policy=FixedInterval(SAVE_EVERY)) as checkpointer:
        for step, loss in zip(range(1, STEPS + 1), training.losses(), strict=False):
            print(step, loss, flush=True)
            checkpointer.save_checkpointables(
                step,
                {"model": training.model, "optimizer": training.optimizer, "data": training.data},
                metrics={"loss": loss},
            )


if __name__ == "__main__":
    main(sys.argv[1])
