"""An optimizer refuses states of other classes, and loads states of all versions of its own class."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerPart
from ckptcore_torch.optimizer_classes import refuse_other_class
from ckptcore_torch.optimizers import OptimizerHandler
from torch import nn, optim

import ckptcore
from ckptcore import PLACEHOLDER, Matching
from ckptcore.errors import TreeMismatchError

KEEP = Matching(missing="keep", unexpected="ignore")
ADDED_BY_VERSIONS = (
    "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"
)  # fmt: skip


def of_library(module: str, name: str, **options: Any) -> Callable[[Any], optim.Optimizer]:
    """Return a function that creates an optimizer of another library, in training mode."""

    def make(parameters: Any) -> optim.Optimizer:
        optimizer: Any = getattr(pytest.importorskip(module), name)(parameters, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer  # type: ignore[no-any-return]  # the library has no types

    return make


CLASSES: dict[str, Callable[[Any], optim.Optimizer]] = {
    **{
        name: getattr(optim, name)
        for name in (
            "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam",
            "RMSprop", "Rprop",
        )
    },
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Lion": of_library("lion_pytorch", "Lion"),
    "ScheduleFree": of_library("schedulefree", "AdamWScheduleFree"),
}  # fmt: skip
LOADS_TOO = {("Adam", "AdamW"), ("AdamW", "Adam")}
"""Pairs of a saved and a new class whose states are equivalent."""


def run(name: str, seed: int, *, stepped: bool = True) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = CLASSES[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if stepped:
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    return model, optimizer


def frozen(optimizer: optim.Optimizer) -> str:
    return repr(optimizer.state_dict())


@pytest.mark.parametrize("saved", CLASSES)
def test_only_an_optimizer_of_the_saved_class_loads(tmp_path: Path, saved: str) -> None:
    source = run(saved, 0)[1]
    ckptcore.save(tmp_path / "c", {"opt": source})
    stored: Any = ckptcore.metadata(tmp_path / "c").abstract
    for name, stepped in itertools.product(CLASSES, (False, True)):
        model, optimizer = run(name, 1, stepped=stepped)
        if name == saved or (saved, name) in LOADS_TOO:
            ckptcore.load_into(tmp_path / "c", {"opt": optimizer})
            optimizer.step(lambda model=model: model(torch.ones(1, 3)).sum())  # type: ignore[misc]  # binds the loop variable
            continue
        with pytest.raises(TreeMismatchError, match="another class of optimizer than") as caught:
            OptimizerHandler().flatten_to_load(optimizer, stored["opt"])
        assert "keep" not in str(caught.value), name


@pytest.mark.parametrize("matching", [Matching(), KEEP])
def test_no_matching_option_allows_another_class(tmp_path: Path, matching: Matching) -> None:
    ckptcore.save(tmp_path / "c", {"opt": run("AdamW", 0)[1]})
    optimizer = run("SGD", 1)[1]
    before = frozen(optimizer)
    with pytest.raises(TreeMismatchError, match="another class of optimizer than SGD"):
        ckptcore.load_into(tmp_path / "c", {"opt": optimizer}, matching=matching)
    assert frozen(optimizer) == before


def test_the_error_lists_the_differences_and_gives_remedies_that_work(tmp_path: Path) -> None:
    source = run("AdamW", 0)[1]
    ckptcore.save(tmp_path / "c", {"opt": source, "step": 5})
    other, again = run("SGD", 1)[1], run("AdamW", 1)[1]
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", {"opt": other, "step": 0})
    assert caught.value.differences == (
        (
            "group 0: 3 options are stored and not its own (amsgrad, betas, eps) and "
            "3 options are its own and not stored (dampening, momentum, nesterov)"
        ),
        "states of 2 parameters: exp_avg, exp_avg_sq, step are stored instead of nothing",
    )
    before = frozen(other)
    assert ckptcore.load_into(tmp_path / "c", {"opt": PLACEHOLDER, "step": 0})["step"] == 5
    assert frozen(other) == before
    ckptcore.load_into(tmp_path / "c", {"opt": again, "step": 0})
    assert frozen(again) == frozen(source)


@pytest.mark.parametrize("name", CLASSES)
def test_versions_of_a_class_load(name: str) -> None:
    """Versions differ in their options. Schedulers and programs add entries to groups and states."""
    source = run(name, 0)[1].state_dict()
    group, states = source["param_groups"][0], list(source["state"].values())
    older = {key: option for key, option in group.items() if key not in ADDED_BY_VERSIONS}
    newer = {**dict.fromkeys(ADDED_BY_VERSIONS, False), **group}
    program = {**older, "initial_lr": 0.1, "name": "all", "lr_scale": 1.0}
    for optimizer in (run(name, 1)[1], run(name, 1, stepped=False)[1]):
        own = optimizer.state_dict()["state"].values()
        for stored, slots in (
            (older, states),
            (newer, states),
            (program, [{**held, "ema": torch.ones(1)} for held in states]),
            (program, []),
        ):
            refuse_other_class(optimizer, own, [stored], slots)


def test_a_state_of_an_older_version_loads(tmp_path: Path) -> None:
    state = run("AdamW", 0)[1].state_dict()
    for key in ADDED_BY_VERSIONS:
        del state["param_groups"][0][key]
    state["param_groups"][0] |= {"lr": 0.5, "lr_scale": 2.0}
    ckptcore.save(tmp_path / "c", {"opt": state})
    optimizer = run("AdamW", 1, stepped=False)[1]
    ckptcore.load_into(tmp_path / "c", {"opt": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["foreach"] is None


def test_states_load_although_an_option_changes_their_entries(tmp_path: Path) -> None:
    for number, saved in enumerate((True, False)):
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        optimizer = optim.Adam(model.parameters(), amsgrad=saved)
        optimizer.step()
        ckptcore.save(tmp_path / str(number), {"opt": optimizer})
        ckptcore.load_into(tmp_path / str(number), {"opt": optim.Adam(nn.Linear(2, 2).parameters(), amsgrad=not saved)})


@pytest.mark.parametrize("kind", [NamedOptimizer, NamedOptimizerPart])
def test_optimizers_by_name_refuse_other_classes(tmp_path: Path, kind: type[NamedOptimizer]) -> None:
    """Each of several optimizers is checked against the stored groups and states of its own parameters."""

    def named(first: str, second: str) -> tuple[NamedOptimizer, list[optim.Optimizer]]:
        model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
        optimizers = [CLASSES[name](model[part].parameters()) for name, part in ((first, "a"), (second, "b"))]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        return kind(model, *optimizers), optimizers

    ckptcore.save(tmp_path / "c", {"opt": named("AdamW", "SGD")[0]})
    ckptcore.load_into(tmp_path / "c", {"opt": named("AdamW", "SGD")[0]})
    for classes, refused in ((("SGD", "SGD"), "SGD"), (("AdamW", "AdamW"), "AdamW")):
        target, optimizers = named(*classes)
        before = list(map(frozen, optimizers))
        with pytest.raises(TreeMismatchError, match=f"another class of optimizer than {refused}: "):
            ckptcore.load_into(tmp_path / "c", {"opt": target}, matching=KEEP)
        assert list(map(frozen, optimizers)) == before


def test_a_hook_may_migrate_a_state(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"opt": run("AdamW", 0)[1]})
    optimizer = run("SGD", 1)[1]

    def migrate(_: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        momenta = {key: {"momentum_buffer": slots["exp_avg"]} for key, slots in state["state"].items()}
        return {"state": momenta, "param_groups": [{"lr": 0.5, "momentum": 0.9, "params": [0, 1]}]}

    optimizer.register_load_state_dict_pre_hook(migrate)
    ckptcore.load_into(tmp_path / "c", {"opt": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5


class Wrapper(optim.Optimizer):
    """A wrapper without its own options and hooks, because it does not call ``super().__init__``."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.wrapped = optimizer
        self.param_groups = optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.wrapped.state

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.wrapped.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


