"""Handlers of modules, optimizers, schedulers, scalers and generators."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.optimizers import OptimizerHandler
from ckptcore_torch.stateful import GeneratorHandler, StateDictHandler, checkpointable_handler_of_type

from ckptcore.errors import TreeMismatchError
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler


def fingerprint(state: Any) -> object:
    """Return a comparable form of a state dict, or of an object that has one."""
    if isinstance(state, torch.Tensor):
        detached = state.detach()
        return (
            str(detached.dtype),
            tuple(detached.shape),
            detached.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(state, dict):
        return {key: fingerprint(child) for key, child in state.items()}
    if isinstance(state, list | tuple):
        return tuple([fingerprint(child) for child in state])
    if hasattr(state, "state_dict"):
        return fingerprint(state.state_dict())
    return state


class TiedNetwork(torch.nn.Module):
    """A model with a tied weight, a buffer, a buffer that is not persistent, and a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return hidden

    def get_extra_state(self) -> dict[str, int]:
        """Return the part of the state that is not a tensor."""
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def seeded(make: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def network(seed: int = 0) -> TiedNetwork:
    made = seeded(TiedNetwork, seed)
    assert isinstance(made, TiedNetwork)
    made.steps = seed + 10
    return made


class TestModulesConform(CheckpointableHandlerTests):
    """Conformance tests of modules."""

    handler = ModuleHandler()
    examples = (
        CheckpointableExample("tied", lambda: network(0), lambda: network(1), fingerprint),
        CheckpointableExample(
            "parameter list",
            lambda: torch.nn.ParameterList([torch.zeros(2), torch.ones(3)]),
            lambda: torch.nn.ParameterList([torch.ones(2), torch.ones(3)]),
            fingerprint,
        ),
    )


def train(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], steps: int
) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))]
    optimizer = make_optimizer(parameters)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        optimizer.step()
    return optimizer


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9)


class TestOptimizersConform(CheckpointableHandlerTests):
    """Conformance tests of optimizers with and without steps."""

    handler = OptimizerHandler()
    examples = (
        CheckpointableExample("adam", lambda: train(adam, 2), lambda: train(adam, 3), fingerprint),
        CheckpointableExample("adam into a new one", lambda: train(adam, 2), lambda: train(adam, 0), fingerprint),
        CheckpointableExample("new", lambda: train(adam, 0), lambda: train(adam, 1), fingerprint),
        CheckpointableExample("tensor option", lambda: train(momentum, 1), lambda: train(momentum, 2), fingerprint),
    )


def schedule(steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = train(adam, 1)
    first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    then = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])
    for _ in range(steps):
        optimizer.step()
        whole.step()
    return whole


def scaler(scale: float) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale)
    made.scale(torch.ones(()))  # a scaler creates its state at its first use
    return made


class TestStateDictsConform(CheckpointableHandlerTests):
    """Conformance tests of schedulers and scalers."""

    handler = StateDictHandler()
    examples = (
        CheckpointableExample("schedulers", lambda: schedule(4), lambda: schedule(1), fingerprint),
        CheckpointableExample("scaler", lambda: scaler(16.0), lambda: scaler(2.0), fingerprint),
    )


class TestGeneratorsConform(CheckpointableHandlerTests):
    """Conformance tests of random generators."""

    handler = GeneratorHandler()
    examples = (
        CheckpointableExample(
            "generator",
            lambda: torch.Generator().manual_seed(3),
            lambda: torch.Generator().manual_seed(4),
            lambda generator: fingerprint(generator.get_state()),
        ),
    )


MODULES = ModuleHandler()
OPTIMIZERS = OptimizerHandler()


# --- modules


def test_the_state_of_a_module_has_every_name_and_the_memory_of_the_module() -> None:
    module = network()
    state = MODULES.flatten(module)
    assert isinstance(state, OrderedDict)
    assert {"embed.weight", "head.weight", "frozen", "norm.num_batches_tracked", "_extra_state"} <= state.keys()
    assert "scratch" not in state
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert MODULES.unflatten(module, state) is state


