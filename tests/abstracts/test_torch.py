"""`ckptcore.abstract` of PyTorch tensors, modules and optimizers, and loads that use the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch import dtensors
from ckptcore_torch.abstracts import abstract_like, abstract_subclass, empty_tensor
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerPart
from ckptcore_torch.tensors import is_fake
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from tests.abstracts.untouched import UntouchedMemory, assert_same
from tests.jobs.torch_groups import process_group


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """A mode that counts tensors with new memory. Views share the memory of other tensors."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.made: list[str] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            has_memory = isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
            if has_memory and tensor.untyped_storage()._cdata not in self._known:
                self.made.append(str(func))
        return made


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the first two layers, before its first step."""
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    return torch.optim.AdamW(groups, amsgrad=True)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with a tied weight, a buffer and bfloat16, and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))
    optimizer = optimizer_of(model)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.arange(6.0).reshape(2, 3),
    "bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16),
    "float8": lambda: torch.arange(6.0).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "raw bytes": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "without axes": lambda: torch.tensor(2.5),
    "empty": lambda: torch.ones(0, 3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "requires gradients": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_loads_with_its_abstract_tensor(name: str, tmp_path: Path) -> None:
    state = {"t": TENSORS[name]()}
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert abstract["t"].is_meta and type(abstract["t"]) is type(state["t"])
    assert_same(ckptcore.load(tmp_path / "c", abstract), state)


def test_transposed_tensors_load_contiguous(tmp_path: Path) -> None:
    state = {"t": torch.arange(6.0).reshape(2, 3).t()}
    ckptcore.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), {"t": state["t"].contiguous()})


def test_abstract_leaves_are_unchanged() -> None:
    meta, fake = torch.empty(3, device="meta"), empty_tensor(torch.Size((3,)), torch.float32, torch.device("cuda", 1))
    abstract = ckptcore.abstract({"meta": meta, "fake": fake})
    assert abstract["meta"] is meta and abstract["fake"] is fake


def test_abstract_reads_and_creates_no_tensor() -> None:
    memory = UntouchedMemory(4096)
    weight = torch.frombuffer(memory.memory, dtype=torch.float32).reshape(1024, -1)
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight = torch.nn.Parameter(weight)
    state = {"module": module, "view": weight.t(), "w": weight}
    ckptcore.abstract(state)  # the first call imports modules and fills caches
    with Counting(weight) as counting:
        abstract = ckptcore.abstract(state)
    assert counting.made == [] and memory.pages_touched() == 0
    assert abstract["module"]["weight"].shape == weight.shape
    with Counting(weight) as counting:
        weight.add(1)
    assert len(counting.made) == 1 and memory.pages_touched() == 4096, "both counts can tell"


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = {"a": weight, "b": weight, "detached": weight.detach()}
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert abstract["a"] is abstract["b"] and abstract["detached"] is not abstract["a"]
    loaded = ckptcore.load(tmp_path / "c", abstract)
    assert loaded["a"] is loaded["b"] and type(loaded["detached"]) is torch.Tensor


def test_a_parameter_and_its_data_keep_their_types_in_a_load_with_tensors(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = {"weight": weight, "data": weight.data, "again": weight.detach()}
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", state)
    assert type(loaded["weight"]) is torch.nn.Parameter
    assert type(loaded["data"]) is torch.Tensor and loaded["again"] is loaded["data"]


def test_a_tensor_and_its_detached_alias_keep_requires_grad(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    state = {"weight": weight, "detached": weight.detach()}
    ckptcore.save(tmp_path / "c", state)
    for request in (state, ckptcore.abstract(state)):
        loaded = ckptcore.load(tmp_path / "c", request)
        assert [leaf.requires_grad for leaf in loaded.values()] == [True, False]


@pytest.mark.parametrize("of_state", ["module", "optimizer", "both"])
def test_states_of_modules_and_optimizers_are_restored(of_state: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"module": model, "optimizer": optimizer, "both": {"m": model, "o": optimizer, "epoch": 3}}[of_state]
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    assert_same(loaded, ckptcore.load(tmp_path / "c", state))
    states = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same(
        loaded,
        states[of_state] if of_state in states else {"m": states["module"], "o": states["optimizer"], "epoch": 3},
    )


def test_a_new_module_accepts_a_loaded_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckptcore.save_checkpointables(tmp_path / "c", {"model": model, "optimizer": optimizer})
    loaded = ckptcore.load_checkpointables(tmp_path / "c", ckptcore.abstract({"model": model, "optimizer": optimizer}))
    assert loaded["model"] is not model
    other, its = trained()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(loaded["model"])
    its.load_state_dict(loaded["optimizer"])
    assert_same(other.state_dict(), model.state_dict())
    assert_same(its.state_dict(), optimizer.state_dict())


def test_a_module_on_the_meta_device_requests_the_saved_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    ckptcore.save(tmp_path / "c", {"model": model})
    with torch.device("meta"):
        meta = torch.nn.Linear(3, 2)
    abstract = ckptcore.abstract({"model": meta})
    assert all(tensor.is_meta for tensor in abstract["model"].values())
    assert_same(ckptcore.load(tmp_path / "c", abstract), {"model": model.state_dict()})


def test_names_of_a_wrapped_module_lack_the_prefix_of_the_wrapper(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = torch.nn.DataParallel(model)
    ckptcore.save(tmp_path / "c", {"model": wrapped})
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract({"model": wrapped}))
    assert_same(loaded, {"model": model.state_dict()})


@pytest.mark.parametrize("kind", [NamedOptimizer, NamedOptimizerPart])
def test_the_state_of_named_optimizers_is_restored(kind: type[NamedOptimizer], tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"optimizer": kind(model, optimizer)}
    ckptcore.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), ckptcore.load(tmp_path / "c", state))


def test_schedulers_scalers_and_generators_become_abstract_states(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = {
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "scaler": torch.amp.GradScaler("cpu"),
        "generator": torch.Generator().manual_seed(3),
        "size": torch.Size((2, 3)),
    }
    ckptcore.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), ckptcore.load(tmp_path / "c", state))


def test_an_optimizer_without_a_state_requests_none(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckptcore.save(tmp_path / "c", optimizer)
    new = optimizer_of(model)
    with pytest.raises(TreeMismatchError, match="exp_avg.*is stored and not requested"):
        ckptcore.load(tmp_path / "c", ckptcore.abstract(new))
    assert_same(ckptcore.load(tmp_path / "c", new), optimizer.state_dict())


def test_the_error_names_the_path_of_an_unsupported_leaf() -> None:
    state = {"b": torch.empty(3, dtype=torch.bits8), "s": torch.eye(2).to_mkldnn(), "t": torch.ones(2)}
    with pytest.raises(UnsupportedLeafError, match=r"b: cannot store torch.bits8, .*; s: a tensor with the layout"):
        ckptcore.abstract(state)
    with pytest.raises(UnsupportedLeafError, match="lazy/weight: a parameter of a lazy module"):
        ckptcore.abstract({"lazy": torch.nn.LazyLinear(3)})


class Tagged(torch.Tensor):
    """A subclass of tensors with an attribute."""


def test_a_subclass_keeps_its_attributes(tmp_path: Path) -> None:
    tagged: Any = torch.arange(3.0).as_subclass(Tagged)
    tagged.tag = "kept"
    ckptcore.save(tmp_path / "c", {"t": tagged})
    abstract = ckptcore.abstract({"t": tagged})
    assert type(abstract["t"]) is Tagged and abstract["t"].is_meta
    loaded = ckptcore.load(tmp_path / "c", abstract)["t"]
    assert loaded.tag == "kept"
    assert_same(loaded, tagged)


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_an_abstract_state_has_the_plan_of_the_concrete_state(layout: str) -> None:
    model, optimizer = trained()
    state = {"m": model, "o": optimizer, "t": torch.ones(3), "step": 1}
    plan, of_abstract = ckptcore.plan(state, layout=layout), ckptcore.plan(ckptcore.abstract(state), layout=layout)
    assert (of_abstract.arrays, of_abstract.array_bytes) == (plan.arrays, plan.array_bytes)
    assert of_abstract.objects == plan.objects


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_torch_checkpoints_load_with_the_abstract_saved_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    state_dict_saver.save(state, checkpoint_id=str(tmp_path / "dcp"))
    torch.save(state, tmp_path / "torch.pt")
    for location in (tmp_path / "dcp", tmp_path / "torch.pt"):
        assert_same(ckptcore.load(location, ckptcore.abstract(state)), state)
        loaded = ckptcore.load(location, ckptcore.abstract({"model": model, "optimizer": optimizer, "step": 0}))
        assert_same(loaded, state)


# --- devices that this machine lacks, represented by FakeTensors


def test_an_abstract_tensor_has_the_device_of_its_tensor() -> None:
    """The tensor is a fake one, so the device need not exist."""
    device = torch.device("cuda", 1)
    stand_in = empty_tensor(torch.Size((2, 3)), torch.bfloat16, device)
    for tensor, kind in ((stand_in, torch.Tensor), (torch.nn.Parameter(stand_in), torch.nn.Parameter)):
        abstract = abstract_like(tensor)
        assert abstract is not tensor and isinstance(abstract, kind)
        assert (abstract.device, abstract.dtype, tuple(abstract.shape)) == (device, torch.bfloat16, (2, 3))
        assert abstract.requires_grad == tensor.requires_grad
    with pytest.raises(UnsupportedLeafError, match=r"Tagged on cuda:1"):
        abstract_subclass(stand_in, torch.ones(2, 3).as_subclass(Tagged))


def test_a_fake_tensor_is_refused_by_a_save(tmp_path: Path) -> None:
    fake = empty_tensor(torch.Size((3,)), torch.float32, torch.device("cuda", 1))
    with pytest.raises(UnsupportedLeafError, match="t: .*no elements to save"):
        ckptcore.save(tmp_path / "c", {"t": fake})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("device", ["cuda:63", "xpu:63", "privateuseone:63"])
def test_a_missing_device_is_refused_before_reading(device: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"t": torch.ones(3), "u": torch.ones(2)})
    for path in (tmp_path / "c").glob("*.safetensors"):
        path.unlink()  # so that a read would fail
    abstract = ckptcore.abstract({"t": torch.ones(3), "u": torch.ones(2)})
    abstract["t"] = empty_tensor(torch.Size((3,)), torch.float32, torch.device(device))
    with pytest.raises(UnsupportedLeafError, match=f"t: cannot load a tensor to {device}: this process has no such"):
        ckptcore.load(tmp_path / "c", abstract)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_are_restored_on_their_device(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    model, optimizer = trained()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4, device=device)).square().sum().backward()
    optimizer.step()
    state = {
        "m": model,
        "o": optimizer,
        "p": torch.nn.Parameter(torch.ones(2, device=device)),
        "t": torch.ones(2, device=device, requires_grad=True),
        "cpu": torch.ones(2),
    }
    ckptcore.save(tmp_path / "c", state)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    abstract = ckptcore.abstract(state)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    loaded, expected = ckptcore.load(tmp_path / "c", abstract), ckptcore.load(tmp_path / "c", state)
    assert {tensor.device for tensor in loaded["m"].values()} == {device} and loaded["cpu"].is_cpu
    assert_same_on_device(loaded, expected)
    with pytest.raises(UnsupportedLeafError, match=r"Tagged is to be on cuda:0"):
        ckptcore.abstract(torch.ones(2, device=device).as_subclass(Tagged))


def assert_same_on_device(actual: Any, expected: Any) -> None:
    """Compare like `assert_same`, also for tensors on devices."""
    for leaf, expected_leaf in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert type(leaf) is type(expected_leaf)
        if isinstance(expected_leaf, torch.Tensor):
            assert (leaf.device, leaf.dtype, leaf.requires_grad) == (
                expected_leaf.device,
                expected_leaf.dtype,
                expected_leaf.requires_grad,
            )
            assert torch.equal(leaf, expected_leaf)
        else:
            assert leaf == expected_leaf


# --- DTensors


@pytest.fixture
def alone() -> Iterator[None]:
    """Start a process group of one process."""
    with process_group():
        yield


@pytest.mark.usefixtures("alone")
def test_a_dtensor_is_restored_with_its_mesh_and_placements(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(12.0).reshape(4, 3)
    state: dict[str, Any] = {
        "w": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
        "p": torch.nn.Parameter(distribute_tensor(whole + 1, mesh, [Replicate(), Shard(0)])),
    }
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert abstract["w"].to_local().is_meta and abstract["w"].placements == state["w"].placements
    loaded = ckptcore.load(tmp_path / "c", abstract)
    for name, expected in state.items():
        tensor = loaded[name]
        assert type(tensor) is type(expected) and isinstance(tensor, DTensor)
        assert (tensor.device_mesh, tensor.placements) == (expected.device_mesh, expected.placements)
        assert tensor.requires_grad == expected.requires_grad
        assert_same(tensor.to_local().detach(), expected.to_local().detach())
    again = ckptcore.abstract(abstract)
    assert all(again[name] is abstract[name] for name in state)


@pytest.mark.usefixtures("alone")
def test_a_fully_sharded_model_loads_as_dtensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    state = {"m": model, "o": optimizer}
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    slots = optimizer.state_dict()["state"]
    assert loaded["o"]["state"].keys() == slots.keys()
    for number, its in slots.items():
        for name, expected in its.items():
            moment = loaded["o"]["state"][number][name]
            assert type(moment) is type(expected), name
            assert_same(getattr(moment, "_local_tensor", moment), getattr(expected, "_local_tensor", expected))
    assert_same(
        {name: tensor.to_local() for name, tensor in loaded["m"].items()},
        {name: tensor.to_local() for name, tensor in model.state_dict().items()},
    )


@pytest.mark.usefixtures("alone")
def test_an_abstract_dtensor_has_the_device_of_its_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CPU offloading, FSDP2 has elements on the CPU and a mesh of GPUs. Here, the mesh is faked to be of a GPU."""
    monkeypatch.setattr(dtensors, "_mesh_device", lambda leaf: torch.device("cuda", 0))
    mesh = init_device_mesh("cpu", (1,))
    offloaded = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)], run_check=False)
    ckptcore.save(tmp_path / "c", {"w": offloaded})
    abstract = ckptcore.abstract({"w": offloaded})["w"]
    assert isinstance(abstract, DTensor) and is_fake(abstract.to_local()) and abstract.device.type == "cpu"
    assert ckptcore.abstract({"w": abstract})["w"] is abstract
    loaded = ckptcore.load(tmp_path / "c", {"w": abstract})["w"]
    assert torch.equal(loaded.to_local(), torch.ones(4, 3))
    with pytest.raises(UnsupportedLeafError, match="FakeTensor has no elements"):
        ckptcore.save(tmp_path / "d", {"w": abstract})
    target = {"w": abstract}
    ckptcore.load_into(tmp_path / "c", target)
    assert torch.equal(target["w"].to_local(), torch.ones(4, 3))
