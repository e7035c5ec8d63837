"""Optimizers of processes that hold different parameters of one model. Saves merge their states by
name, and loads divide the parameters in other ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests, ThreadJob
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerPart, NamedOptimizerPartHandler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptcore
from ckptcore.errors import TreeMismatchError
from ckptcore.protocols import Coordinator

HANDLER = NamedOptimizerPartHandler()
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = ("0", "1", "2", "3")


def layers(names: Sequence[str], seed: int) -> torch.nn.Module:
    """Return a module with some layers of a model, under the names of the whole model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = torch.nn.Module()
        module.layers = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    return module


def adamw(model: torch.nn.Module, rate: Any = 0.05) -> torch.optim.Optimizer:
    """Return an AdamW with two groups: weights with decay, and all other parameters without."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.8, 0.9),
    )


def train(model: Any, optimizer: torch.optim.Optimizer, count: int = 2) -> list[bytes]:
    """Train each layer by itself, so that parts and whole models get equal results. Return the bytes of parameters."""
    for number in range(count):
        optimizer.zero_grad()
        for layer in model.layers.values():
            (layer(torch.linspace(-1, 1, 6).reshape(2, 3)) - number).square().mean().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def part(
    names: Sequence[str], seed: int = 0, steps: int = 2, make: Callable[..., torch.optim.Optimizer] = adamw
) -> NamedOptimizerPart:
    model = layers(names, seed)
    optimizer = make(model)
    train(model, optimizer, steps)
    return NamedOptimizerPart(model, optimizer)


def bits(value: Any) -> Any:
    """Return a comparable form of a state."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: bits(child) for key, child in value.items()}
    return [bits(child) for child in value] if isinstance(value, list | tuple) else value


def by_name(value: NamedOptimizer) -> Any:
    return bits(HANDLER.flatten(value))


def save_parts(location: Path, values: Sequence[NamedOptimizer], layout: str = "ocdbt") -> None:
    """Save in a job with one process for each state, which merges the states."""

    def of_rank(coordinator: Coordinator) -> None:
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator), durability="none")
        ckptcore.save(location, {"o": values[coordinator.rank]}, layout=layout, context=context)

    ThreadJob(len(values)).run(of_rank)


def quiet_dcp(call: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        call()


class TestPartsConform(CheckpointableHandlerTests):
    """Conformance tests of parts of optimizers with and without steps."""

    handler = HANDLER
    examples = tuple(
        CheckpointableExample(
            f"after {used}",
            lambda: part(("0", "1")),
            lambda used=used: part(("0", "1"), 1, used),  # type: ignore[misc]  # binds the loop variable
            by_name,
        )
        for used in (0, 1)
    )


@pytest.mark.parametrize(
    "split", [(("0", "1"), ("2", "3")), (("3",), ("0", "1", "2")), (("0",), ("1",), ("2",), ("3",))]
)
@pytest.mark.parametrize("kind", [NamedOptimizer, NamedOptimizerPart])
def test_parts_are_merged_and_divided_again(kind: type[NamedOptimizer], split: Any, tmp_path: Path) -> None:
    saved = [part(("0", "1")), part(("2", "3"), seed=5)]
    save_parts(tmp_path / "c", saved)
    (expected,) = [{**first, **second} for first, second in [[by_name(value)["state"] for value in saved]]]
    whole = layers(WHOLE, 9)
    optimizer = adamw(whole, 0.7)
    ckptcore.load_into(tmp_path / "c", {"o": kind(whole, optimizer)})
    assert by_name(NamedOptimizer(whole, optimizer))["state"] == expected
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.05, 0.1), (0.05, 0.0)]
    # Load other stages from the merged parts, and from the whole optimizer that one process saves.
    ckptcore.save(tmp_path / "whole", {"o": kind(whole, optimizer)})
    for location in (tmp_path / "c", tmp_path / "whole"):
        for names in split:
            other = part(names, 7, 0)
            ckptcore.load_into(location, {"o": other})
            state = by_name(other)
            assert state["state"] == {key: slots for key, slots in expected.items() if key.split(".")[1] in names}
            assert state["param_groups"][f"layers.{names[0]}.bias"]["lr"] == 0.05
            loaded = ckptcore.load(location, {"o": part(names, 7, 0)})["o"]
            assert bits(loaded["state"]) == state["state"], "the load returned states of other parameters"


