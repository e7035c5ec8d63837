"""Saves and loads of PyTorch tensors, modules and optimizers with the public functions of ckptcore."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from ckptcore_testing import assert_same_bits, bit_patterns
from ckptcore_torch.conversions import encoding_of
from torch._subclasses.fake_tensor import FakeTensorMode

import ckptcore
from ckptcore import Checkpointer
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.model import ArraySpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]

QUICK = ckptcore.Context(durability="none")
DTYPES = [
    member
    for name in sorted(dir(torch))
    if isinstance(member := getattr(torch, name), torch.dtype)
    and name == str(member).removeprefix("torch.")
    and not name.startswith(("q", "bits"))
    and ("complex32" not in name or hasattr(ml_dtypes, name))  # older versions of ml_dtypes lack it
]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return the dtype, the shape and the bytes of a tensor."""
    dense = torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.dtype.itemsize]
    return tensor.dtype, tuple(tensor.shape), dense.detach().view(integers).contiguous().numpy().tobytes()


def every_dtype() -> dict[str, torch.Tensor]:
    made = {}
    for dtype in DTYPES:
        encoding = encoding_of(dtype)
        for shape in ((), (5, 3), (0, 2)):
            array = bit_patterns(ArraySpec(shape, encoding.name))
            tensor = torch.from_numpy(array if encoding.carrier is None else array.view(encoding.carrier[1])).view(
                dtype
            )
            made[f"{dtype}{list(shape)}"] = tensor
            if len(shape) == 2:
                made[f"{dtype}{list(shape)}.T"] = tensor.t()
    return made


def like_meta(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in tree.items()}


