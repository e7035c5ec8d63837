"""Optimizer states by names of parameters. They equal those of torch.distributed.checkpoint.state_dict
bit for bit, and each library loads states of the other.
"""

from __future__ import annotations

import copy
import cProfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerHandler
from packaging.version import Version
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DataParallel

import ckptcore
from ckptcore.errors import NameCollisionError, TargetUndefinedError, TreeMismatchError, UnsupportedLeafError

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
HANDLER = NamedOptimizerHandler()


class Network(torch.nn.Module):
    """A model with a tied weight, a frozen parameter, and a parameter without a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = torch.nn.Linear(3, 3)
            self.last = torch.nn.Linear(3, 3)
            self.unused = torch.nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.first(inputs).tanh()) * self.frozen
        return outputs


def steps(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], count: int) -> list[bytes]:
    """Train, and return the bytes of every parameter after each step."""
    parameters = []
    for number in range(count):

        def loss(number: int = number) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            total: torch.Tensor = (model(torch.linspace(-1, 1, 6).reshape(2, 3)) - number).square().mean()
            total.backward()  # type: ignore[no-untyped-call]  # has no annotations
            return total

        for optimizer in optimizers:
            optimizer.step(loss)  # type: ignore[arg-type]  # annotated with a tensor in LBFGS, and with a float in others
        parameters += [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return parameters


def bits(value: Any) -> Any:
    """Return a comparable form of a state: the bytes of tensors, with their dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(child) for key, child in value.items()}
    return [bits(child) for child in value] if isinstance(value, list | tuple) else value


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return three groups: weights with other options than the default, biases, and a frozen parameter."""
    named = dict(model.named_parameters())
    weights = [parameter for name, parameter in named.items() if name.endswith("weight")]
    biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
    frozen = [parameter for name, parameter in named.items() if name.endswith("frozen")]
    return [{"params": weights, "lr": 0.05, "betas": (0.8, 0.9)}, {"params": biases}, {"params": frozen}]


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "groups": lambda model: torch.optim.AdamW(groups_of(model), lr=0.1),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "tensor rate": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "LBFGS": lambda model: torch.optim.LBFGS(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1, max_iter=3, history_size=3
    ),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
}
WITH_STATE = [name for name in OPTIMIZERS if name != "LBFGS"]


def example(name: str, seed: int, count: int) -> NamedOptimizer:
    model = Network(seed)
    optimizer = OPTIMIZERS[name](model)
    steps(model, [optimizer], count)
    return NamedOptimizer(model, optimizer)


class TestNamedOptimizersConform(CheckpointableHandlerTests):
    """Conformance tests of named optimizers with and without steps."""

    handler = HANDLER
    examples = tuple(
        CheckpointableExample(
            f"{name} after {used}",
            lambda name=name: example(name, 0, 2),  # type: ignore[misc]  # binds the loop variable
            lambda name=name, used=used: example(name, 1, used),  # type: ignore[misc]
            lambda value: bits(HANDLER.flatten(value)),
        )
        for name, used in (("groups", 0), ("momentum", 1), ("LBFGS", 1))
    )


@pytest.mark.parametrize("used", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_resumes(name: str, used: int, tmp_path: Path) -> None:
    model, other = Network(0), Network(1)
    optimizer, its = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    steps(model, [optimizer], 3)
    steps(other, [its], used)
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": NamedOptimizer(model, optimizer)})
    before = bits(other.state_dict())
    ckptcore.load_into(tmp_path / "c", {"model": ckptcore.PLACEHOLDER, "optimizer": NamedOptimizer(other, its)})
    assert bits(other.state_dict()) == before, "loading an optimizer changes no parameter"
    assert bits(its.state_dict()) == bits(optimizer.state_dict())
    ckptcore.load_into(tmp_path / "c", {"model": other, "optimizer": ckptcore.PLACEHOLDER})
    assert steps(other, [its], 3) == steps(model, [optimizer], 3)


@pytest.mark.parametrize("name", WITH_STATE)
def test_saved_state_equals_the_state_of_torch(name: str) -> None:
    value = example(name, 0, 2)
    expected = get_optimizer_state_dict(value.model, value.optimizers)
    assert bits(HANDLER.flatten(value)) == bits(expected)


def quiet_dcp(call: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        call()


@pytest.mark.parametrize("name", ["groups", "momentum"])
def test_torch_loads_our_state(name: str, tmp_path: Path) -> None:
    value, other = example(name, 0, 2), example(name, 1, 1)
    ckptcore.save(tmp_path / "c", {"optimizer": value}, layout="dcp")
    target = {"optimizer": get_optimizer_state_dict(other.model, other.optimizers)}
    quiet_dcp(lambda: dcp.load(target, checkpoint_id=tmp_path / "c"))
    assert bits(target["optimizer"]) == bits(HANDLER.flatten(value))
    if Version(torch.__version__) < Version("2.10"):
        return  # older versions ignore strict=False, and require a state of the unused parameter
    # With strict=True, torch requires a state of each parameter that takes gradients.
    loose = StateDictOptions(strict=False)
    set_optimizer_state_dict(other.model, other.optimizers, target["optimizer"], options=loose)
    expected: Any = HANDLER.flatten(value)
    loaded: Any = HANDLER.flatten(other)
    assert bits(loaded["state"]["first.weight"]) == bits(expected["state"]["first.weight"])


@pytest.mark.brings("state of `get_optimizer_state_dict`, nested or flattened", "torch", "same")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("used", [0, 1], ids=["new", "used"])
@pytest.mark.parametrize("name", ["groups", "momentum"])
def test_checkpoints_of_torch_load(name: str, used: int, flat: bool, tmp_path: Path) -> None:
    value, other = example(name, 0, 2), example(name, 1, used)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"optimizer": get_optimizer_state_dict(value.model, value.optimizers, options=options)}
    quiet_dcp(lambda: dcp.save(state, checkpoint_id=tmp_path / "c"))
    ckptcore.load_into(tmp_path / "c", {"optimizer": other})
    assert bits(HANDLER.flatten(other)) == bits(HANDLER.flatten(value))
    loaded = ckptcore.load(tmp_path / "c", {"optimizer": other})
    assert bits(loaded["optimizer"]) == bits(state["optimizer"])


@pytest.mark.brings("`NamedOptimizer` with parameters in another order and other groups", "torch", "same")
def test_parameters_are_found_by_name_in_another_order_and_in_other_groups(tmp_path: Path) -> None:
    model, other = Network(0), Network(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.2))
    steps(model, [optimizer], 2)
    backwards = list(other.parameters())[::-1]
    its = torch.optim.AdamW([{"params": backwards[:3]}, {"params": backwards[3:]}], lr=torch.tensor(0.1))
    ckptcore.save(tmp_path / "c", NamedOptimizer(model, optimizer))
    ckptcore.load_into(tmp_path / "c", NamedOptimizer(other, its))
    rates: Any = [group["lr"] for group in its.param_groups]
    assert torch.equal(rates[0], torch.tensor(0.2)) and torch.equal(rates[1], rates[0])
    assert rates[0] is not rates[1], "the groups share a tensor"
    state: Any = HANDLER.flatten(NamedOptimizer(model, optimizer))
    loaded: Any = HANDLER.flatten(NamedOptimizer(other, its))
    assert bits(loaded["state"]) == bits({name: state["state"][name] for name in loaded["state"]})
    assert loaded["state"].keys() == state["state"].keys()
    ckptcore.save(tmp_path / "back", NamedOptimizer(other, its))
    steps(model, [optimizer], 1)
    ckptcore.load_into(tmp_path / "back", NamedOptimizer(model, optimizer))
    assert bits(HANDLER.flatten(NamedOptimizer(model, optimizer))) == bits(state)


@pytest.mark.brings("`NamedOptimizer` with one group of two that had other options", "torch", "refused")
def test_groups_that_were_saved_with_other_options_are_not_put_together(tmp_path: Path) -> None:
    value, other = example("groups", 0, 2), Network(1)
    its = torch.optim.AdamW(other.parameters(), lr=0.7)
    ckptcore.save(tmp_path / "c", value)
    with pytest.raises(
        TreeMismatchError, match=r"frozen and first.weight .*different options \(betas .*, lr 0.1 and 0.05\)"
    ):
        ckptcore.load_into(tmp_path / "c", NamedOptimizer(other, its))
    assert not its.state and its.param_groups[0]["lr"] == 0.7


def test_wrapped_and_plain_models_load_each_other(tmp_path: Path) -> None:
    model, other = Network(0), DataParallel(Network(1))
    optimizer, its = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters(), lr=0.5)
    steps(model, [optimizer], 2)
    ckptcore.save(tmp_path / "c", {"m": model, "o": NamedOptimizer(model, optimizer)})
    ckptcore.load_into(tmp_path / "c", {"m": other, "o": NamedOptimizer(other, its)})
    assert steps(other, [its], 2) == steps(model, [optimizer], 2)


@pytest.mark.brings("`NamedOptimizer` of several optimizers", "torch", "same")
def test_several_optimizers_are_one_state_as_in_torch(tmp_path: Path) -> None:
    def make(seed: int, count: int) -> NamedOptimizer:
        model = Network(seed)
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        optimizers = [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.2)]
        steps(model, optimizers, count)
        return NamedOptimizer(model, *optimizers)

    value, other = make(0, 2), make(1, 0)
    assert bits(HANDLER.flatten(value)) == bits(get_optimizer_state_dict(value.model, value.optimizers))
    ckptcore.save(tmp_path / "c", value)
    ckptcore.load_into(tmp_path / "c", other)
    assert bits(HANDLER.flatten(other)) == bits(HANDLER.flatten(value))
    with pytest.raises(TreeMismatchError, match=r"first\.bias is stored but is not a parameter.*in one NamedOptimizer"):
        ckptcore.load_into(tmp_path / "c", NamedOptimizer(other.model, other.optimizers[0]))
    with pytest.raises(NameCollisionError, match=r"'frozen' belongs to two optimizers"):
        HANDLER.flatten(NamedOptimizer(value.model, *value.optimizers, torch.optim.SGD(value.model.parameters())))


@pytest.mark.brings("optimizer with states of another dtype than their parameters", "torch", "same")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("named", [False, True], ids=["by number", "by name"])
def test_state_of_another_dtype_than_its_parameter_is_restored_exactly(
    named: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """PyTorch would cast the state to the dtype of the parameter, even inside lists and dicts."""

    def make(count: int) -> Any:
        model = torch.nn.Linear(2, 2, bias=False).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if count:
            exact = torch.tensor([[2**24 + 1, 3], [5, 2**20 + 1]], dtype=dtype)
            nested = {"deep": [exact + 2, {"deeper": exact + 3}]}
            optimizer.state[model.weight] = {"moment": exact, "history": [exact, exact + 1], "nested": nested}
        return optimizer, NamedOptimizer(model, optimizer) if named else optimizer

    optimizer, value = make(1)
    other, target = make(0)
    ckptcore.save(tmp_path / "c", value)
    ckptcore.load_into(tmp_path / "c", target)
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.brings("state of a `NamedOptimizer`, loaded into the optimizer itself", "torch", "refused")
def test_a_state_by_numbers_loads_and_the_other_way_round_is_refused(tmp_path: Path) -> None:
    value, other = example("groups", 0, 2), example("groups", 1, 0)
    ckptcore.save(tmp_path / "numbers", value.optimizers[0])
    ckptcore.load_into(tmp_path / "numbers", other)
    assert bits(HANDLER.flatten(other)) == bits(HANDLER.flatten(value))
    ckptcore.save(tmp_path / "names", value)
    with pytest.raises(TreeMismatchError, match=r"'first\.weight'.*NamedOptimizer\(model, optimizer\)"):
        ckptcore.load_into(tmp_path / "names", other.optimizers[0])


@pytest.mark.brings("`NamedOptimizer` of tied parameters", "torch", "same")
def test_a_tied_parameter_is_found_by_any_of_its_names() -> None:
    value, other = example("AdamW", 0, 2), example("AdamW", 1, 0)
    state: Any = copy.deepcopy(HANDLER.flatten(value))
    state["state"]["last.weight"] = state["state"].pop("first.weight")
    names = state["param_groups"][0]["params"]
    names[names.index("first.weight")] = "last.weight"
    HANDLER.restore(other, state)
    assert bits(HANDLER.flatten(other)) == bits(HANDLER.flatten(value))
    names.append("first.weight")
    with pytest.raises(TreeMismatchError, match=r"first\.weight is stored twice"):
        HANDLER.restore(other, state)


def test_errors_name_parameters_that_only_the_checkpoint_or_the_target_has(tmp_path: Path) -> None:
    value = example("AdamW", 0, 2)
    ckptcore.save(tmp_path / "c", {"o": value})
    grown = Network(1)
    grown.added = torch.nn.Linear(1, 1)
    with pytest.raises(TreeMismatchError, match=r"added\.weight is in no stored group; added\.bias is"):
        ckptcore.load_into(tmp_path / "c", {"o": NamedOptimizer(grown, torch.optim.AdamW(grown.parameters()))})
    part = torch.optim.AdamW(grown.first.parameters())
    with pytest.raises(TreeMismatchError, match=r"unused\.bias is stored but is not a parameter"):
        ckptcore.load_into(tmp_path / "c", {"o": NamedOptimizer(grown, part)})
    state = {
        "o": get_optimizer_state_dict(
            value.model, value.optimizers[0], options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
    }
    ckptcore.save(tmp_path / "flat", state)
    with pytest.raises(TreeMismatchError, match=r"belongs to no parameter of the optimizer"):
        ckptcore.load_into(tmp_path / "flat", {"o": NamedOptimizer(grown, part)})


def test_parameters_without_a_name_are_refused(tmp_path: Path) -> None:
    model = Network(0)
    stray = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [torch.nn.Parameter(torch.ones(7))]}])
    with pytest.raises(UnsupportedLeafError, match=r"parameter 0 of group 1 of the SGD, with the shape \(7,\)"):
        ckptcore.save(tmp_path / "c", {"o": NamedOptimizer(model, stray)})
    for optimizers in ((), (model,)):
        with pytest.raises(TypeError, match=r"takes torch\.optim\.Optimizer objects"):
            NamedOptimizer(model, *optimizers)  # type: ignore[arg-type]


def test_state_without_a_parameter_is_saved_and_loaded() -> None:
    value, other = example("momentum", 0, 2), example("momentum", 1, 0)
    value.optimizers[0].state["all"] = {"count": torch.tensor(3)}  # type: ignore[index]  # a string as key
    HANDLER.restore(other, copy.deepcopy(HANDLER.flatten(value)))
    assert bits(HANDLER.flatten(other)) == bits(HANDLER.flatten(value))
    with pytest.raises(UnsupportedLeafError, match="'all', which is not the name of a parameter"):
        rest = torch.nn.Linear(1, 1)
        joined = torch.nn.ModuleList([value.model, rest])
        HANDLER.flatten(NamedOptimizer(joined, *value.optimizers, torch.optim.SGD(rest.parameters())))
    value.optimizers[0].state["first.weight"] = {}  # type: ignore[index]  # a string as key
    with pytest.raises(NameCollisionError, match=r"a state with the key 'first\.weight'"):
        HANDLER.flatten(value)


@pytest.mark.parametrize(
    "stored",
    [
        {"state": {}, "param_groups": 3},
        {"state": [1], "param_groups": []},
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": {}, "param_groups": [5]},
        {},
        {"state.first.weight.a": 1, "state.first.weight.a.b": 2, "param_groups.first.weight.lr": 0.1},
        {"state.first.weight.a.b": 1, "state.first.weight.a": 2},
        {"state.": 1},
        {"state.first.weight" + ".a" * 5000: 1},
        {5: 3},
    ],
)
def test_tree_that_is_not_an_optimizer_state_is_refused(stored: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"o": stored})
    for target in (example("AdamW", 0, 0), example("AdamW", 0, 0).optimizers[0]):
        with pytest.raises(TreeMismatchError):
            ckptcore.load_into(tmp_path / "c", {"o": target})


def test_tensor_learning_rates_are_compared_before_the_target_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": torch.tensor(0.1)}, {"params": [model.bias], "lr": torch.tensor(0.2)}]
    ckptcore.save(tmp_path / "c", NamedOptimizer(model, torch.optim.AdamW(groups)))
    target = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.3))
    rate: Any = target.param_groups[0]["lr"]
    with pytest.raises(TargetUndefinedError, match=r"weight and bias were .* \(lr 0.1\d* and 0.2\d*\)"):
        ckptcore.load_into(tmp_path / "c", NamedOptimizer(model, target))
    assert rate == torch.tensor(0.3), "the tensor that both groups of the target share is unchanged"


class Scaled(torch.optim.SGD):
    """An optimizer whose state dict has an additional entry, like those of optimizers that scale losses."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": 1024.0}


def test_extra_entries_of_a_state_dict_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    named = NamedOptimizer(model, Scaled(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedLeafError, match="the Scaled also has loss_scale"):
        ckptcore.save(tmp_path / "c", named)
    ckptcore.save(tmp_path / "c", named.optimizers[0])
    assert ckptcore.load(tmp_path / "c")["loss_scale"] == 1024


def test_the_cost_is_linear_in_the_number_of_optimizers() -> None:
    """Programs that free gradients early use one optimizer for each parameter."""
    handler, calls = NamedOptimizerHandler(), []
    for count in (50, 100, 200):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(count)])
        value = NamedOptimizer(model, *[torch.optim.SGD([parameter]) for parameter in model])
        profile = cProfile.Profile()
        profile.runcall(
            lambda value: handler.restore(value, handler.flatten_to_load(value, handler.flatten(value))), value
        )
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 2.3 * calls[0]
    assert calls[2] < 2.3 * calls[1]