def test_groups_in_lists_with_different_parameters_are_not_merged(tmp_path: Path) -> None:
    parts = (part(("0",)), part(("1",)))
    values = [NamedOptimizer(value.model, *value.optimizers) for value in parts]
    with pytest.raises(ExceptionGroup) as caught:
        save_parts(tmp_path / "c", values)
    assert caught.group_contains(TreeMismatchError, match=r"o/param_groups\[0\]/params")


@pytest.mark.parametrize("used", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("rate", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_pipeline_stages_resume(rate: Any, used: int, tmp_path: Path) -> None:
    def stages(seed: int, count: int, rate: Any) -> list[NamedOptimizerPart]:
        def made(model: torch.nn.Module) -> torch.optim.Optimizer:
            return adamw(model, rate)

        return [part(names, seed + number, count, made) for number, names in enumerate((("0", "1"), ("2", "3")))]

    saved = stages(0, 3, rate)
    save_parts(tmp_path / "c", saved)
    other = torch.tensor(0.5) if isinstance(rate, torch.Tensor) else 0.5
    for value, target in zip(saved, stages(3, used, other), strict=True):
        ckptcore.load_into(tmp_path / "c", {"o": target})
        target.model.load_state_dict(value.model.state_dict())
        assert train(target.model, target.optimizers[0]) == train(value.model, value.optimizers[0])


def test_groups_saved_with_one_tensor_rate_load_into_separate_tensors(tmp_path: Path) -> None:
    """PyTorch changes tensor learning rates in place, so groups must not share one tensor."""
    model, other = layers(("0",), 0), layers(("0",), 1)
    together = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.2))
    ckptcore.save(tmp_path / "c", {"o": NamedOptimizerPart(model, together)})
    optimizer = torch.optim.AdamW(
        [{"params": [parameter], "lr": torch.tensor(0.1)} for parameter in other.parameters()], lr=torch.tensor(0.1)
    )
    with_a_number = torch.optim.AdamW([{"params": [parameter]} for parameter in other.parameters()], lr=0.1)
    for target in (optimizer, with_a_number):
        ckptcore.load_into(tmp_path / "c", {"o": NamedOptimizerPart(other, target)})
        rates: Any = [group["lr"] for group in target.param_groups]
        assert [float(rate) for rate in rates] == [float(torch.tensor(0.2))] * 2 and rates[0] is not rates[1]


@pytest.mark.parametrize("rates", [(0.1, 0.2), (torch.tensor(0.1), torch.tensor(0.2))], ids=["numbers", "tensors"])
def test_errors_name_the_parameters_and_values_of_stages_that_disagree(rates: Any, tmp_path: Path) -> None:
    made = [lambda model, rate=rate: adamw(model, rate) for rate in rates]  # type: ignore[misc]  # binds `rate`
    save_parts(tmp_path / "c", [part((str(number),), make=make) for number, make in enumerate(made)])
    whole = layers(("0", "1"), 9)
    optimizer = adamw(whole, 0.7 if isinstance(rates[0], float) else torch.tensor(0.7))
    message = r"layers\.0\.weight and layers\.1\.weight were saved with different options \(lr 0\.1\d* and 0\.2\d*\)"
    with pytest.raises(ckptcore.errors.CheckpointError, match=message):
        ckptcore.load_into(tmp_path / "c", {"o": NamedOptimizer(whole, optimizer)})
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.7)
    assert not optimizer.state
    apart = part(("1",), 9, 0)
    ckptcore.load_into(tmp_path / "c", {"o": apart})
    assert float(apart.optimizers[0].param_groups[0]["lr"]) == float(rates[1])


