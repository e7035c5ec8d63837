"""Conversions of tensors of every dtype, stride and kind to NumPy and back, bit for bit."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
import pytest
import torch
from ckptcore_testing import SHAPES, LateHostMemory, LeafExample, LeafHandlerTests, assert_same_bits, bit_patterns
from ckptcore_torch.conversions import FRAMEWORK, encoding_of
from ckptcore_torch.leaf_handlers import leaf_handler_of_type
from ckptcore_torch.tensors import SubclassHandler, TensorHandler, same_memory
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import ckptcore
from ckptcore.errors import PluginError, TargetUndefinedError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, ValueRecord

# PyTorch warns about these kinds of tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype"),
]

DTYPES = [
    member
    for name in sorted(dir(torch))
    if isinstance(member := getattr(torch, name), torch.dtype)
    and name == str(member).removeprefix("torch.")
    and not name.startswith(("q", "bits"))
    and ("complex32" not in name or hasattr(ml_dtypes, name))  # older versions of ml_dtypes lack it
]
FLOAT4: Any = getattr(torch, "float4_e2m1fn_x2", None)
"""None before PyTorch 2.8."""

needs_float4 = pytest.mark.skipif(FLOAT4 is None, reason="PyTorch before 2.8 has no float4")

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an integer view of the memory, without the handler."""
    tensor = tensor.detach()
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def elements_of(tensor: torch.Tensor) -> HostArray:
    """Copy the elements, without the handler."""
    if tensor.dtype.is_complex and tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    encoding = encoding_of(tensor.dtype)
    array: HostArray = integers_of(tensor.cpu()).contiguous().numpy().view(encoding.host)
    return array.reshape(tuple(tensor.shape)).copy()


def flip(tensor: torch.Tensor) -> None:
    """Change every element in place."""
    if tensor.is_conj() or tensor.is_neg():
        tensor.mul_(2)
        return
    integers_of(tensor).bitwise_xor_(1)


