"""Tensors made of several arrays: subclasses, sparse and quantized tensors. Saves store the parts of each tensor.

Loads build a tensor of the kind that the caller requests.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests
from ckptcore_torch.sparse_tensors import QuantizedHandler, SparseHandler
from ckptcore_torch.stored_parts import flat_shape
from ckptcore_torch.tensor_parts import SubclassPartsHandler
from torch.testing._internal.two_tensor import TwoTensor

import ckptcore
from ckptcore import select
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError

LAYOUTS = ("zarr3", "ocdbt", "dcp", "safetensors")


class Rounding(enum.Enum):
    DOWN = 1
    UP = 2


@dataclasses.dataclass(frozen=True)
class Options:
    bits: int
    rounding: Rounding


class Scaled(torch.Tensor):
    """A tensor subclass of integers and a scale, with options of several types. `detach` is its only operation."""

    codes: torch.Tensor
    scale: torch.Tensor
    options: Options

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, options: Options, dtype: torch.dtype) -> Scaled:  # noqa: PYI034  # a static method
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, options: Options, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.options = codes, scale, options

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        context = {"options": self.options, "dtype": self.dtype, "shape": tuple(self.shape), "device": self.device}
        return ["codes", "scale"], context

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(parts["codes"], parts["scale"], context["options"], context["dtype"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's own subclasses do this, too
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (held,) = args
            return cls(held.codes, held.scale, held.options, held.dtype)
        raise NotImplementedError(f"{func} of a Scaled")


def scaled(seed: int, *, bits: int = 4, columns: int = 6, dtype: torch.dtype = torch.float32) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (4, columns), generator=generator, dtype=torch.int8)
    return Scaled(codes, torch.rand(4, 1, generator=generator), Options(bits, Rounding.UP), dtype)


two_of: Any = TwoTensor


def two(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return two_of(torch.rand(3, 2, generator=generator), torch.rand(3, 2, generator=generator))


def nested(seed: int) -> Any:
    return two_of(two(seed), two(seed + 10))


def bits(value: Any) -> Any:
    """Return the content of a tensor of any kind in a comparable form."""
    if isinstance(value, Scaled):
        return bits(value.codes), bits(value.scale), value.options, value.dtype
    if isinstance(value, TwoTensor):
        return bits(value.a), bits(value.b)
    if value.is_quantized:
        per_tensor = value.qscheme() == torch.per_tensor_affine
        zero, scale = (value.q_zero_point(), value.q_scale()) if per_tensor else (0, 0)
        return value.int_repr().tolist(), value.dequantize().tolist(), value.dtype, zero, scale
    if value.layout is torch.sparse_coo:
        return value._indices().tolist(), value._values().tolist(), value.is_coalesced(), value.shape
    if value.layout is not torch.strided:
        return value.layout, value.values().tolist(), value.to_dense().tolist()
    return value.dtype, value.resolve_conj().resolve_neg().tolist()


def per_tensor(seed: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    values = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch deprecates these tensors
        return torch.quantize_per_tensor(values, 0.1 + seed, 3, dtype)


def per_channel(seed: int) -> torch.Tensor:
    values = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    scales, zeros = torch.tensor([0.1, 0.2, 0.3 + seed], dtype=torch.float64), torch.tensor([0, 1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)


def coo(seed: int, *, coalesced: bool = True) -> torch.Tensor:
    rows = [0, 1, 1] if seed == 0 else [2]
    values = torch.arange(1.0, len(rows) + 1)
    made = torch.sparse_coo_tensor(torch.tensor([rows, rows]), values, (4, 4), check_invariants=True)
    return made.coalesce() if coalesced else made


def hybrid(seed: int) -> torch.Tensor:
    values = torch.arange(6.0 if seed == 0 else 3.0).view(-1, 3)
    return torch.sparse_coo_tensor(torch.arange(len(values))[None], values, (5, 3), check_invariants=True).coalesce()


def compressed(layout: torch.layout) -> Callable[[int], torch.Tensor]:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None

    def make(seed: int) -> torch.Tensor:
        dense = torch.zeros(4, 4)
        dense.view(-1)[[0, 5, 9] if seed == 0 else [15]] = torch.tensor([1.0, 2, 3] if seed == 0 else [4.0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that the layouts are in beta
            return dense.to_sparse(layout=layout, blocksize=blocks)

    return make


MAKERS: dict[str, Callable[[int], Any]] = {
    "subclass": scaled,
    "subclass of two": two,
    "nested subclass": nested,
    "coo": coo,
    "coo, not coalesced": lambda seed: coo(seed, coalesced=False),
    "hybrid coo": hybrid,
    "csr": compressed(torch.sparse_csr),
    "csc": compressed(torch.sparse_csc),
    "bsr": compressed(torch.sparse_bsr),
    "bsc": compressed(torch.sparse_bsc),
    "per tensor": per_tensor,
    "per tensor, signed": lambda seed: per_tensor(seed, torch.qint8),
    "per tensor, 32 bits": lambda seed: per_tensor(seed, torch.qint32),
    "per channel": per_channel,
    "conjugated": lambda seed: torch.tensor([1 + 2j * (seed + 1)]).conj(),
    "negated": lambda seed: torch.tensor([1 + 2j * (seed + 1)]).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.brings("tensor subclasses, sparse, quantised, conjugated tensors", "torch", "same")
def test_tensors_of_every_kind_come_back_as_they_were(layout: str, tmp_path: Path) -> None:
    state = {name: make(0) for name, make in MAKERS.items()}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    expected = {name: bits(value) for name, value in state.items()}
    template = {name: make(1) for name, make in MAKERS.items()}
    loaded = ckptcore.load(tmp_path / "c", template)
    again = ckptcore.load(tmp_path / "c", ckptcore.abstract(template))
    for name, make in MAKERS.items():
        assert bits(loaded[name]) == bits(again[name]) == expected[name], name
        assert bits(template[name]) == bits(make(1)), f"{name} of the template has changed"
        assert (
            type(loaded[name]) is type(again[name]) is type(state[name]) and loaded[name].layout == state[name].layout
        )
    held = dict(template)
    ckptcore.load_into(tmp_path / "c", template)
    for name in MAKERS:
        assert template[name] is held[name] and bits(held[name]) == expected[name], name
    plain: Any = ckptcore.load(tmp_path / "c")
    assert plain["subclass"].keys() == {"codes", "scale", "__parts__"}
    assert np.array_equal(plain["subclass"]["codes"], state["subclass"].codes.numpy())
    assert plain["coo"].keys() == {"indices", "values", "__parts__"}
    assert plain["csr"].keys() == {"crow_indices", "col_indices", "values", "__parts__"}
    assert plain["per tensor"]["scale"] == state["per tensor"].q_scale()
    ckptcore.save(tmp_path / "again", plain, layout=layout)
    assert bits(ckptcore.load(tmp_path / "again", template)["subclass"]) == expected["subclass"]


class TestSubclasses(CheckpointableHandlerTests):
    """Conformance tests of subclasses that consist of tensors."""

    handler = SubclassPartsHandler()
    examples = (
        CheckpointableExample("scaled", lambda: scaled(0), lambda: scaled(1), bits),
        CheckpointableExample("two", lambda: two(0), lambda: two(1), bits),
    )


class TestSparse(CheckpointableHandlerTests):
    """Conformance tests of sparse tensors."""

    handler = SparseHandler()
    examples = (
        CheckpointableExample("coo", lambda: coo(0), lambda: coo(1), bits),
        CheckpointableExample(
            "csr", lambda: compressed(torch.sparse_csr)(0), lambda: compressed(torch.sparse_csr)(1), bits
        ),
    )


class TestQuantized(CheckpointableHandlerTests):
    """Conformance tests of quantized tensors."""

    handler = QuantizedHandler()
    examples = (
        CheckpointableExample("per tensor", lambda: per_tensor(0), lambda: per_tensor(1), bits),
        CheckpointableExample("per channel", lambda: per_channel(0), lambda: per_channel(1), bits),
    )


@pytest.mark.parametrize(
    ("stored", "requested", "message"),
    [
        (scaled(0), scaled(1, bits=8), r"w: context.options: .*'bits': 8.* is requested, .*'bits': 4.* is stored"),
        (scaled(0), scaled(1, columns=12), r"w: shape: \[4, 12\] is requested, \[4, 6\] is stored"),
        (scaled(0), two(0), "w: type: TwoTensor is requested, Scaled is stored"),
        (torch.ones(4, 6), scaled(0), "w: the parts of a Scaled are requested, an array of float32 is stored"),
        (5, scaled(0), "w: the parts of a Scaled are requested, another value is stored"),
        (coo(0), compressed(torch.sparse_csr)(0), "w: type: torch.sparse_csr is requested, torch.sparse_coo is stored"),
        (coo(0), coo(0).double(), "w: values: float64 is requested, float32 is stored"),
        (torch.eye(3).to_sparse(), coo(0), r"w: shape: \[4, 4\] is requested, \[3, 3\] is stored"),
        (torch.eye(4), coo(0), "w: the parts of a torch.sparse_coo are requested, an array of float32 is stored"),
        (per_tensor(0), per_tensor(0, torch.qint8), "w: type: torch.qint8 is requested, torch.quint8 is stored"),
        (per_tensor(0, torch.qint8), per_channel(0), "w: axis: 0 is requested, None is stored"),
    ],
)
def test_other_parts_are_refused_before_anything_changes(
    stored: Any, requested: Any, message: str, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "c", {"first": torch.ones(3), "w": stored})
    target = {"first": torch.zeros(3), "w": requested}
    before = bits(requested)
    for load in (ckptcore.load, ckptcore.load_into):
        with pytest.raises(TreeMismatchError, match=f"^{message}"):
            load(tmp_path / "c", target)
    changes: list[Any] = [{"cast": "narrowing"}, {"shapes": frozenset({"pad", "truncate"})}]
    for options in changes:
        with pytest.raises(TreeMismatchError):
            ckptcore.load(tmp_path / "c", target, matching=ckptcore.Matching(**options))
    assert not target["first"].any() and bits(requested) == before


def test_loaded_subclasses_keep_the_outer_dtype_of_the_request(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": scaled(0)})
    loaded = ckptcore.load(tmp_path / "c", {"w": scaled(1, dtype=torch.bfloat16)})["w"]
    assert loaded.dtype == torch.bfloat16 and bits(loaded)[:3] == bits(scaled(0))[:3]


def test_targets_may_have_strided_parts_or_be_parameters(tmp_path: Path) -> None:
    value = scaled(0)
    ckptcore.save(tmp_path / "c", {"w": value})
    strided = Scaled(torch.zeros(6, 4, dtype=torch.int8).t(), torch.zeros(1, 4).t(), value.options, torch.float32)
    parameter = torch.nn.Parameter(scaled(2))
    target = {"w": strided}
    ckptcore.load_into(tmp_path / "c", target)
    assert bits(strided) == bits(value) and not strided.codes.is_contiguous()
    loaded = ckptcore.load(tmp_path / "c", {"w": parameter})["w"]
    assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad and bits(loaded) == bits(value)


def test_tied_subclasses_are_stored_once_and_parts_can_be_skipped(tmp_path: Path) -> None:
    value = scaled(0)
    ckptcore.save(tmp_path / "c", {"a": value, "b": value.detach(), "c": torch.ones(2)})
    assert len(ckptcore.metadata(tmp_path / "c").tree.aliases) == 2
    template = {"a": scaled(1), "b": scaled(1), "c": torch.zeros(2)}
    assert ckptcore.load(tmp_path / "c", {**template, "a": ...})["a"] is ...
    chosen = ckptcore.load(tmp_path / "c", template, select=select.names("c", "b"))
    assert chosen["a"] is ... and bits(chosen["b"]) == bits(value)


def test_tensors_of_all_kinds_in_objects_and_checkpointables(tmp_path: Path) -> None:
    class Average:
        def __init__(self, **shadows: Any) -> None:
            self.shadows = shadows

        def state_dict(self) -> dict[str, Any]:
            return dict(self.shadows)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadows = state

    ckptcore.save(tmp_path / "c", {"ema": Average(a=scaled(0), b=coo(0))})
    target = Average(a=scaled(1), b=coo(1))
    ckptcore.load_into(tmp_path / "c", {"ema": target})
    assert bits(target.shadows["a"]) == bits(scaled(0)) and bits(target.shadows["b"]) == bits(coo(0))
    tree = {"w": [coo(0)]}
    ckptcore.save_checkpointables(tmp_path / "several", tree)
    template = {"w": [coo(1)]}
    loaded = ckptcore.load_checkpointables(tmp_path / "several", template)
    assert bits(loaded["w"][0]) == bits(coo(0)) and bits(template["w"][0]) == bits(coo(1)), (
        "the load changed the template"
    )


class Graph(torch.nn.Module):
    """A module with two sparse buffers and a quantized buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(seed)))
        self.register_buffer("adjacency", coo(seed))
        self.register_buffer("transposed", compressed(torch.sparse_csr)(seed))
        self.register_buffer("table", per_tensor(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.brings("module with sparse and quantised buffers", "torch", "same")
def test_sparse_buffers_of_a_module_come_back(layout: str, tmp_path: Path) -> None:
    module, target = Graph(0), Graph(1)
    ckptcore.save(tmp_path / "c", {"m": module}, layout=layout)
    ckptcore.load_into(tmp_path / "c", {"m": target})
    for (name, saved), (_, loaded) in zip(module.state_dict().items(), target.state_dict().items(), strict=True):
        assert bits(saved) == bits(loaded), name


@pytest.mark.brings("`Embedding(sparse=True)` with `SparseAdam`", "torch", "same")
def test_an_embedding_with_sparse_gradients_continues(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Embedding(10, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(3):
            loss = model(torch.tensor([number, 2, 5])).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = job(0)
    train(model, optimizer)
    gradient = model.weight.grad
    assert isinstance(gradient, torch.Tensor) and gradient.is_sparse
    ckptcore.save(tmp_path / "c", {"m": model, "o": optimizer, "gradient": gradient})
    expected = train(model, optimizer)
    other, its = job(1)
    loaded = {"m": other, "o": its, "gradient": torch.zeros(10, 3).to_sparse(1)}
    ckptcore.load_into(tmp_path / "c", loaded)
    assert train(other, its) == expected


def test_invalid_parts_of_a_sparse_tensor_are_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": coo(0)})
    plain: Any = ckptcore.load(tmp_path / "c")
    plain["w"]["indices"] = plain["w"]["indices"] + 100
    ckptcore.save(tmp_path / "bad", plain)
    with pytest.raises(CorruptCheckpointError, match=r"indices"):
        ckptcore.load(tmp_path / "bad", {"w": coo(1)})
    plain["w"]["__parts__"] = "[1"
    ckptcore.save(tmp_path / "worse", plain)
    with pytest.raises(CorruptCheckpointError, match="the text '__parts__' of the parts of a tensor cannot be read"):
        ckptcore.load(tmp_path / "worse", {"w": coo(1)})


@pytest.mark.brings("nested tensors", "torch", "refused")
def test_tensors_that_are_refused_can_be_saved_as_their_advice_says(tmp_path: Path) -> None:
    jagged: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * 2], layout=torch.jagged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the tensors are a prototype
        padded = torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * 2])
    parts, all_parts = (
        r"save its \.values\(\) and \.offsets\(\), or list\(tensor\.unbind\(\)\)",
        r"save list\(tensor\.unbind",
    )
    for tensor, text in ((jagged, parts), (padded, all_parts)):
        with pytest.raises(UnsupportedLeafError, match=text):
            ckptcore.save(tmp_path / "c", {"w": tensor})
    state = {
        "values": jagged.values(),
        "offsets": jagged.offsets(),
        "unbound": list(padded.unbind()),
        "jagged": list(jagged.unbind()),
    }
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    again = torch.nested.nested_tensor_from_jagged(loaded["values"], loaded["offsets"])
    for made in (again, *(torch.nested.nested_tensor(loaded[name]) for name in ("unbound", "jagged"))):
        assert [part.tolist() for part in made.unbind()] == [[1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((32, 1024), 256, (32, 4)),  # blocks within rows
        ((64, 16, 3, 3), 48, (64, 3)),  # blocks within the flattened rest of a row
        ((64, 64), 256, (16,)),  # blocks of several rows
        ((512,), 256, (2,)),
        ((2, 8, 4), 4, (2, 8, 1)),
        ((3, 64), 128, None),  # blocks that end within a row
        ((513,), 256, None),
    ],
)
def test_flat_parts_get_a_shape_that_shards_can_divide(shape: Any, block: int, expected: Any) -> None:
    assert flat_shape(shape, block) == expected


def on_meta(value: Any) -> Any:
    """Return the same kind of tensor on the meta device."""
    if isinstance(value, Scaled):
        return Scaled(value.codes.to("meta"), value.scale.to("meta"), value.options, value.dtype)
    if isinstance(value, TwoTensor):
        return two_of(on_meta(value.a), on_meta(value.b))
    return value.to("meta")


META = [
    ("sparse", lambda: torch.eye(3).to_sparse()),
    ("compressed", lambda: torch.eye(3).to_sparse_csr()),
    ("composed", lambda: scaled(1)),
    ("nested", lambda: nested(1)),
]


@pytest.mark.parametrize(("name", "make"), META, ids=[name for name, _ in META])
def test_a_tensor_on_meta_is_replaced_in_its_container(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    """A tensor on meta has no memory to fill, so the load puts a new tensor into the container."""
    del name
    saved, plain = make(), torch.arange(3.0)
    ckptcore.save(tmp_path / "c", {"w": saved, "inner": [saved], "plain": plain})
    meta, target = on_meta(saved), torch.zeros(3)
    into: dict[str, Any] = {"w": meta, "inner": [on_meta(saved)], "plain": target}
    ckptcore.load_into(tmp_path / "c", into)
    assert bits(into["w"]) == bits(into["inner"][0]) == bits(saved) and type(into["w"]) is type(saved)
    assert into["plain"] is target and bits(target) == bits(plain)
    assert bits(ckptcore.load(tmp_path / "c", {**into, "w": on_meta(saved)})["w"]) == bits(saved)
    alone = {"w": on_meta(saved), "inner": ckptcore.PLACEHOLDER, "plain": ckptcore.PLACEHOLDER}
    ckptcore.load_into(tmp_path / "c", alone)
    assert bits(alone["w"]) == bits(saved)


@pytest.mark.parametrize(("name", "make"), META, ids=[name for name, _ in META])
def test_a_tensor_on_meta_without_a_container_is_refused(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    del name
    saved = make()
    ckptcore.save(tmp_path / "c", saved)
    with pytest.raises(
        TreeMismatchError, match=r"cannot be filled in place, .*Use the result of load\(\), or put the leaf"
    ):
        ckptcore.load_into(tmp_path / "c", on_meta(saved))
    assert bits(ckptcore.load(tmp_path / "c", on_meta(saved))) == bits(saved)


def test_a_tensor_on_meta_that_is_not_stored_is_kept(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"plain": torch.arange(3.0)})
    meta = on_meta(torch.eye(3).to_sparse())
    into = {"w": meta, "plain": torch.zeros(3)}
    ckptcore.load_into(tmp_path / "c", into, matching=ckptcore.Matching(missing="keep"))
    assert into["w"] is meta and bits(into["plain"]) == bits(torch.arange(3.0))