class PatchedWrapper(Wrapper):
    """A wrapper that has the methods of the inner optimizer as attributes of the instance."""

    state_dict = optim.Optimizer.state_dict
    load_state_dict = optim.Optimizer.load_state_dict

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.__dict__.update(state_dict=optimizer.state_dict, load_state_dict=optimizer.load_state_dict)


class RateScaling(Wrapper):
    """A wrapper like LARC: it delegates attributes to the inner optimizer, except the options."""

    def __getattr__(self, name: str) -> Any:
        if name == "defaults":
            raise AttributeError(name)
        return getattr(self.__dict__["wrapped"], name)


class Accelerated(Wrapper):
    """A wrapper like that of Accelerate: it returns the options of its attribute ``optimizer``."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.optimizer = optimizer

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults


def prepared(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Wrap the optimizer with Accelerate itself."""
    wrapper: optim.Optimizer = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)
    return wrapper


@pytest.mark.parametrize("wrap", [Wrapper, PatchedWrapper, RateScaling, Accelerated, prepared])
def test_a_wrapper_without_options_and_hooks_loads(tmp_path: Path, wrap: Callable[[Any], optim.Optimizer]) -> None:
    source = run("AdamW", 0)[1]
    ckptcore.save(tmp_path / "plain", {"opt": source})
    ckptcore.save(tmp_path / "wrapped", {"opt": wrap(source)})
    for name, stepped in itertools.product(("plain", "wrapped"), (False, True)):
        model, inner = run("AdamW", 1, stepped=stepped)
        ckptcore.load_into(tmp_path / name, {"opt": wrap(inner)})
        assert frozen(inner) == frozen(source)
        wrapper = wrap(run("AdamW", 1, stepped=stepped)[1])
        ckptcore.load_into(tmp_path / name, {"opt": NamedOptimizer(model, wrap(inner))})
        ckptcore.load_into(tmp_path / name, {"opt": wrapper})
        wrapper.step()


