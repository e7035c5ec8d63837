"""Names of parameters are the same for plain and wrapped models, so each loads what the other saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.names import plain_names
from ckptcore_transforms import Rename
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ckptcore
from ckptcore.errors import NameCollisionError, TreeMismatchError
from tests.jobs.torch_groups import process_group

Module = torch.nn.Module
Wrap = Callable[[Module], Module]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one process, for DistributedDataParallel. Imports torch.compile first, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(torch.nn.Identity())
    with process_group():
        yield


class Block(torch.nn.Module):
    """A model with tied weights, a state that is not a tensor, and attribute names like those of wrappers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = torch.nn.Linear(3, 3)
            self._orig_mod = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
            self.head = torch.nn.Linear(3, 3, bias=False)
        self.head.weight = self.module.weight
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen = seed

    def get_extra_state(self) -> dict[str, int]:
        """Return the part of the state that is not a tensor."""
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def model(seed: int, inner: Wrap = lambda module: module) -> torch.nn.Sequential:
    """Return two blocks that share a child. The blocks and one of their children are wrapped."""
    first, second = Block(seed), Block(seed + 50)
    second._orig_mod = first._orig_mod
    first.module = inner(first.module)  # type: ignore[assignment]  # a wrapper
    return torch.nn.Sequential(inner(first), torch.nn.Sequential(inner(second)))


def compiled(module: Module) -> Module:
    made: Module = torch.compile(module, backend="eager")
    return made


INNER: dict[str, Wrap] = {
    "plain": lambda module: module,
    "checkpointed": lambda module: checkpoint_wrapper(module),
    "compiled": compiled,
    "compiled and checkpointed": lambda module: checkpoint_wrapper(compiled(module)),
    "checkpointed and compiled": lambda module: compiled(checkpoint_wrapper(module)),
    "offloaded": lambda module: offload_wrapper(checkpoint_wrapper(module)),
}
OUTER: dict[str, Wrap] = {
    "plain": lambda module: module,
    "distributed": lambda module: DistributedDataParallel(module),
    "parallel": DataParallel,
    "compiled and distributed": lambda module: compiled(DistributedDataParallel(module)),
    "distributed, compiled, parallel": lambda module: DataParallel(compiled(DistributedDataParallel(module))),
}


def elements(module: Module) -> dict[str, Any]:
    """Return the state of a model by plain names."""
    state: Any = ModuleHandler().flatten(module)
    return {name: held.tolist() if isinstance(held, torch.Tensor) else held for name, held in state.items()}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *((inner, "plain") for inner in INNER),
        *(("checkpointed and compiled", outer) for outer in OUTER if outer != "plain"),
    ],
)
def test_wrapped_and_plain_models_load_each_other(inner: str, outer: str, tmp_path: Path) -> None:
    plain = model(1)
    wrapped = OUTER[outer](model(2, INNER[inner]))
    state: Any = ModuleHandler().flatten(wrapped)
    assert list(state) == list(plain.state_dict())
    ckptcore.save(tmp_path / "wrapped", {"model": wrapped})
    parameters = [id(parameter) for parameter in plain.parameters()]
    ckptcore.load_into(tmp_path / "wrapped", {"model": plain})
    assert [id(parameter) for parameter in plain.parameters()] == parameters
    assert elements(plain) == elements(model(2)) == elements(wrapped)
    assert plain.get_submodule("0").seen == 2

    ckptcore.save(tmp_path / "plain", {"model": model(3)})
    ckptcore.load_into(tmp_path / "plain", {"model": wrapped})
    assert elements(wrapped) == elements(model(3))
    held = wrapped.get_parameter(next(name for name, _ in wrapped.named_parameters()))
    assert held is next(wrapped.parameters())


@pytest.mark.parametrize("outer", ["plain", "compiled and distributed"])  # torch does not know DataParallel here
@pytest.mark.parametrize("inner", ["plain", "checkpointed", "compiled", "checkpointed and compiled"])
def test_names_equal_those_of_get_model_state_dict(inner: str, outer: str) -> None:
    """torch recognizes some wrappers by attribute names, so this model uses other names."""
    part = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = OUTER[outer](torch.nn.Sequential(INNER[inner](part), part[1]))
    state: Any = ModuleHandler().flatten(wrapped)
    assert state.keys() == get_model_state_dict(wrapped).keys()