def test_parameters_that_a_part_lacks_are_named(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"o": part(("0", "1"))})
    with pytest.raises(TreeMismatchError, match=r"layers\.2\.weight is in no stored group"):
        ckptcore.load_into(tmp_path / "c", {"o": part(("1", "2"), 1, 0)})
    with pytest.raises(TreeMismatchError, match=r"layers\.0\.weight is stored but is not a parameter"):
        target = part(("1",), 1, 0)
        ckptcore.load_into(tmp_path / "c", {"o": NamedOptimizer(target.model, *target.optimizers)})


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_part_loads_its_parameters_from_a_state_of_torch(form: str, tmp_path: Path) -> None:
    value = part(WHOLE)
    state = get_optimizer_state_dict(value.model, value.optimizers, options=FLAT if form == "flat" else None)
    quiet_dcp(lambda: dcp.save({"o": state}, checkpoint_id=tmp_path / "c"))
    expected = by_name(value)
    for used in (0, 1):
        target = part(("1", "2"), 3, used)
        ckptcore.load_into(tmp_path / "c", {"o": target})
        assert by_name(target) == {
            section: {key: held for key, held in of.items() if key.split(".")[1] in ("1", "2")}
            for section, of in expected.items()
        }


def test_torch_loads_merged_parts(tmp_path: Path) -> None:
    saved = [part(("0", "1")), part(("2", "3"), seed=5)]
    save_parts(tmp_path / "c", saved, "dcp")
    whole = part(WHOLE, 9, 1, lambda model: adamw(model, 0.7))
    target = {"o": get_optimizer_state_dict(whole.model, whole.optimizers, options=FLAT)}
    quiet_dcp(lambda: dcp.load(target, checkpoint_id=tmp_path / "c"))
    set_optimizer_state_dict(whole.model, whole.optimizers, target["o"], options=FLAT)
    states = [by_name(value) for value in saved]
    assert by_name(whole) == {section: {**states[0][section], **states[1][section]} for section in states[0]}


def test_saved_part_equals_the_flat_state_of_torch() -> None:
    value = part(("0", "1"))
    state: Any = HANDLER.flatten(value)
    flat = {
        f"{section}.{name}.{key}": held
        for section, of in state.items()
        for name, slots in of.items()
        for key, held in slots.items()
    }
    assert bits(flat) == bits(get_optimizer_state_dict(value.model, value.optimizers, options=FLAT))


@pytest.mark.parametrize(
    "stored",
    [
        {"state": {}, "param_groups": {"layers.0.weight": 3, "layers.0.bias": {}}},
        {"state": {}, "param_groups": {5: {}, "layers.0.weight": {}, "layers.0.bias": {}}},
        {"state": [1], "param_groups": {"layers.0.weight": {}, "layers.0.bias": {}}},
        {"param_groups": {"layers.0.weight": {"params": [1]}, "layers.0.bias": {}}},
        {"state": {}, "param_groups": {}},
        {"state": {}, "param_groups": 3},
        {"state": {}, "param_groups": [5, {"params": 5}, {"params": ["x", ["y"]]}]},
        {},
        {"state.other.a": 1},
        {"state.other" + ".a" * 5000: 1, "param_groups.layers.0.bias.lr": 1},
        {"state.layers.0.weight.a": 1, "state.layers.0.weight.a.b": 2},
        {5: 3},
    ],
)
@pytest.mark.parametrize("kind", [NamedOptimizer, NamedOptimizerPart])
def test_tree_that_is_not_an_optimizer_state_is_refused(
    kind: type[NamedOptimizer], stored: Any, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "c", {"o": stored})
    made = part(("0",), 1, 0)
    with pytest.raises(TreeMismatchError):
        ckptcore.load_into(tmp_path / "c", {"o": kind(made.model, *made.optimizers)})