@pytest.mark.parametrize("wrap", [Accelerated, prepared])
def test_the_class_of_optimizer_in_a_wrapper_is_checked(tmp_path: Path, wrap: Callable[[Any], optim.Optimizer]) -> None:
    ckptcore.save(tmp_path / "c", {"opt": run("AdamW", 0)[1]})
    inner = run("SGD", 1)[1]
    with pytest.raises(TreeMismatchError, match="another class of optimizer than SGD"):
        ckptcore.load_into(tmp_path / "c", {"opt": wrap(inner)})
    wrapper = wrap(inner)
    inner.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": {}})
    ckptcore.load_into(tmp_path / "c", {"opt": wrapper})
    assert inner.param_groups[0]["betas"] == (0.9, 0.999) and not inner.state


def test_the_options_of_an_optimizer_are_collected_once_for_all_groups() -> None:
    class Read(optim.AdamW):
        reads = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "param_groups":
                Read.reads += 1
            return super().__getattribute__(name)

    counts = []
    for groups in (2, 20):
        optimizer = Read([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)])
        stored = optimizer.state_dict()["param_groups"]
        Read.reads = 0
        refuse_other_class(optimizer, [], stored, [])
        counts.append(Read.reads)
    assert counts == [1, 1]


def refuses(optimizer: optim.Optimizer, stored: dict[str, Any]) -> bool:
    try:
        refuse_other_class(
            optimizer, optimizer.state_dict()["state"].values(), stored["param_groups"], stored["state"].values()
        )
    except TreeMismatchError:
        return True
    return False


class Counting(optim.Optimizer):
    """An optimizer of another library that counts steps in its groups, as in timm and apex."""

    def __init__(self, parameters: Any, **added: Any) -> None:
        options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0, "bias_correction": True}
        super().__init__(parameters, options | added)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group |= {name: group.get(name, 0) + 1 for name in ("step", "k")}
            for parameter in group["params"]:
                state = self.state[parameter]
                state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                if "master_weights" in group:
                    state["master_param"] = parameter.detach().clone()


def test_versions_of_a_class_that_counts_steps_in_its_groups_load() -> None:
    """An option that only one version has is accepted, before and after the first step."""
    versions: list[dict[str, Any]] = [{}, {"caution": False, "decoupled_decay": False}, {"master_weights": False}]
    for saved, new, stepped in itertools.product(versions, versions, (False, True)):
        source, target = (Counting(nn.Linear(3, 2).parameters(), **added) for added in (saved, new))
        source.step()
        if stepped:
            target.step()
        assert not refuses(target, source.state_dict())
    for name, stepped in itertools.product(("SGD", "Rprop", "LBFGS", "Adadelta"), (False, True)):
        assert refuses(target, run(name, 0, stepped=stepped)[1].state_dict()), name


def test_equal_states_of_a_class_of_another_library_load_with_any_options() -> None:
    """Different options are refused only if the states differ, too, or if the target has made no step."""
    source, target = Counting(nn.Linear(3, 2).parameters()), Counting(nn.Linear(3, 2).parameters())
    source.step()
    stored = source.state_dict()
    stored["param_groups"][0] |= dict.fromkeys("abcdefgh", 1)
    assert refuses(target, stored)
    target.step()
    assert not refuses(target, stored)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_entries_of_programs_may_have_names_that_pytorch_uses(name: str, stepped: bool) -> None:
    source, target = run(name, 0)[1], run(name, 1, stepped=stepped)[1]
    stored = source.state_dict()
    stored["param_groups"][0] |= {"lr_decay": 0.9, "alpha": 0.1, "d": 2}
    for slots in stored["state"].values():
        slots |= {"prev": torch.ones(1), "sum": torch.ones(1), "variance": torch.ones(1)}
    assert not refuses(target, stored)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_frozen_parameter_may_have_only_an_entry_of_a_program(tmp_path: Path, stepped: bool) -> None:
    """If PyTorch's own loader fails without the step count, the load is refused and the target unchanged."""
    for name, loads in (("SGD", True), ("AdamW", False)):
        model, source = run(name, 0)
        source.state[list(model.parameters())[1]] = {"ema": torch.ones(2)}
        ckptcore.save(tmp_path / name, {"opt": source})
        target = run(name, 1, stepped=stepped)[1]
        before = frozen(target)
        if loads:
            ckptcore.load_into(tmp_path / name, {"opt": target})
            assert frozen(target) == frozen(source)
            continue
        with pytest.raises(
            TreeMismatchError, match="states of 2 parameters: not every one has exp_avg, exp_avg_sq, step"
        ):
            ckptcore.load_into(tmp_path / name, {"opt": target})
        assert frozen(target) == before
        with pytest.raises(KeyError, match="step"):
            target.load_state_dict(source.state_dict())