def tensor_of(array: HostArray, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in new memory with the bits of an array, without the handler."""
    if dtype is torch.complex128:
        return torch.from_numpy(array.copy())
    integers = array.view(np.dtype(f"i{dtype.itemsize}") if dtype.itemsize > 1 else np.uint8)
    return torch.from_numpy(integers.copy()).view(dtype)


def pattern(dtype: torch.dtype, shape: tuple[int, ...]) -> HostArray:
    """Return elements with many bit patterns, as bytes if NumPy lacks the dtype."""
    return bit_patterns(ArraySpec(shape, encoding_of(dtype).name))


def example(name: str, make: Callable[[], torch.Tensor], *, mutable: bool = True) -> LeafExample:
    """Return an example whose abstract leaf is a meta tensor."""
    return LeafExample(
        name,
        make,
        elements_of(make()),
        elements_of,
        abstracts=[lambda: torch.empty(make().shape, dtype=make().dtype, device="meta")],
        mutate=flip if mutable else None,
    )


def _dtype_examples() -> list[LeafExample]:
    made = []
    for dtype in DTYPES:
        for shape in ((), (3, 4)):
            array = pattern(dtype, shape)
            name = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            made.append(example(name, lambda array=array, dtype=dtype: tensor_of(array, dtype)))
    return made


def _shape_examples() -> list[LeafExample]:
    return [
        example(f"shape{list(shape)}", lambda shape=shape: tensor_of(pattern(torch.bfloat16, shape), torch.bfloat16))
        for shape in SHAPES
    ]


def _matrix() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


def _complex() -> torch.Tensor:
    return torch.view_as_complex(torch.arange(1, 13, dtype=torch.float32).reshape(6, 2))


STRIDED = [
    example("transposed", lambda: _matrix().t()),
    example("transposed bfloat16", lambda: _matrix().bfloat16().t()),
    example("transposed float8", lambda: _matrix().to(torch.float8_e5m2).t()),
    example("steps", lambda: _matrix()[::2, 1::3]),
    example("offset", lambda: _matrix()[2]),
    example("channels last", lambda: torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    example("expanded", lambda: torch.arange(5.0).expand(3, 5), mutable=False),
    example("expanded scalar", lambda: torch.tensor(2.5).expand(2, 2), mutable=False),
    example("sliding window", lambda: torch.arange(9.0).unfold(0, 4, 2), mutable=False),
    example("conjugated", lambda: _complex().conj()),
    example("conjugated transposed", lambda: _complex().reshape(2, 3).mH),
    example("negated", lambda: _complex().conj().imag),
    example("requires grad", lambda: _matrix().requires_grad_()),
    example("not a leaf of autograd", lambda: _matrix().requires_grad_() * 2),
    example("parameter", lambda: torch.nn.Parameter(_matrix())),
    example("frozen parameter", lambda: torch.nn.Parameter(_matrix(), requires_grad=False)),
    example("integer parameter", lambda: torch.nn.Parameter(torch.arange(4), requires_grad=False)),
    example("buffer", lambda: torch.ones(3).mul_(0.1)),
    example("view of a view", lambda: _matrix().view(2, 2, 6)[1].t()[1:]),
]


def _sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.eye(4)
    return dense.to_sparse(layout=layout, blocksize=(2, 2) if "bs" in str(layout) else None)


class TestTensorsConform(LeafHandlerTests):
    """Conformance tests of every dtype, shape and stride."""

    handler = TensorHandler()
    examples = (*_dtype_examples(), *_shape_examples(), *STRIDED)
    unsupported = (
        lambda: _sparse(torch.sparse_coo),
        lambda: _sparse(torch.sparse_csr),
        lambda: _sparse(torch.sparse_bsc),
        lambda: torch.eye(2).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.empty(3, dtype=torch.bits8),
    )


class Tagged(torch.Tensor):
    """A tensor subclass in plain memory, with an attribute."""

    tag: str


class Watched(torch.Tensor):
    """A tensor subclass that raises an error on every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called through the subclass")


def _tagged() -> torch.Tensor:
    made = _matrix().as_subclass(Tagged)
    made.tag = "kept"
    return made


class TestSubclassesConform(LeafHandlerTests):
    """Conformance tests of subclasses."""

    handler = SubclassHandler()
    examples = (
        LeafExample(
            "tagged", _tagged, _matrix().numpy(), lambda leaf: elements_of(leaf.as_subclass(torch.Tensor)), mutate=flip
        ),
    )
    unsupported = (
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch.nn.UninitializedBuffer(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    )


PLAIN = TensorHandler()
SUBCLASSES = SubclassHandler()


def boxed(array: HostArray) -> list[tuple[Box, HostArray]]:
    return [(Box.whole(array.shape), array)]


def record_of(leaf: torch.Tensor) -> ArrayRecord:
    record = PLAIN.describe(leaf)
    assert isinstance(record, ArrayRecord)
    return record


def view_of(leaf: torch.Tensor) -> HostArray:
    return PLAIN.view_on_host(leaf, [Box.whole(tuple(leaf.shape))])[0].result()


def address_of(array: HostArray) -> int:
    address = array.__array_interface__["data"][0]
    assert isinstance(address, int)
    return address


# --- to the host


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_a_host_view_shares_the_memory_of_the_tensor(dtype: torch.dtype, transposed: bool) -> None:
    leaf = tensor_of(pattern(dtype, (3, 4)), dtype)
    leaf = leaf.t() if transposed else leaf
    array = view_of(leaf)
    assert address_of(array) == leaf.data_ptr()
    assert array.strides == tuple(stride * dtype.itemsize for stride in leaf.stride())


def test_a_host_view_leaves_a_conjugated_tensor_unchanged() -> None:
    leaf = _complex().conj()
    view_of(leaf)
    assert leaf.is_conj()


def test_no_reference_to_a_saved_tensor_remains() -> None:
    leaf = torch.nn.Parameter(torch.ones(4, 4))
    gone = weakref.ref(leaf)
    memory = LateHostMemory()
    box = Box.whole((4, 4))
    PLAIN.describe(leaf), PLAIN.identity(leaf), PLAIN.shards(leaf, 0, 1)
    copies = PLAIN.copy_to_host(leaf, [box], memory)
    views = PLAIN.view_on_host(leaf, [box])
    for pending in (*copies, *views):
        pending.result()
    del leaf, pending, copies, views
    gc.collect()
    assert gone() is None


# --- tensors that cannot be saved


def test_meta_tensor_describes_a_load_and_cannot_be_saved() -> None:
    leaf = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    assert record_of(leaf) == ArrayRecord(ArraySpec((2, 3), "bfloat16"), notes=FRAMEWORK)
    for use in (
        lambda: PLAIN.shards(leaf, 0, 1),
        lambda: PLAIN.view_on_host(leaf, [Box.whole((2, 3))]),
    ):
        with pytest.raises(UnsupportedLeafError, match="a meta tensor has no elements"):
            use()


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    leaf = torch.ones(5)
    leaf.untyped_storage().resize_(0)
    assert PLAIN.identity(leaf) is None
    with pytest.raises(UnsupportedLeafError, match="storage of this tensor was freed"):
        PLAIN.shards(leaf, 0, 1)


def test_load_into_a_tensor_with_freed_storage_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", {"w": torch.ones(3)})
    leaf = torch.zeros(3)
    leaf.untyped_storage().resize_(0)
    with pytest.raises(TargetUndefinedError, match="w: the storage of this tensor was freed.*gather the parameters"):
        ckptcore.load_into(tmp_path / "x", {"w": leaf})


class Opaque(torch.Tensor):
    """A wrapper subclass that raises an error on every operation."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} is not for this tensor")


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "masked": (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), r"\.get_data\(\) and \.get_mask\(\)"),
    "opaque": (lambda: Opaque((3,)), "Opaque is not one array in memory .*save the tensors that it is composed of"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"\.unbind\(\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"\.unbind\(\)",
    ),
    "uninitialized": (torch.nn.UninitializedParameter, "call the module once"),
    "fake": (_fake, "save the real tensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "save the real tensor"),
    "zeros": (lambda: torch._efficientzerotensor((3,)), "the storage of this tensor was freed"),
}
ABSTRACT = ("fake", "meta", "zeros")
"""Kinds of `REFUSED` that loads accept as abstract tensors."""


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_tensors_are_refused_with_path_and_remedy(kind: str, tmp_path: Path) -> None:
    make, advice = REFUSED[kind]
    leaf = make()
    for save in (ckptcore.save, ckptcore.save_async):
        with pytest.raises(UnsupportedLeafError, match=f"^x/w: .*{advice}"):
            save(tmp_path / "x", {"x": {"w": leaf}})
    with pytest.raises(UnsupportedLeafError, match=f"^in 'x': w: .*{advice}"):
        ckptcore.save_checkpointables(tmp_path / "x", {"x": {"w": leaf}})
    assert not (tmp_path / "x").exists()
    if kind not in ABSTRACT:
        ckptcore.save(tmp_path / "x", {"x": {"w": torch.ones(3)}})
        for load in (ckptcore.load, ckptcore.load_into):
            with pytest.raises(UnsupportedLeafError, match=f"^x/w: .*{advice}"):
                load(tmp_path / "x", {"x": {"w": leaf}})
        with pytest.raises(UnsupportedLeafError, match=f"x/w: .*{advice}"):
            ckptcore.abstract({"x": {"w": leaf}})


def test_a_functorch_wrapper_is_refused() -> None:
    def look(leaf: torch.Tensor) -> torch.Tensor:
        assert PLAIN.identity(leaf) is None
        with pytest.raises(UnsupportedLeafError, match="without memory"):
            PLAIN.shards(leaf, 0, 1)
        return leaf

    torch.vmap(look)(torch.ones(2, 3))


def test_a_quantized_tensor_is_refused_with_advice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns once in a process that these tensors are deprecated
        leaf = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedLeafError, match=r"scale.*int_repr"):
        PLAIN.describe(leaf)


def test_a_wrapper_of_tensors_is_refused_by_name() -> None:
    class Pair(torch.Tensor):
        def __tensor_flatten__(self) -> Any:
            raise NotImplementedError

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    made = torch.Tensor._make_wrapper_subclass(Pair, (2, 2))  # type: ignore[attr-defined]  # PyTorch creates wrappers in this way
    with pytest.raises(UnsupportedLeafError, match=r"Pair is composed of other tensors.*__tensor_flatten__"):
        SUBCLASSES.describe(made)


def test_the_handler_calls_no_methods_of_a_subclass() -> None:
    leaf = torch.arange(6.0).as_subclass(Watched)
    record = SUBCLASSES.describe(leaf)
    assert isinstance(record, ArrayRecord)
    box = SUBCLASSES.shards(leaf, 0, 1)[0].box
    (view,) = SUBCLASSES.view_on_host(leaf, [box])
    assert view.result().tolist() == [0, 1, 2, 3, 4, 5]
    assert SUBCLASSES.fill(leaf, record, boxed(np.full(6, 7, np.float32))) is True
    with torch._C.DisableTorchFunctionSubclass():
        assert leaf.as_subclass(torch.Tensor).tolist() == [7] * 6


# --- ties


def test_views_of_the_same_elements_have_the_same_identity() -> None:
    base = torch.arange(12.0)
    same = [base, base.detach(), base.view(12), torch.nn.Parameter(base)]
    assert len({PLAIN.identity(leaf) for leaf in same}) == 1
    different = [
        base, base[1:], base[:11], base.view(3, 4), base.view(3, 4).t(), base.view(torch.int32), base.clone(),
        base.view(6, 2), torch.view_as_complex(base.view(6, 2)), torch.view_as_complex(base.view(6, 2)).conj(),
    ]  # fmt: skip
    assert len({PLAIN.identity(leaf) for leaf in different}) == len(different)


def test_tensors_without_elements_have_no_identity() -> None:
    base = torch.ones(4)
    for leaf in (base[:0], base[4:], torch.empty(0), torch.empty(0, 3, device="meta")):
        assert PLAIN.identity(leaf) is None


def test_identity_of_meta_tensors_survives_a_state_dict() -> None:
    with torch.device("meta"):
        tied, other = torch.nn.Parameter(torch.empty(3)), torch.nn.Parameter(torch.empty(3))
    assert PLAIN.identity(tied.detach()) == PLAIN.identity(tied.detach()) is not None
    assert PLAIN.identity(tied) != PLAIN.identity(other)


def test_same_memory_compares_addresses_and_dtypes() -> None:
    base = torch.arange(4.0)
    assert same_memory(base, base.detach())
    assert same_memory(torch.empty(0), torch.empty(0))
    assert not same_memory(torch.empty(0), torch.empty(0, dtype=torch.int8))
    assert not same_memory(base, base.clone())
    assert not same_memory(base, base.numpy())
    meta = torch.empty(2, device="meta")
    assert same_memory(meta, meta)
    assert not same_memory(meta, meta.detach())


# --- build


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_build_uses_the_memory_of_the_array(dtype: torch.dtype) -> None:
    array = pattern(dtype, (3, 4)).copy()
    abstract = torch.empty((3, 4), dtype=dtype, device="meta")
    built = PLAIN.build(abstract, record_of(abstract), boxed(array))
    assert isinstance(built, torch.Tensor)
    assert (built.dtype, built.device.type, built.data_ptr()) == (dtype, "cpu", address_of(array))
    expected = array.copy()
    kept = weakref.ref(array)
    del array
    gc.collect()
    assert kept() is not None, "the tensor does not keep its memory alive"
    assert_same_bits(elements_of(built), expected, "after the last reference to the array was deleted")


def test_build_copies_arrays_that_are_not_writable() -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    abstract = torch.empty(4)
    built = PLAIN.build(abstract, record_of(abstract), boxed(array))
    assert isinstance(built, torch.Tensor)
    built.zero_()
    assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_build_returns_the_type_of_the_abstract_leaf(device: str, requires_grad: bool) -> None:
    tensor = torch.empty(3, device=device, requires_grad=requires_grad)
    parameter = torch.nn.Parameter(torch.empty(3, device=device), requires_grad=requires_grad)
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(3), requires_grad=requires_grad)
    for abstract, handler in ((tensor, PLAIN), (parameter, PLAIN), (fake, SUBCLASSES)):
        built = handler.build(abstract, ArrayRecord(ArraySpec((3,), "float32")), boxed(np.ones(3, np.float32)))
        assert type(built) is (torch.Tensor if abstract is tensor else torch.nn.Parameter)
        assert isinstance(built, torch.Tensor)
        assert built.requires_grad is requires_grad
        assert built.is_leaf
        assert built.tolist() == [1, 1, 1]


def test_build_keeps_the_type_and_the_attributes_of_a_subclass() -> None:
    built = SUBCLASSES.build(_tagged(), ArrayRecord(ArraySpec((4, 6), "float32")), boxed(np.ones((4, 6), np.float32)))
    assert type(built) is Tagged
    assert built.tag == "kept"


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float32", torch.bfloat16),
        ("bfloat16", torch.float64),
        ("float8_e4m3fn", torch.float16),
        ("float8_e3m4", torch.float32),
        ("float8_e4m3b11fnuz", torch.bfloat16),
        ("int4", torch.int8),
        ("uint2", torch.int64),
        ("int8", torch.float32),
        ("bool", torch.int32),
        ("float32", torch.complex64),
        ("bcomplex32", torch.complex64),
    ],
)
def test_build_casts_to_the_requested_dtype(stored: str, asked: torch.dtype) -> None:
    if "complex32" in stored and not hasattr(ml_dtypes, stored):
        pytest.skip("an older ml_dtypes")
    spec = ArraySpec((4,), stored)
    array = np.array([1, 0, 1, 1]).astype(spec.numpy_dtype)
    built = PLAIN.build(torch.empty(4, dtype=asked), ArrayRecord(spec), boxed(array))
    assert isinstance(built, torch.Tensor)
    assert built.dtype is asked
    assert built.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("stored", "kind", "asked", "reason"),
    [
        ("complex64", "array", torch.float32, "imaginary parts; load it as a complex dtype, and use .real"),
        ("complex32", "array", torch.int32, "imaginary"),
        ("datetime64[ns]", "array", torch.int64, "no dtype for datetime64"),
        ("S3", "array", torch.uint8, "no dtype for S3"),
        pytest.param(
            *("uint8", "torch.float4_e2m1fn_x2", torch.float32, "cannot be cast .*; load it as it is stored, and"),
            marks=needs_float4,
        ),
        pytest.param(
            *("float32", "array", FLOAT4, "cannot be cast .*; load it as it is stored, and"), marks=needs_float4
        ),
        ("uint8", "torch.int4", torch.uint4, "cannot be cast"),
    ],
)
def test_casts_without_a_meaning_are_refused(stored: str, kind: str, asked: torch.dtype, reason: str) -> None:
    if stored == "complex32" and not hasattr(ml_dtypes, stored):
        pytest.skip("an older ml_dtypes")
    array = np.zeros(4, ArraySpec((4,), stored).numpy_dtype)
    with pytest.raises(UnsupportedLeafError, match=reason):
        PLAIN.build(torch.empty(4, dtype=asked), ArrayRecord(ArraySpec((4,), stored), kind), boxed(array))
    if "load it as" in reason:
        as_stored: Any = getattr(torch, kind.removeprefix("torch.") if kind != "array" else stored)
        built: Any = PLAIN.build(
            torch.empty(4, dtype=as_stored), ArrayRecord(ArraySpec((4,), stored), kind), boxed(array)
        )
        assert built.dtype is as_stored
        assert not built.view(torch.uint8).any()


@pytest.mark.parametrize(
    ("stored", "kind", "asked"),
    [
        ("uint8", "torch.float4_e2m1fn_x2", torch.uint8),
        pytest.param("uint8", "array", FLOAT4, marks=needs_float4),
        ("int4", "array", torch.int4),
    ],
)
def test_raw_bytes_load_without_a_cast(stored: str, kind: str, asked: torch.dtype) -> None:
    array = np.arange(4, dtype=np.uint8).view(ArraySpec((4,), stored).numpy_dtype)
    built = PLAIN.build(torch.empty(4, dtype=asked), ArrayRecord(ArraySpec((4,), stored), kind), boxed(array))
    assert isinstance(built, torch.Tensor)
    assert built.dtype is asked
    assert built.view(torch.uint8).tolist() == [0, 1, 2, 3]


def test_build_of_another_shape_or_kind_is_a_mismatch() -> None:
    record = ArrayRecord(ArraySpec((3,), "float32"))
    with pytest.raises(TreeMismatchError, match=r"\(3,\).*\(2,\)"):
        PLAIN.build(torch.empty(2), record, boxed(np.ones(3, np.float32)))
    with pytest.raises(TreeMismatchError, match="a float is stored"):
        PLAIN.build(torch.empty(()), ValueRecord("float", 1.0), ())
    with pytest.raises(PluginError, match="0 boxes were read"):
        PLAIN.build(torch.empty(3), record, ())


# --- fill


def test_read_into_a_tensor_increments_its_autograd_version() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    result = (weight * weight).sum()
    record = record_of(weight)
    memory = PLAIN.destination(weight, record, Box.whole((3,)))
    assert memory is not None
    memory[:] = 2
    assert PLAIN.fill(weight, record, [(Box.whole((3,)), memory)]) is True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_copy_into_a_tensor_increments_its_autograd_version() -> None:
    weight = torch.ones(3, 2).t().requires_grad_()
    result = (weight * weight).sum()
    assert PLAIN.destination(weight, record_of(weight), Box.whole((2, 3))) is None
    assert PLAIN.fill(weight, record_of(weight), boxed(np.full((2, 3), 5, np.float32))) is True
    assert weight.tolist() == [[5] * 3] * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_fill_supports_inference_tensors() -> None:
    with torch.inference_mode():
        targets = [torch.zeros(2, 3), torch.zeros(3, 2).t()]
    for target in targets:
        assert target.is_inference()
        assert PLAIN.fill(target, record_of(target), boxed(np.ones((2, 3), np.float32))) is True
        assert target.tolist() == [[1] * 3] * 2


def test_fill_conjugates_elements_for_conjugated_views() -> None:
    base = torch.zeros(2, dtype=torch.complex64)
    target = base.conj()
    assert PLAIN.destination(target, record_of(target), Box.whole((2,))) is None
    assert PLAIN.fill(target, record_of(target), boxed(np.array([1 + 2j, 3j], np.complex64))) is True
    assert target.tolist() == [1 + 2j, 3j]
    assert base.tolist() == [1 - 2j, -3j]


def test_fill_cannot_change_tensors_without_elements() -> None:
    array = np.ones(3, np.float32)
    meta = torch.empty(3, device="meta")
    assert PLAIN.destination(meta, record_of(meta), Box.whole((3,))) is None
    assert PLAIN.fill(meta, record_of(meta), boxed(array)) is False
    with FakeTensorMode():
        fake = torch.empty(3)
    assert SUBCLASSES.destination(fake, record_of(meta), Box.whole((3,))) is None
    assert SUBCLASSES.fill(fake, record_of(meta), boxed(array)) is False


def test_a_tensor_of_another_shape_is_not_a_destination() -> None:
    target = torch.zeros(3)
    other = ArrayRecord(ArraySpec((4,), "float32"))
    assert PLAIN.destination(target, other, Box.whole((4,))) is None


# --- which handler


def test_handlers_of_tensor_types() -> None:
    assert leaf_handler_of_type(torch.Tensor) is leaf_handler_of_type(torch.nn.Parameter)
    assert isinstance(leaf_handler_of_type(torch.Tensor), TensorHandler)
    assert isinstance(leaf_handler_of_type(Tagged), SubclassHandler)
    assert leaf_handler_of_type(np.ndarray) is None


def test_a_fake_tensor_is_only_an_abstract_leaf() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, 3, dtype=torch.float8_e5m2)
    assert SUBCLASSES.describe(fake) == ArrayRecord(ArraySpec((2, 3), "float8_e5m2"), notes=FRAMEWORK)
    assert SUBCLASSES.identity(fake) == SUBCLASSES.identity(fake)
    with pytest.raises(UnsupportedLeafError, match="FakeTensor has no elements"):
        SUBCLASSES.shards(fake, 0, 1)
    array = np.ones((2, 3), ml_dtypes.float8_e5m2)
    built = SUBCLASSES.build(fake, ArrayRecord(ArraySpec((2, 3), "float8_e5m2")), boxed(array))
    assert type(built) is torch.Tensor
    assert built.dtype is torch.float8_e5m2
    assert built.device.type == "cpu"