def flipped(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return new tensors with other elements and the same strides."""
    made = {}
    for name, leaf in tree.items():
        integers = torch.view_as_real(leaf).view(torch.int64) if leaf.dtype is torch.complex128 else leaf
        carrier = encoding_of(leaf.dtype).carrier
        integers = integers if carrier is None else integers.view(carrier[0])
        other = torch.empty_strided(integers.shape, integers.stride(), dtype=integers.dtype).fill_(1)
        if leaf.dtype is torch.complex128:
            made[name] = torch.view_as_complex(other.view(torch.float64))
        else:
            made[name] = other if carrier is None else other.view(leaf.dtype)
    return made


def test_every_dtype_and_stride_is_restored(tmp_path: Path) -> None:
    tree = every_dtype()
    ckptcore.save(tmp_path / "c", tree, context=QUICK)
    for abstract in (like_meta(tree), tree):
        loaded = ckptcore.load(tmp_path / "c", abstract)
        assert {name: bits(leaf) for name, leaf in loaded.items()} == {name: bits(leaf) for name, leaf in tree.items()}
    target = flipped(tree)
    pointers = {name: leaf.data_ptr() for name, leaf in target.items()}
    ckptcore.load_into(tmp_path / "c", target)
    assert {name: bits(leaf) for name, leaf in target.items()} == {name: bits(leaf) for name, leaf in tree.items()}
    assert {name: leaf.data_ptr() for name, leaf in target.items()} == pointers
    assert ckptcore.verify(tmp_path / "c").ok


def test_asynchronous_save_stores_the_values_at_its_return(tmp_path: Path) -> None:
    tree = every_dtype()
    tree["large"] = torch.arange(3_000_000, dtype=torch.float32)
    expected = {name: bits(leaf) for name, leaf in tree.items()}
    handle = ckptcore.save_async(tmp_path / "c", tree, context=QUICK)
    for leaf in tree.values():
        carrier = encoding_of(leaf.dtype).carrier
        (leaf if carrier is None else leaf.view(carrier[0])).zero_()
    handle.result()
    loaded = ckptcore.load(tmp_path / "c", like_meta(tree))
    assert {name: bits(leaf) for name, leaf in loaded.items()} == expected


def test_numpy_and_pytorch_load_each_others_checkpoints(tmp_path: Path) -> None:
    tensors = {"half": torch.ones(3).bfloat16(), "eight": torch.ones(2, 2).to(torch.float8_e5m2), "n": torch.arange(3)}
    ckptcore.save(tmp_path / "torch", tensors, context=QUICK)
    arrays = ckptcore.load(tmp_path / "torch")
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "half": "bfloat16",
        "eight": "float8_e5m2",
        "n": "int64",
    }
    assert_same_bits(arrays["half"], np.ones(3, ml_dtypes.bfloat16), "half")
    ckptcore.save(tmp_path / "numpy", arrays, context=QUICK)
    back = ckptcore.load(tmp_path / "numpy", like_meta(tensors))
    assert {name: bits(leaf) for name, leaf in back.items()} == {name: bits(leaf) for name, leaf in tensors.items()}
    into = ckptcore.load_into(tmp_path / "torch", {name: np.zeros_like(array) for name, array in arrays.items()})
    for name, array in arrays.items():
        assert_same_bits(into[name], array, name)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 has no float4")
def test_dtypes_without_a_numpy_equivalent_load_as_uint8(tmp_path: Path) -> None:
    packed = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ckptcore.save(tmp_path / "c", {"packed": packed}, context=QUICK)
    assert ckptcore.load(tmp_path / "c")["packed"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TreeMismatchError, match=r"torch\.int4.*torch\.float4_e2m1fn_x2"):
        ckptcore.load(tmp_path / "c", {"packed": torch.empty(6, dtype=torch.int4, device="meta")})


def test_unsupported_leaves_are_refused_by_path_before_the_write(tmp_path: Path) -> None:
    state = {"ok": torch.ones(2), "deep": [torch.empty(2, dtype=torch.bits8), torch.ones(2, device="meta")]}
    with pytest.raises(UnsupportedLeafError, match=r"deep\[0\]: .*bits8.*deep\[1\]: a meta tensor"):
        ckptcore.save(tmp_path / "c", state, context=QUICK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_reference_to_a_tensor_remains_after_a_save(tmp_path: Path, asynchronous: bool) -> None:
    leaves = [torch.ones(3), torch.ones(1 << 20), torch.nn.Parameter(torch.ones(4, 4).t())]
    gone = [weakref.ref(leaf) for leaf in leaves]
    if asynchronous:
        ckptcore.save_async(tmp_path / "c", leaves, context=QUICK).result()
    else:
        ckptcore.save(tmp_path / "c", leaves, context=QUICK)
    del leaves
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_containers_are_restored(tmp_path: Path) -> None:
    state = {"size": torch.Size([2, 3]), "parts": OrderedDict(a=torch.ones(1)), "counts": Counter({3: 2})}
    ckptcore.save(tmp_path / "c", state, context=QUICK)
    loaded = ckptcore.load(tmp_path / "c", state)
    assert type(loaded["size"]) is torch.Size
    assert loaded["size"] == (2, 3)
    assert type(loaded["parts"]) is OrderedDict
    assert loaded["counts"] == Counter({3: 2})
    assert ckptcore.load(tmp_path / "c")["size"] == (2, 3)


# --- modules


class Tied(torch.nn.Module):
    """A network whose first and last layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.hidden = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(torch.relu(self.hidden(self.norm(self.embed(tokens)))))
        return output


def make_network(seed: int) -> Tied:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tied()


def state_bits(module: torch.nn.Module) -> dict[str, object]:
    return {name: bits(leaf) for name, leaf in module.state_dict().items()}


def test_a_module_is_saved_with_all_names_and_tied_weights_once(tmp_path: Path) -> None:
    module = make_network(0)
    ckptcore.save(tmp_path / "c", module, context=QUICK)
    metadata = ckptcore.metadata(tmp_path / "c")
    assert set(metadata.abstract) == set(module.state_dict())
    assert len(metadata.tree.aliases) == 1
    state = ckptcore.load(tmp_path / "c", module)
    assert isinstance(state, OrderedDict)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert state["embed.weight"].data_ptr() != module.embed.weight.data_ptr()
    assert state._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]  # set by PyTorch
    other = make_network(1)
    other.load_state_dict(state)
    assert state_bits(other) == state_bits(module)


def test_a_module_is_filled_in_place(tmp_path: Path) -> None:
    module, target = make_network(0), make_network(1)
    ckptcore.save(tmp_path / "c", {"model": module}, context=QUICK)
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in target.named_parameters()}
    result = ckptcore.load_into(tmp_path / "c", {"model": target})
    assert result["model"] is target
    assert state_bits(target) == state_bits(module)
    for name, parameter in target.named_parameters():
        assert parameter is before[name][0]
        assert parameter.data_ptr() == before[name][1]
        assert parameter.requires_grad
    assert target.head.weight is target.embed.weight