def test_a_state_without_moments_is_refused_only_if_all_states_lack_them() -> None:
    stored = run("AdamW", 0)[1].state_dict()
    stored["state"][1] = {"step": torch.ones(1)}
    assert not refuses(run("AdamW", 1)[1], stored)
    stored["state"][0] = stored["state"][1]
    assert refuses(run("AdamW", 1)[1], stored)


def test_an_sgd_without_states_loads_any_entries_if_its_options_are_stored() -> None:
    stored = optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1).state_dict()
    stored["state"] = {0: {"step": 1, "sum": torch.ones(2, 3)}}
    target = optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert not refuses(target, stored)
    stored["param_groups"][0] = {"lr": 0.1, "params": [0, 1]}
    assert refuses(target, stored)


@pytest.mark.parametrize(("saved", "name"), [("Adamax", "Adam"), ("RAdam", "AdamW"), ("RAdam", "NAdam")])
def test_options_that_a_class_of_pytorch_always_had_are_required(saved: str, name: str) -> None:
    """A stored group that lacks newer flags may be of another writer, so it may lack the options, too."""
    stored, target = run(saved, 0, stepped=False)[1].state_dict(), run(name, 1)[1]
    assert refuses(target, stored)
    for flag in ADDED_BY_VERSIONS:
        stored["param_groups"][0].pop(flag, None)
    assert not refuses(target, stored)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="PyTorch before 2.9 has no Muon")
def test_classes_that_pytorch_defines_in_another_module_are_checked_strictly() -> None:
    """Muon and SGD have the same entries in their states, so only their options differ."""
    parameters = [nn.Parameter(torch.ones(2, 2))]
    parameters[0].grad = torch.ones(2, 2)
    muon, sgd = optim.Muon(parameters), optim.SGD(parameters, lr=0.1, momentum=0.9)
    muon.step()  # type: ignore[no-untyped-call]  # torch has no types here
    sgd.step()
    assert refuses(muon, sgd.state_dict()) and refuses(sgd, muon.state_dict())


def test_a_state_of_an_equivalent_class_can_be_loaded_unchecked(tmp_path: Path) -> None:
    """The error gives this remedy, but not for states with which the optimizer could not make a step."""
    state = run("AdamW", 0)[1].state_dict()
    group = state["param_groups"][0]
    options = {name: group[name] for name in ("betas", "eps", "lr", "params", "weight_decay")}
    state["param_groups"][0] = {**options, "correct_bias": True}  # as in old versions of Transformers
    ckptcore.save(tmp_path / "c", {"run": {"opt": state}})
    target = run("AdamW", 1)[1]
    with pytest.raises(TreeMismatchError, match=r"ckptcore\.load\(\.\.\., framework='torch'\) to load_state_dict of"):
        ckptcore.load_into(tmp_path / "c", {"run": {"opt": target}})
    target.load_state_dict(ckptcore.load(tmp_path / "c", framework="torch")["run"]["opt"])
    target.step()
    assert torch.equal(target.state_dict()["state"][0]["step"], torch.tensor(2.0))
    with pytest.raises(TreeMismatchError, match="new state. Nothing was changed"):
        OptimizerHandler().flatten_to_load(target, run("SGD", 0)[1].state_dict())


@pytest.mark.parametrize("named", [False, True])
def test_a_load_hook_that_changes_nothing_does_not_allow_an_unusable_state(tmp_path: Path, named: bool) -> None:
    """If an optimizer has a load hook, only states with which it cannot make a step are refused."""
    for saved in ("Adagrad", "AdamW"):
        model, optimizer = run("AdamW", 1)
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        source: Any = run(saved, 0)
        state = {"opt": NamedOptimizer(*source) if named else source[1]}
        ckptcore.save(tmp_path / saved, state)
        target = {"opt": NamedOptimizer(model, optimizer) if named else optimizer}
        before = frozen(optimizer)
        if saved == "AdamW":
            ckptcore.load_into(tmp_path / saved, target)
            assert frozen(optimizer) == frozen(source[1])
            continue
        with pytest.raises(TreeMismatchError, match="step, sum are stored instead of exp_avg, exp_avg_sq, step"):
            ckptcore.load_into(tmp_path / saved, target)
        assert frozen(optimizer) == before
