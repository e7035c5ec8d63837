"""Optimizers and quantised models of torchao resume exactly, even in new objects that have no state yet."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim  # type: ignore[import-untyped]  # has no types
from ckptcore_torch.named_optimizers import NamedOptimizer
from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-untyped]  # has no types
from torchao.quantization import (  # type: ignore[import-untyped]  # has no types
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import ckptcore
from ckptcore.errors import TreeMismatchError

Job = tuple[Any, torch.optim.Optimizer]

OPTIMIZERS = {
    name: getattr(torchao.optim, name)
    for name in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
}
LAYOUTS = ("zarr3", "ocdbt", "dcp", "safetensors")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch.compile, which takes a minute. The optimizers of torchao compute the same results without it."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function)


def job(optimizer: Any, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).to(dtype)
    return model, optimizer(model.parameters(), lr=0.01, **options)


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(2):
        inputs = torch.randn(4, 64, generator=generator).to(model[0].weight.dtype)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


QUICK = (
    ("Adam8bit", torch.float32),
    ("AdamW4bit", torch.float32),
    ("AdamFp8", torch.float32),
    ("AdamW8bit", torch.bfloat16),
)
"""Cases that are not marked as slow: one of each kind of state, and one with parameters of another dtype."""

CASES = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else [pytest.mark.slow], id=f"{name}-{dtype}")
    for name in OPTIMIZERS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.brings("8-bit, 4-bit and fp8 optimizers", "torchao", "same")
def test_an_optimizer_continues_as_with_torch_save(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = job(OPTIMIZERS[name], 0, dtype)
    train(model, optimizer, 1)
    layout = LAYOUTS[list(OPTIMIZERS).index(name) % 4]
    ckptcore.save(tmp_path / "numbers", {"m": model, "o": optimizer}, layout=layout)
    ckptcore.save(tmp_path / "names", {"m": model, "o": NamedOptimizer(model, optimizer)}, layout=layout)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    expected = train(model, optimizer, 2)
    model, optimizer = job(OPTIMIZERS[name], 5, dtype)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    assert train(model, optimizer, 2) == expected
    for place in ("numbers", "names"):
        for is_used in (False, True):
            model, optimizer = job(OPTIMIZERS[name], 7, dtype)
            if is_used:
                train(model, optimizer, 3)
            held = optimizer.state[model[0].weight]["exp_avg"] if is_used else None
            target = optimizer if place == "numbers" else NamedOptimizer(model, optimizer)
            ckptcore.load_into(tmp_path / place, {"m": model, "o": target})
            slot: Any = optimizer.state[model[0].weight]["exp_avg"]
            assert type(slot).__name__.startswith("OptimState") and held in (None, slot)
            assert type(optimizer.state[model[2].bias]["exp_avg"]) is torch.Tensor
            assert train(model, optimizer, 2) == expected
    state: Any = ckptcore.load(tmp_path / "numbers")["o"]["state"][0]["exp_avg"]
    assert {"codes", "scale", "__parts__"} <= state.keys()


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (torchao.optim.Adam8bit, {"block_size": 128}, r"^o/state\[0\]/exp_avg: scale: float32\[64\] is requested"),
        (torchao.optim.Adam4bit, {}, r"^o/state\[0\]/exp_avg: type: OptimState4bit is requested, OptimState8bit is"),
        (torchao.optim.AdamFp8, {}, r"^o/state\[0\]/exp_avg: type: OptimStateFp8 is requested"),
        (torchao.optim.Adam8bit, {"block_size": 100_000}, "has a plain tensor for a parameter of the shape"),
        (torch.optim.Adam, {}, "exp_avg is stored as the parts of a OptimState8bit, and this Adam has none"),
    ],
)
@pytest.mark.brings("states of another block size or kind", "torchao", "refused")
def test_another_optimizer_is_refused_before_anything_changes(
    optimizer: Any, options: Any, message: str, tmp_path: Path
) -> None:
    saved = job(torchao.optim.Adam8bit, 0)
    train(*saved, 1)
    ckptcore.save(tmp_path / "c", {"m": saved[0], "o": saved[1]})
    model, other = job(optimizer, 7, **options)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(TreeMismatchError, match=message):
        ckptcore.load_into(tmp_path / "c", {"m": model, "o": other})
    assert all(map(torch.equal, before, model.parameters())) and not other.state


def test_an_optimizer_of_unknown_tensors_loads_after_a_step(tmp_path: Path) -> None:
    """The error gives this remedy: one step creates the tensors, and the load replaces all values that it changed."""

    class Own(torch.optim.Optimizer):
        """An optimizer that stores its moments in 8 bits."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
            for group in self.param_groups:
                for parameter in group["params"]:
                    slots = self.state[parameter]
                    if not slots:
                        slots["moment"] = OptimState8bit.zeros(parameter.shape, True, 8)
                    moment = slots["moment"].dequantize().lerp(parameter.grad, 0.1)
                    slots["moment"].copy_(moment)
                    parameter.sub_(moment, alpha=group["lr"])

    model, optimizer = job(Own, 0)
    train(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"m": model, "o": optimizer})
    expected = train(model, optimizer, 2)
    model, optimizer = job(Own, 7)
    with pytest.raises(TreeMismatchError, match="this Own has none: .* make one step, and load the model"):
        ckptcore.load_into(tmp_path / "c", {"m": model, "o": optimizer})
    train(model, optimizer, 3)
    ckptcore.load_into(tmp_path / "c", {"m": model, "o": optimizer})
    assert train(model, optimizer, 2) == expected


CONFIGS: dict[str, Callable[[], Any]] = {
    "int8 weights": Int8WeightOnlyConfig,
    "int8 weights and activations": Int8DynamicActivationInt8WeightConfig,
    "float8 weights": Float8WeightOnlyConfig,
}


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in CONFIGS for layout in ("zarr3", "dcp")])
@pytest.mark.brings("int8 and float8 weights", "torchao", "same")
def test_a_quantised_model_gets_its_weights(name: str, layout: str, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).to(torch.bfloat16)
        quantize_(model, CONFIGS[name]())
        return model

    model, target = make(0), make(1)
    weights = [target[0].weight, target[1].weight]
    ckptcore.save(tmp_path / "c", model, layout=layout)
    ckptcore.load_into(tmp_path / "c", target)
    assert weights[0] is target[0].weight and weights[1] is target[1].weight
    again = make(2)
    again.load_state_dict(ckptcore.load(tmp_path / "c", make(3)))
    names, _ = model[0].weight.__tensor_flatten__()
    for loaded in (target, again):
        for layer, original in zip(loaded, model, strict=True):
            for part in names:
                held, expected = getattr(layer.weight, part), getattr(original.weight, part)
                assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8)), part
            assert torch.equal(layer.bias, original.bias)