def test_module_on_the_meta_device_gets_memory(tmp_path: Path) -> None:
    module = make_network(0)
    ckptcore.save(tmp_path / "c", module, context=QUICK)
    with torch.device("meta"):
        target = Tied()
    ckptcore.load_into(tmp_path / "c", target)
    assert state_bits(target) == state_bits(module)
    assert target.head.weight is target.embed.weight
    assert isinstance(target.hidden.weight, torch.nn.Parameter)


def test_lazy_module_is_loaded_with_stored_shapes(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    ckptcore.save(tmp_path / "c", module, context=QUICK)
    target = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.ReLU())
    ckptcore.load_into(tmp_path / "c", target)
    assert state_bits(target) == state_bits(module)
    with pytest.raises(UnsupportedLeafError, match=r"weight.*lazy module.*call the module once"):
        ckptcore.save(tmp_path / "d", torch.nn.LazyLinear(2), context=QUICK)


def test_a_module_of_another_shape_is_refused_and_unchanged(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", torch.nn.Linear(3, 2), context=QUICK)
    target = torch.nn.Linear(4, 2)
    before = state_bits(target)
    with pytest.raises(TreeMismatchError, match=r"weight: shape: float32\[2, 4\] is requested, float32\[2, 3\]"):
        ckptcore.load_into(tmp_path / "c", target)
    assert state_bits(target) == before


# --- training


class Training:
    """A network, and all objects that a training step depends on."""

    def __init__(self, seed: int, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        self.network = make_network(seed)
        self.optimizer = optimizer(self.network.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4], gamma=0.5)
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def state(self) -> dict[str, object]:
        return {
            "network": self.network,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
        }

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            tokens = torch.randint(0, 7, (8,), generator=self.generator)
            loss = torch.nn.functional.cross_entropy(self.network(tokens), tokens)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch has no types here
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("used_before", [0, 2], ids=["new", "used"])
def test_training_resumes_bit_for_bit(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer], options: dict[str, Any], used_before: int
) -> None:
    training = Training(0, optimizer, **options)
    training.steps(3)
    ckptcore.save(tmp_path / "c", training.state, context=QUICK)
    expected = training.steps(4)
    resumed = Training(1, optimizer, **options)
    resumed.steps(used_before)
    ckptcore.load_into(tmp_path / "c", resumed.state)
    assert resumed.steps(4) == expected
    assert state_bits(resumed.network) == state_bits(training.network)


