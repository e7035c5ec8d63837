"""Modules and objects with their own loaders get the state in its stored form, as `load_state_dict` expects it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ckptcore_transforms import Rename
from torch.ao import quantization
from torch.nn.utils import parametrizations

import ckptcore
from ckptcore.errors import CheckpointError, TreeMismatchError

LAYOUTS = ["zarr3", "dcp", "torch.save"]


def saved(path: Path, state: Any, layout: str = "zarr3") -> Path:
    """Save objects with ckptcore, or save their state dicts with `torch.save`. Return the location."""
    if layout == "torch.save":
        path.mkdir()
        torch.save({name: value.state_dict() for name, value in state.items()}, path / "state.pt")
        return path / "state.pt"
    ckptcore.save(path / "c", state, layout=layout)
    return path / "c"


def sequential(*modules: torch.nn.Module) -> Any:
    return torch.nn.Sequential(*modules)


def module_dict(modules: dict[str, torch.nn.Module]) -> Any:
    return torch.nn.ModuleDict(modules)


class WithHistory(torch.nn.Module):
    """A module whose extra state grows during training, as in TransformerEngine with fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.history: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.history

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state


@pytest.mark.brings("module with an extra state that grows, as of fp8 in TransformerEngine", "torch", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_extra_state_that_grows(tmp_path: Path, layout: str) -> None:
    trained, fresh = WithHistory(), WithHistory()
    trained.history = {"amax": torch.arange(4.0), "scales": [torch.ones(2), torch.zeros(0)], "steps": 7, "recipe": "e4"}
    location = saved(tmp_path / "t", {"m": sequential(trained)}, layout)
    ckptcore.load_into(location, {"m": sequential(fresh)})
    assert fresh.history["steps"] == 7
    assert fresh.history["recipe"] == "e4"
    assert torch.equal(fresh.history["amax"], torch.arange(4.0))
    assert [tuple(scale.shape) for scale in fresh.history["scales"]] == [(2,), (0,)]
    again = WithHistory()
    again.history = {"amax": torch.zeros(9), "old": 1}
    ckptcore.load_into(location, {"m": sequential(again)})
    assert again.history.keys() == trained.history.keys()
    assert torch.equal(again.history["amax"], torch.arange(4.0))


@pytest.mark.brings("observers of quantisation-aware training", "torch", "same")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min")
def test_observers_of_quantisation_aware_training(tmp_path: Path) -> None:
    def prepared() -> Any:
        untyped: Any = quantization
        model = sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        model.qconfig = untyped.get_default_qat_qconfig("fbgemm")
        return untyped.prepare_qat(model.train())

    trained, fresh, expected = prepared(), prepared(), prepared()
    trained(torch.arange(6.0).reshape(2, 3))
    location = saved(tmp_path, {"m": trained})
    expected.load_state_dict(trained.state_dict())
    ckptcore.load_into(location, {"m": fresh})
    own, other = fresh.state_dict(), expected.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert torch.equal(fresh.eval()(torch.ones(1, 3)), expected.eval()(torch.ones(1, 3)))


class Scaled(torch.nn.Module):
    """A module with two versions. The second divides weights by 16 that the first version saved."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self._version = version
        self.weight = torch.nn.Parameter(torch.full((2,), 4.0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if self._version == 2 and local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 16
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.brings("module of another version, which migrates", "torch", "same")
@pytest.mark.parametrize("layout", ["zarr3", "ocdbt", "dcp", "safetensors", "torch.save"])
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile], ids=["plain", "compiled"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_versions_of_modules(tmp_path: Path, layout: str, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    old, new, same = (sequential(Scaled(version)) for version in (1, 2, 1))
    location = saved(tmp_path / "v", {"m": old}, layout)
    ckptcore.load_into(location, {"m": wrap(new)})
    ckptcore.load_into(location, {"m": wrap(same)})
    assert new[0].weight.tolist() == [0.25, 0.25]
    assert same[0].weight.tolist() == [4.0, 4.0]
    newer = sequential(Scaled(2))
    ckptcore.load_into(saved(tmp_path / "w", {"m": new}, layout), {"m": wrap(newer)})
    assert newer[0].weight.tolist() == [0.25, 0.25]


@pytest.mark.brings("state dict of a module, with its versions", "torch", "plain form")
def test_versions_of_a_state_dict_that_is_loaded_without_a_module(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", sequential(Scaled(1)).state_dict())
    model = sequential(Scaled(2))
    model.load_state_dict(ckptcore.load(tmp_path / "c", framework="torch"))
    assert model[0].weight.tolist() == [0.25, 0.25]


@pytest.mark.brings("`BatchNorm1d` without `num_batches_tracked`", "torch", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_without_a_counter(tmp_path: Path, layout: str) -> None:
    """Before version 2 (torch 0.4.1) modules stored no counter. PyTorch's own loader adds it."""
    old, fresh = (sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    old(torch.ones(4, 2))
    state = old.state_dict()
    del state["1.num_batches_tracked"]
    state._metadata["1"]["version"] = 1  # where PyTorch stores versions
    if layout == "torch.save":
        torch.save({"m": state}, tmp_path / "c")
    else:
        ckptcore.save(tmp_path / "c", {"m": state}, layout=layout)
    ckptcore.load_into(tmp_path / "c", {"m": fresh})
    assert torch.equal(fresh[1].running_mean, old[1].running_mean)
    assert fresh[1].num_batches_tracked == 0


@pytest.mark.brings("`weight_norm`, loaded into the parametrization", "torch", "same")
def test_weight_norm_becomes_a_parametrization(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = sequential(torch.nn.utils.weight_norm(torch.nn.Linear(3, 2)))
    new = sequential(parametrizations.weight_norm(torch.nn.Linear(3, 2)))
    ckptcore.load_into(saved(tmp_path, {"m": old}), {"m": new})
    assert torch.equal(new(torch.ones(1, 3)), old(torch.ones(1, 3)))


@pytest.mark.brings("module with a hook that renames entries", "torch", "same")
def test_a_hook_that_renames(tmp_path: Path) -> None:
    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch.nn.Linear(2, 2)
            register: Any = self.register_load_state_dict_pre_hook
            register(self.rename)

        @staticmethod
        def rename(module: torch.nn.Module, state: Any, prefix: str, *rest: Any) -> None:
            for name in [name for name in state if name.startswith(f"{prefix}q.")]:
                state[f"{prefix}query{name.removeprefix(f'{prefix}q')}"] = state.pop(name)

    block = module_dict({"q": torch.nn.Linear(2, 2)})
    old = module_dict({"block": block, "out": torch.nn.Linear(2, 1)})
    new = module_dict({"block": Renamed(), "out": torch.nn.Linear(2, 1)})
    ckptcore.load_into(saved(tmp_path, {"m": old}), {"m": new})
    assert torch.equal(new["block"].query.weight, block["q"].weight)
    assert torch.equal(new["out"].weight, old["out"].weight)


@pytest.mark.brings("module of another size", "torch", "refused")
def test_other_entries_are_still_differences(tmp_path: Path) -> None:
    """A module's own loader decides about its entries. The core reports differences of all other entries."""
    ckptcore.save(tmp_path / "c", sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    with pytest.raises(TreeMismatchError, match="shapes="):
        ckptcore.load_into(tmp_path / "c", sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(3)))
    model = sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TreeMismatchError, match="size mismatch"):
        ckptcore.load_into(tmp_path / "c", model)
    assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())


class Refusing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def get_extra_state(self) -> str:
        return "v1"

    def set_extra_state(self, state: object) -> None:
        raise ValueError("version v1 is not supported")


class RefusingScheduler:
    def state_dict(self) -> dict[str, int]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("another schedule")


def stale(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


@pytest.mark.brings("disabled `GradScaler`", "torch", "refused")
@pytest.mark.brings("object whose `load_state_dict` raises an error", "torch", "refused")
@pytest.mark.parametrize("several", [False, True], ids=["one tree", "several objects"])
@pytest.mark.parametrize("refusing", [Refusing, RefusingScheduler, torch.amp.GradScaler])
def test_nothing_is_changed_if_an_object_refuses(tmp_path: Path, several: bool, refusing: type) -> None:
    def objects(fill: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, fill)
        optimizer = torch.optim.SGD(model.parameters(), lr=fill / 10, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        arguments: dict[str, Any] = (
            {"device": "cpu", "enabled": fill == 2.0} if refusing is torch.amp.GradScaler else {}
        )
        return {"a": model, "b": optimizer, "c": scheduler, "z": refusing(**arguments)}

    (ckptcore.save_checkpointables if several else ckptcore.save)(tmp_path / "c", objects(1.0))
    target = objects(2.0)
    before = {name: copy.deepcopy(target[name].state_dict()) for name in "abc"}
    with pytest.raises(TreeMismatchError, match="refused its stored state"):
        if several:
            ckptcore.load_checkpointables(tmp_path / "c", into=target)
        else:
            ckptcore.load_into(tmp_path / "c", target)
    assert torch.equal(target["a"].weight, before["a"]["weight"])
    momenta = [held["momentum_buffer"] for held in target["b"].state_dict()["state"].values()]
    old = [held["momentum_buffer"] for held in before["b"]["state"].values()]
    assert all(torch.equal(momentum, other) for momentum, other in zip(momenta, old, strict=True))
    assert target["b"].param_groups[0]["lr"] == before["b"]["param_groups"][0]["lr"]
    assert target["c"].state_dict() == before["c"]
    rest: dict[str, Any] = {**target, "z": ...}  # the remedy
    if several:
        ckptcore.load_checkpointables(tmp_path / "c", into=rest)
    else:
        ckptcore.load_into(tmp_path / "c", rest)
    assert target["a"].weight[0, 0] != before["a"]["weight"][0, 0]


@pytest.mark.brings("module whose `set_extra_state` raises an error", "torch", "refused")
def test_a_refusing_module_gets_its_own_weights_back(tmp_path: Path) -> None:
    class Old(Refusing):
        def set_extra_state(self, state: object) -> None:
            pass

    ckptcore.save(tmp_path / "c", {"m": Old()})
    target = Refusing()
    before, weight = stale(target), target.inner.weight
    with pytest.raises(TreeMismatchError, match="v1 is not supported"):
        ckptcore.load_into(tmp_path / "c", {"m": target})
    assert target.inner.weight is weight
    assert torch.equal(weight, before["inner.weight"])


@pytest.mark.brings("module with an expanded buffer", "torch", "refused")
def test_an_expanded_buffer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    class Expanded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(2))
            self.register_buffer("mask", torch.ones(1).expand(4))

    ckptcore.save(tmp_path / "c", {"m": Expanded()})
    target = Expanded()
    before = stale(target)
    with pytest.raises(CheckpointError, match="share memory|single memory location|cannot be filled"):
        ckptcore.load_into(tmp_path / "c", {"m": target})
    assert torch.equal(target.weight, before["weight"])


@pytest.mark.brings("module with lists that grow, as metrics have", "torch", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_a_metric_that_grow(tmp_path: Path, layout: str) -> None:
    """A persistent list of torchmetrics, whose number of tensors differs between saves."""

    class Collected(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[torch.Tensor] = []

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}values"] = list(self.values)

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.values = list(state_dict.pop(f"{prefix}values"))

    trained, fresh, longer = (module_dict({"metric": Collected(), "w": torch.nn.Linear(1, 1)}) for _ in range(3))
    trained["metric"].values = [torch.arange(3.0), torch.ones(2, 2)]
    longer["metric"].values = [torch.zeros(1)] * 5
    location = saved(tmp_path / "c", {"m": trained}, layout)
    for target in (fresh, longer):
        ckptcore.load_into(location, {"m": target})
        assert [value.tolist() for value in target["metric"].values] == [[0, 1, 2], [[1, 1], [1, 1]]]
        assert torch.equal(target["w"].weight, trained["w"].weight)


@pytest.mark.brings("quantised `Linear8bitLt`, `LinearNF4`", "bitsandbytes", "refused")
@pytest.mark.parametrize("kind", ["Linear8bitLt", "LinearNF4"])
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_module_that_its_own_loader_refuses(tmp_path: Path, kind: str) -> None:
    """bitsandbytes saves more entries than a new module accepts. The refused load changes neither layer."""
    bnb: Any = pytest.importorskip("bitsandbytes")

    def made() -> Any:
        options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}
        return sequential(getattr(bnb.nn, kind)(64, 8, **options), torch.nn.Linear(8, 2))

    trained, fresh = made().to("cpu"), made()  # `to` quantises the weight
    trained(torch.ones(1, 64))
    state = trained.state_dict()
    with pytest.raises(RuntimeError):  # bitsandbytes 0.50 itself refuses the state, too
        made().load_state_dict(state)
    ckptcore.save(tmp_path / "c", {"m": trained})
    before = stale(fresh)
    with pytest.raises(TreeMismatchError):
        ckptcore.load_into(tmp_path / "c", {"m": fresh})
    assert all(torch.equal(held, before[name]) for name, held in fresh.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.brings("tied weight that is stored under one name", "torch", "same")
def test_a_tied_weight_that_is_stored_under_one_name(tmp_path: Path, device: str) -> None:
    """Files of transformers contain tied weights once. `safetensors.torch.load_model` accepts such files, too."""

    def made() -> Any:
        module = module_dict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
        module["head"].weight = module["embed"].weight
        return module

    trained = made()
    state = trained.state_dict()
    del state["head.weight"]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with torch.device(device):
        fresh = made()
    ckptcore.load_into(tmp_path / "model.safetensors", fresh)
    assert torch.equal(fresh["head"].weight, trained["head"].weight)
    assert fresh["head"].weight is fresh["embed"].weight
    separate = module_dict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    with pytest.raises(TreeMismatchError, match=r"head.weight.* is not stored"):
        ckptcore.load_into(tmp_path / "model.safetensors", separate)


class Totals(torch.nn.Module):
    """A module whose loader sets attributes that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = 1, [1]

    def get_extra_state(self) -> dict[str, Any]:
        return {"total": self.total, "seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        self.seen[:] = state["seen"]


class Lookahead(torch.optim.SGD):
    """An optimizer with a counter and an inner optimizer, as in wrappers of libraries."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=lr)
        self.base = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        self.k = int(lr * 10)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # libraries do this
        return {**super().state_dict(), "base": self.base.state_dict(), "k": self.k}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.k = state_dict["k"]
        self.base.load_state_dict(state_dict["base"])
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Outer:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]


class Counted:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("several", [False, True], ids=["one tree", "several objects"])
def test_a_refused_load_restores_all_that_loaders_set(tmp_path: Path, several: bool) -> None:
    def objects(number: int) -> dict[str, Any]:
        totals = Totals()
        totals.total, totals.seen = number, [number]
        weight = torch.nn.Parameter(torch.full((2,), float(number)))
        return {
            "a": totals,
            "b": Lookahead([weight], number / 10),
            "c": Outer(Counted(number)),
            "z": RefusingScheduler(),
        }

    (ckptcore.save_checkpointables if several else ckptcore.save)(tmp_path / "c", objects(5))
    target = objects(1)
    inner, seen = target["c"].inner, target["a"].seen
    with pytest.raises(TreeMismatchError, match="another schedule"):
        if several:
            ckptcore.load_checkpointables(tmp_path / "c", into=target)
        else:
            ckptcore.load_into(tmp_path / "c", target)
    assert (target["a"].total, target["a"].seen) == (1, [1])
    assert (target["b"].k, target["b"].base.param_groups[0]["lr"], target["b"].param_groups[0]["lr"]) == (1, 0.1, 0.1)
    assert target["c"].inner is inner
    assert inner.count == 1
    assert isinstance(seen, list)


def test_a_list_at_two_paths_is_refused_if_the_stored_lists_differ(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": [1, 2], "b": [3, 4]})
    history: list[int] = []
    with pytest.raises(TreeMismatchError):
        ckptcore.load_into(tmp_path / "c", {"a": history, "b": history})
    assert history == []


def test_a_state_with_a_tensor_that_requires_gradients(tmp_path: Path) -> None:
    class Doubled(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "twice": torch.ones(2, requires_grad=True) * 2}

    ckptcore.save(tmp_path / "c", Doubled(3))
    target = Doubled(1)
    ckptcore.load_into(tmp_path / "c", target)
    assert target.count == 3


def test_another_dtype_of_a_module_of_pytorch_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", torch.nn.BatchNorm1d(2).double())
    with pytest.raises(TreeMismatchError, match="cast="):
        ckptcore.load_into(tmp_path / "c", torch.nn.BatchNorm1d(2))


def test_transforms_keep_the_versions_of_modules(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"old": sequential(Scaled(1))})
    model = sequential(Scaled(2))
    ckptcore.load_into(tmp_path / "c", {"new": model}, transforms=[Rename("old/{rest...}", "new/{rest}")])
    assert model[0].weight.tolist() == [0.25, 0.25]
