"""Weights of PyTorch modules and of JAX are published by their usual handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import select
from plugins.versions.tests.published import CONTEXT, base_of, load, location, publisher

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


class _Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is imported if it is installed
    """An embedding, tied to the output, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8, dtype=torch.bfloat16)
        self.output = torch.nn.Linear(8, 20, bias=False, dtype=torch.bfloat16)
        self.output.weight = self.embedding.weight
        self.lora_a = torch.nn.Linear(8, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_module_that_is_trained_meanwhile(background: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Model()
    expected = []
    with publisher(str(tmp_path)) as versions:
        for number in range(1, 4):
            versions.publish(number, model, background=background)
            expected.append({name: value.clone() for name, value in model.state_dict().items()})
            with torch.no_grad():
                model.embedding.weight[number] += 1
                model.lora_a.weight *= 2
    for number, state in enumerate(expected, 1):
        target = _Model()
        ckptcore.load_into(location(str(tmp_path), number), target, context=CONTEXT)
        for name, value in target.state_dict().items():
            assert torch.equal(value, state[name])
    assert [base_of(str(tmp_path), number) for number in (1, 2, 3)] == [None, 1, 2]


def test_adapters_of_a_state_dict(tmp_path: Path) -> None:
    model = _Model()
    with publisher(str(tmp_path), select=select.glob("lora_*")) as versions:
        versions.publish(1, model.state_dict())
        with torch.no_grad():
            model.lora_a.bias += 1
        versions.publish(2, model.state_dict())
    loaded = load(str(tmp_path), 2)
    assert loaded.keys() == {"lora_a.weight", "lora_a.bias"}
    assert torch.equal(torch.as_tensor(loaded["lora_a.bias"]), model.lora_a.bias)
    assert base_of(str(tmp_path), 2) == 1


def test_weights_of_jax(tmp_path: Path) -> None:
    def params(number: int) -> Any:
        kernel = jax.numpy.arange(48, dtype=jax.numpy.bfloat16).reshape(6, 8)
        return {"dense": {"kernel": kernel.at[0, number].set(-1.0), "bias": jax.numpy.zeros(8)}}

    with publisher(str(tmp_path)) as versions:
        for number in (1, 2, 3):
            versions.publish(number, params(number), background=True)
    for number in (1, 2, 3):
        loaded = ckptcore.load(location(str(tmp_path), number), params(0), context=CONTEXT)
        assert isinstance(loaded["dense"]["kernel"], jax.Array)
        assert np.array_equal(loaded["dense"]["kernel"], params(number)["dense"]["kernel"])
    assert base_of(str(tmp_path), 3) == 2