def test_a_restore_keeps_the_parameters_of_a_module() -> None:
    target = network(1)
    before = dict(target.named_parameters(remove_duplicate=False))
    pointers = {name: parameter.data_ptr() for name, parameter in before.items()}
    MODULES.restore(target, copy.deepcopy(network(0).state_dict()))
    after = dict(target.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name: parameter.data_ptr() for name, parameter in after.items()} == pointers
    assert target.head.weight is target.embed.weight
    assert fingerprint(target) == fingerprint(network(0))


def test_tensors_filled_in_place_are_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.nn.Linear(2, 2)
    monkeypatch.setattr(target, "load_state_dict", None)
    MODULES.restore(target, target.state_dict())


def test_a_module_on_the_meta_device_gets_its_elements() -> None:
    with torch.device("meta"):
        target = TiedNetwork()
    MODULES.restore(target, copy.deepcopy(network(0).state_dict()))
    assert fingerprint(target) == fingerprint(network(0))
    assert target.head.weight is target.embed.weight
    assert target.embed.weight.requires_grad
    assert not target.frozen.requires_grad
    assert isinstance(target.frozen, torch.nn.Parameter)
    assert target.steps == 10


def test_a_module_partly_on_the_meta_device_keeps_its_other_parameters() -> None:
    target = network(1)
    kept = target.embed.weight
    target.frozen = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    MODULES.restore(target, copy.deepcopy(network(0).state_dict()))
    assert target.embed.weight is kept
    assert fingerprint(target) == fingerprint(network(0))


def test_tied_buffers_on_the_meta_device_stay_tied() -> None:
    class Buffers(torch.nn.Module):
        first: torch.Tensor
        second: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.arange(3.0))
            self.register_buffer("second", self.first)

    with torch.device("meta"):
        target = Buffers()
    MODULES.restore(target, copy.deepcopy(Buffers().state_dict()))
    assert target.first is target.second
    assert target.first.tolist() == [0, 1, 2]


def test_a_state_with_other_names_is_a_mismatch() -> None:
    state = dict(network().state_dict())
    state["extra"] = state.pop("frozen")
    with pytest.raises(TreeMismatchError) as caught:
        MODULES.restore(network(), state)
    assert caught.value.differences == ("extra is not in the module", "frozen is missing")


def test_lazy_module_requests_the_stored_shapes() -> None:
    source = torch.nn.Linear(3, 2)
    stored = {"weight": AbstractArray((2, 3), np.float32), "bias": AbstractArray((2,), np.float32)}
    target = torch.nn.LazyLinear(2)
    state: Any = MODULES.flatten_to_load(target, stored)
    assert [tuple(held.shape) for held in state.values()] == [(2, 3), (2,)]
    assert all(type(held) is torch.Tensor for held in state.values())
    MODULES.restore(target, copy.deepcopy(source.state_dict()))
    assert fingerprint(target) == fingerprint(source)


# --- optimizers


