"""Save a PyTorch model and its optimizer, and load them into a new pair, in place."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import ckptcore


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of training, so that the optimizer has a state."""
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(directory: Path) -> None:
    location = directory / "torch"
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    ckptcore.save(location, {"model": model, "optimizer": optimizer, "step": 1})

    fresh_model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    fresh_optimizer = torch.optim.AdamW(fresh_model.parameters())
    restored = ckptcore.load_into(location, {"model": fresh_model, "optimizer": fresh_optimizer, "step": 0})

    for was, now in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert torch.equal(was, now)
        assert torch.equal(optimizer.state[was]["exp_avg"], fresh_optimizer.state[now]["exp_avg"])
    print(f"{location}: restored a model and its optimizer at step {restored['step']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
