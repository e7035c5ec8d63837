"""Save every few steps in the background, and resume from the newest checkpoint after a stop."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptcore
from ckptcore.results import SaveHandle

SAVE_EVERY = 10


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint in a directory. Only committed checkpoints have their final name."""
    steps = sorted(directory.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return steps[-1] if steps else None


def train(directory: Path, steps: int) -> float:
    """Train up to a number of steps, from the newest checkpoint. Return the last loss."""
    torch.manual_seed(0)
    features = torch.randn(256, 8)
    wanted = features @ torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    if (location := newest(directory)) is not None:
        state = ckptcore.load_into(location, state)
        print(f"resumed from {location.name}")

    saving: SaveHandle | None = None
    loss = torch.tensor(0.0)
    for step in range(state["step"] + 1, steps + 1):
        loss = (model(features) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            # The call returns once the state is copied. The next step may change the model while the copy is written.
            # An error of the previous save is raised here.
            saving = ckptcore.save_async(directory / f"step_{step}", {**state, "step": step})
    if saving is not None:
        saving.result()  # wait until the last save is committed
    return float(loss.detach())


def main(directory: Path) -> None:
    directory = directory / "run"
    first = train(directory, steps=25)  # stops between two checkpoints
    resumed = train(directory, steps=40)
    print(f"loss {first:.4f} after 25 steps, {resumed:.4f} after 40")

    straight = train(directory.with_name("straight"), steps=40)
    assert resumed == straight, "a resumed run gives the very numbers of one that never stopped"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