def _stored(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of an optimizer with abstract arrays, as metadata returns it."""

    def abstract(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            name = str(node.dtype).removeprefix("torch.")
            return AbstractArray(tuple(node.shape), name)
        if isinstance(node, dict):
            return {key: abstract(child) for key, child in node.items()}
        return [abstract(child) for child in node] if isinstance(node, list) else node

    return abstract(optimizer.state_dict())


def test_handlers_of_states_that_grow_use_the_stored_structure() -> None:
    default = CheckpointableHandler.flatten_to_load
    assert all(type(handler).flatten_to_load is not default for handler in (OPTIMIZERS, MODULES, StateDictHandler()))
    assert GeneratorHandler.flatten_to_load is default


def test_only_generators_have_a_state_for_each_process() -> None:
    assert GeneratorHandler().per_process
    assert not any(handler.per_process for handler in (OPTIMIZERS, MODULES, StateDictHandler()))


def test_new_optimizer_requests_the_stored_state() -> None:
    new, used = train(adam, 0), train(adam, 2)
    state: Any = OPTIMIZERS.flatten_to_load(new, _stored(used))
    expected = used.state_dict()
    assert state["state"].keys() == expected["state"].keys() == {0, 1}
    for number, slots in expected["state"].items():
        asked = state["state"][number]
        assert asked.keys() == slots.keys()
        for name, held in slots.items():
            assert (asked[name].shape, asked[name].dtype) == (held.shape, held.dtype)
            assert asked[name].is_meta
    assert not new.state, "the optimizer itself is unchanged"


def test_existing_state_tensors_are_requested() -> None:
    used = train(adam, 2)
    state: Any = OPTIMIZERS.flatten_to_load(used, _stored(used))
    for number, slots in used.state_dict()["state"].items():
        assert all(state["state"][number][name] is held for name, held in slots.items())


def test_state_of_another_dtype_is_requested_as_stored() -> None:
    used = train(adam, 2)
    stored = _stored(used)
    stored["state"][0]["exp_avg"] = AbstractArray(stored["state"][0]["exp_avg"].shape, "bfloat16")
    state: Any = OPTIMIZERS.flatten_to_load(used, stored)
    held = used.state_dict()["state"]
    assert state["state"][0]["exp_avg"].dtype == torch.bfloat16
    assert held[0]["exp_avg"].dtype == torch.float32
    assert state["state"][0]["exp_avg_sq"] is held[0]["exp_avg_sq"]


def test_state_that_was_not_saved_is_not_requested() -> None:
    state: Any = OPTIMIZERS.flatten_to_load(train(adam, 2), _stored(train(adam, 0)))
    assert state["state"] == {}


def test_options_added_by_other_code_are_requested() -> None:
    used = train(adam, 1)
    torch.optim.lr_scheduler.ExponentialLR(used, 0.5)
    state: Any = OPTIMIZERS.flatten_to_load(train(adam, 0), _stored(used))
    assert [group["initial_lr"] for group in state["param_groups"]] == [0.1, 0.1]


def test_states_of_unknown_parameters_are_not_requested() -> None:
    stored = _stored(train(adam, 1))
    stored["state"][7] = {"step": AbstractArray((), np.float32)}
    state: Any = OPTIMIZERS.flatten_to_load(train(adam, 0), stored)
    assert state["state"].keys() == {0, 1}
    assert OPTIMIZERS.flatten_to_load(train(adam, 0), 3) == train(adam, 0).state_dict()


def test_state_keeps_its_dtype() -> None:
    """PyTorch would cast the state to the dtype of the parameter, and lose precision."""
    optimizer = train(adam, 2)
    parameter = optimizer.param_groups[1]["params"][0]
    moment = torch.full((2, 2), 1 + 2.0**-20)
    optimizer.state[parameter]["exp_avg"] = moment
    OPTIMIZERS.restore(optimizer, OPTIMIZERS.flatten(optimizer))
    assert optimizer.state[parameter]["exp_avg"] is moment


def test_a_restore_keeps_the_tensors_of_an_optimizer() -> None:
    optimizer = train(momentum, 1)
    option = optimizer.param_groups[0]["lr"]
    state: Any = OPTIMIZERS.flatten(optimizer)
    state["param_groups"][0]["lr"].fill_(0.25)  # in place, like the core
    OPTIMIZERS.restore(optimizer, state)
    assert optimizer.param_groups[0]["lr"] is option
    assert option.item() == 0.25


def test_module_with_a_state_tree_has_no_handler_here() -> None:
    """The class resembles a Keras model, whose state dict lacks the optimizer."""

    class WithTree(torch.nn.Module):
        def get_state_tree(self) -> dict[str, object]:
            return {}

        def set_state_tree(self, tree: dict[str, object]) -> None:
            pass

    assert checkpointable_handler_of_type(WithTree) is None
    assert isinstance(checkpointable_handler_of_type(torch.nn.Module), ModuleHandler)
