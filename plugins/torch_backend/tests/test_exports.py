"""Saves of a training state with an export of the weights of the model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptcore
from ckptcore import Export, StepExport, StepExports, WithExports


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def _expect_weights(path: Path, expected: dict[str, Any]) -> None:
    exported = safetensors.torch.load_file(path / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_export_of_weights_next_to_a_tree(begin: Any, tmp_path: Path) -> None:
    model, optimizer = _trained()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {"model": model, "optimizer": optimizer, "step": 1}
    handle = begin(tmp_path / "c", state, strategy=WithExports([Export(location=tmp_path / "w", subtree="model")]))
    if handle is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        handle.result()
    _expect_weights(tmp_path / "w", expected)
    model, optimizer = _trained()
    ckptcore.load_into(tmp_path / "c", {"model": model, "optimizer": optimizer, "step": 0})
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)


def test_export_of_weights_of_the_steps_of_a_run(tmp_path: Path) -> None:
    model, optimizer = _trained()
    weights = StepExport(directory=tmp_path / "weights", subtree="model", every=2)
    with ckptcore.Checkpointer(tmp_path / "run", strategy=StepExports([weights])) as checkpointer:
        for step in (1, 2, 3):
            optimizer.step()
            checkpointer.save_checkpointables(step, {"model": model, "optimizer": optimizer})
            if step == 2:
                expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reader = ckptcore.CheckpointReader(tmp_path / "weights")
    assert reader.steps == (2,)
    _expect_weights(next(path for path in (tmp_path / "weights").iterdir() if path.name[0] != "."), expected)