def test_load_returns_a_state_with_the_names_of_the_wrapped_module(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "plain", model(1))
    wrapped = DataParallel(model(2, compiled))
    state = ckptcore.load(tmp_path / "plain", wrapped)
    assert list(state) == list(wrapped.state_dict())
    wrapped.load_state_dict(state)
    assert elements(wrapped) == elements(model(1))


def test_a_wrapped_module_on_the_meta_device_keeps_its_ties(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "plain", model(1))
    with torch.device("meta"):
        target = DataParallel(model(2, lambda module: checkpoint_wrapper(module)))
    ckptcore.load_into(tmp_path / "plain", target)
    assert elements(target) == elements(model(1))
    tied = [parameter for name, parameter in target.named_parameters(remove_duplicate=False) if name.endswith("weight")]
    assert len({id(parameter) for parameter in tied}) < len(tied)
    second: Any = target.get_submodule("module.1.0._checkpoint_wrapped_module")
    assert second.head.weight is second.module.weight


def test_a_state_dict_of_the_same_wrappers_loads_under_their_names(tmp_path: Path) -> None:
    """A state dict has the names of its wrappers, as in checkpoints of DCP."""
    source = DataParallel(model(1, compiled))
    ckptcore.save(tmp_path / "raw", {"model": dict(source.state_dict())})
    target = DataParallel(model(2, compiled))
    ckptcore.load_into(tmp_path / "raw", {"model": target})
    assert elements(target) == elements(source)


def test_names_of_other_wrappers_raise_an_error_that_gives_a_transform(tmp_path: Path) -> None:
    source = DataParallel(model(1))
    ckptcore.save(tmp_path / "raw", {"model": dict(source.state_dict())})
    target = model(2)
    with pytest.raises(TreeMismatchError, match=r"Rename\('model/module\.\{rest\.\.\.\}', 'model/\{rest\}'\)"):
        ckptcore.load_into(tmp_path / "raw", {"model": target})
    transforms = [Rename("model/module.{rest...}", "model/{rest}")]
    ckptcore.load_into(tmp_path / "raw", {"model": target}, transforms=transforms)
    assert elements(target) == elements(source)
    ckptcore.save(tmp_path / "bare", {"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}})
    part = torch.nn.Module()
    part.module = torch.nn.Linear(2, 2)
    with pytest.raises(TreeMismatchError, match=r"Rename\('model/\{rest\.\.\.\}', 'model/module\.\{rest\}'\)"):
        ckptcore.load_into(tmp_path / "bare", {"model": part})


def test_names_of_inner_wrappers_raise_an_error_that_gives_a_remedy(tmp_path: Path) -> None:
    source = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    stored = {name.replace(".", "._orig_mod."): held for name, held in source.state_dict().items()}
    ckptcore.save(tmp_path / "raw", {"model": stored})
    target = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(
        TreeMismatchError, match=r"'_orig_mod\.' of a wrapper.*Use the same wrappers.*load_into"
    ) as caught:
        ckptcore.load_into(tmp_path / "raw", {"model": target})
    assert "'0.weight' is stored as '0._orig_mod.weight'" in caught.value.differences[0]
    into = {name.replace(".", "._orig_mod."): held for name, held in target.state_dict().items()}
    ckptcore.load_into(tmp_path / "raw", {"model": into})
    assert elements(target) == elements(source)


def test_parameter_of_a_wrapper_keeps_its_name_and_collisions_raise_an_error() -> None:
    class Owner(DataParallel[Module]):
        def __init__(self, module: Module) -> None:
            super().__init__(module)
            self.scale = torch.nn.Parameter(torch.ones(1))

    wrapped = Owner(torch.nn.Linear(2, 2))
    assert plain_names(wrapped, wrapped.state_dict()) == {
        "scale": "scale",
        "module.weight": "weight",
        "module.bias": "bias",
    }
    wrapped.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(NameCollisionError, match=r"'weight' and 'module\.weight'"):
        ModuleHandler().flatten(wrapped)