def test_a_load_of_a_new_optimizer_removes_the_states_of_the_target(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", Training(0, torch.optim.AdamW).optimizer, context=QUICK)
    used = Training(1, torch.optim.AdamW)
    used.steps(2)
    ckptcore.load_into(tmp_path / "c", used.optimizer)
    assert len(used.optimizer.state) == 0


def test_loads_fill_the_tensors_of_an_optimizer_in_place(tmp_path: Path) -> None:
    source, target = Training(0, torch.optim.AdamW), Training(1, torch.optim.AdamW)
    source.steps(2), target.steps(1)
    ckptcore.save(tmp_path / "c", source.optimizer, context=QUICK)
    before = [held for slots in target.optimizer.state.values() for held in slots.values()]
    ckptcore.load_into(tmp_path / "c", target.optimizer)
    after = [held for slots in target.optimizer.state.values() for held in slots.values()]
    assert all(first is second for first, second in zip(before, after, strict=True))
    expected = [held for slots in source.optimizer.state.values() for held in slots.values()]
    assert [bits(held) for held in after] == [bits(held) for held in expected]


def test_load_with_a_new_optimizer_returns_its_state_dict(tmp_path: Path) -> None:
    training = Training(0, torch.optim.AdamW)
    training.steps(2)
    ckptcore.save(tmp_path / "c", training.state, context=QUICK)
    new = Training(1, torch.optim.AdamW)
    loaded = ckptcore.load(tmp_path / "c", new.state)
    new.optimizer.load_state_dict(loaded["optimizer"])
    new.network.load_state_dict(loaded["network"])
    new.scheduler.load_state_dict(loaded["scheduler"])
    new.generator.set_state(loaded["generator"]["state"])
    assert new.steps(2) == training.steps(2)


@pytest.mark.parametrize(
    "parts",
    [
        lambda x: (x[:3], x[1:4]),
        lambda x: (x[:3], x[1:4].numpy()),
        lambda x: (x.as_strided((3,), (2,), 1), x[3:6]),
    ],
)
def test_a_target_whose_tensors_overlap_is_refused(parts: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": torch.zeros(3), "b": torch.ones(3)}, context=QUICK)
    memory = torch.full((8,), 7.0)
    first, second = parts(memory)
    with pytest.raises(TreeMismatchError, match="arrays that overlap in the target"):
        ckptcore.load_into(tmp_path / "c", {"a": first, "b": second})
    assert memory.eq(7).all()


def test_tensors_of_a_target_may_interleave(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": torch.zeros(4), "b": torch.ones(4)}, context=QUICK)
    memory = torch.full((8,), 7.0)
    ckptcore.load_into(tmp_path / "c", {"a": memory[::2], "b": memory[1::2]})
    assert memory.tolist() == [0, 1] * 4


def test_a_tensor_whose_elements_share_memory_is_replaced_or_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": torch.arange(3.0)}, context=QUICK)
    ckptcore.save(tmp_path / "d", torch.arange(3.0), context=QUICK)
    memory = torch.full((8,), 7.0)
    target = {"a": memory.as_strided((3,), (0,))}
    ckptcore.load_into(tmp_path / "c", target)
    assert target["a"].tolist() == [0, 1, 2] and memory.eq(7).all()
    with pytest.raises(TreeMismatchError, match="cannot be filled in place"):
        ckptcore.load_into(tmp_path / "d", memory.as_strided((3,), (0,)))
    assert memory.eq(7).all()


# --- tensors without data


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def freed_tensor() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def traced_tensor() -> torch.Tensor:
    """Return a tensor that `torch.func` passes to functions. It has no memory."""
    seen: list[torch.Tensor] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    torch.func.grad(record)(torch.ones(3))
    return seen[0]


def save_in_every_way(directory: Path, tree: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield functions that each save the tree in one way, and load it."""

    def with_checkpointer() -> Any:
        with Checkpointer(directory / "run") as checkpointer:
            checkpointer.save_blocking(1, tree)
            return checkpointer.load(1)

    def alone(save: Callable[..., Any], name: str) -> Any:
        handle = save(directory / name, tree)
        if handle is not None:
            handle.result()
        return ckptcore.load(directory / name, framework="torch")

    yield lambda: alone(ckptcore.save, "blocking")
    yield lambda: alone(ckptcore.save_async, "background")
    yield with_checkpointer


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0, device="meta"),
        lambda: torch.empty(0, 3, device="meta", dtype=torch.bfloat16),
        lambda: torch.nn.Parameter(torch.empty(0, device="meta")),
        lambda: torch.empty(0, device="meta", dtype=torch.complex64).conj(),
        lambda: torch._efficientzerotensor(0),
        lambda: torch.empty(0, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_without_elements_are_saved_in_any_form(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    leaf = make()
    for save in save_in_every_way(tmp_path, {"a": {"leaf": leaf}, "b": torch.ones(2)}):
        loaded = save()
        assert loaded["a"]["leaf"].shape == leaf.shape
        assert list(loaded["b"]) == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.empty(3, 4, device="meta").T,
        lambda: torch._efficientzerotensor(3),
        fake_tensor,
        freed_tensor,
        traced_tensor,
        lambda: torch._to_functional_tensor(torch.ones(3)),
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        lambda: torch.nn.LazyLinear(3).weight,
    ],
)
@pytest.mark.filterwarnings("ignore")  # some features are experimental or deprecated
def test_tensors_without_data_are_refused_by_path(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    for save in save_in_every_way(tmp_path, {"a": {"leaf": make()}, "b": torch.ones(2)}):
        with pytest.raises(UnsupportedLeafError, match=r"a/leaf: .*; .*Nothing was written"):
            save()
    assert not list(tmp_path.rglob("*.safetensors"))
