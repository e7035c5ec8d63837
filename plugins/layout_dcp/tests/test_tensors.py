"""Tensors in pickles: equal to those of torch. Errors for unsupported tensors name a remedy."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_dcp.pickled_trees import Unreadable, leaf_record, tree_of
from ckptcore_dcp.pickles import Call, Global, Persistent, Value, read_pickle
from ckptcore_dcp.stored_tensors import StoredTensor, check_bounds, stored_tensor
from ckptcore_dcp.zips import read_member, read_zip, torch_members

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import LEAF, ArrayRecord, Attribute, Node, ValueRecord

_HOOKS = Call(Global("collections", "OrderedDict"))


def _pickled(state: object) -> Value:
    stream = io.BytesIO()
    torch.save(state, stream)
    data = stream.getvalue()

    def fetch(start: int, stop: int) -> bytes:
        return data[start:stop]

    member = torch_members(read_zip(fetch, 0, len(data), key="file"))["data.pkl"]
    return read_pickle(read_member(fetch, member, key="file"), key="file")[0]


def _tensor(state: object) -> StoredTensor:
    stored = stored_tensor(_pickled(state), key="file", path="w")
    assert stored is not None
    return stored


def _storage(kind: str = "FloatStorage", count: object = 10, *more: Value) -> Persistent:
    return Persistent(("storage", Global("torch", kind), "0", "cpu", count, *more))  # type: ignore[arg-type]  # hostile


def _rebuild(
    storage: Value,
    offset: Value = 0,
    shape: Value = (10,),
    strides: Value = (1,),
    *more: Value,
    name: str = "_rebuild_tensor_v2",
) -> Call:
    return Call(Global("torch._utils", name), (storage, offset, shape, strides, False, _HOOKS, *more))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4),
        lambda: torch.arange(12.0).reshape(3, 4).T,
        lambda: torch.arange(12.0).reshape(3, 4)[1:, 1::2],
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.tensor(1, dtype=torch.int8),
        lambda: torch.empty(0, 3),
        lambda: torch.ones(1).expand(4, 2),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, dtype=torch.uint32),
        lambda: torch.ones(3).to(torch.float8_e5m2)[1:],
    ],
)
def test_shape_strides_and_offset_equal_those_of_torch(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    stored = _tensor(tensor)
    assert stored.shape == tuple(tensor.shape)
    assert stored.strides == tensor.stride()
    assert stored.offset == tensor.storage_offset()
    assert stored.dtype == str(tensor.dtype).removeprefix("torch.")
    assert stored.itemsize == tensor.element_size()
    assert stored.requires_grad == tensor.requires_grad
    assert stored.is_contiguous == tensor.is_contiguous()
    assert stored.storage_bytes == tensor.untyped_storage().nbytes()
    check_bounds(stored, tensor.untyped_storage().nbytes(), key="file", path="w")
    if stored.span:
        with pytest.raises(CorruptCheckpointError, match="ends? at byte"):
            check_bounds(stored, (stored.offset + stored.span) * stored.itemsize - 1, key="file", path="w")


def test_tensors_with_attributes_are_recognized() -> None:
    tensor = torch.ones(3)
    tensor.note = "n"  # type: ignore[attr-defined]  # torch pickles a tensor with attributes in another way
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.note = "n"  # type: ignore[attr-defined]  # see above
    assert _tensor(tensor).shape == (3,)
    assert _tensor(parameter).shape == (4,)
    assert _tensor(torch.nn.Buffer(torch.ones(2))).shape == (2,)


def test_bare_storages() -> None:
    assert _tensor(torch.ones(3).untyped_storage()).spec.shape == (12,)
    legacy = _storage("HalfStorage", 10, ("1", 4, 3))
    stored = stored_tensor(legacy, key="file", path="s")
    assert stored is not None and (stored.dtype, stored.shape, stored.offset) == ("float16", (3,), 4)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 has no float4")
def test_dtypes_stored_as_raw_bytes() -> None:
    stored = _tensor(torch.empty(3, dtype=torch.float4_e2m1fn_x2))
    assert (stored.dtype, stored.kind) == ("uint8", "torch.float4_e2m1fn_x2")


def test_views_of_storages_before_torch_1_6() -> None:
    stored = stored_tensor(_rebuild(_storage("FloatStorage", 10, ("9", 4, 6)), 1, (2,)), key="file", path="w")
    assert stored is not None and stored.offset == 5
    for view in (("9", 5, 6), ("9", -1, 2), ("9", 1), "9", ("9", 1.0, 2)):
        with pytest.raises(CorruptCheckpointError):
            stored_tensor(_rebuild(_storage("FloatStorage", 10, view), 0, (2,)), key="file", path="w")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.empty(3, dtype=torch.bits8), "bits8"),
    ],
)
def test_tensors_without_an_array_representation_are_unreadable(make: Callable[[], torch.Tensor], message: str) -> None:
    _, leaves = tree_of(_pickled({"a": [make()]}), key="file")
    (leaf,) = leaves
    assert isinstance(leaf, Unreadable)
    assert message in leaf.reason and "[0]" not in leaf.reason


def test_tensors_of_subclasses_are_refused() -> None:
    call = Call(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("torch._utils", "_rebuild_tensor_v2"), Global("evil", "Tensor"), _rebuild(_storage()).arguments, {}),
    )
    with pytest.raises(UnsupportedLeafError, match="DTensor"):
        stored_tensor(call, key="file", path="w")
    of_types: list[Value] = [[], {}, None, Persistent([])]  # also unhashable values
    for of_type in of_types:
        with pytest.raises(UnsupportedLeafError):
            stored_tensor(
                Call(Global("torch._tensor", "_rebuild_from_type_v2"), (None, of_type, (), {})), key="file", path="w"
            )
    skeleton, _ = tree_of(Call(Persistent([]), (1,)), key="file")
    assert isinstance(skeleton, Node) and skeleton.kind == "object"
    for name in ("_rebuild_qtensor", "_rebuild_nested_tensor", "_rebuild_wrapper_subclass", "_rebuild_of_tomorrow"):
        with pytest.raises(UnsupportedLeafError):
            stored_tensor(Call(Global("torch._utils", name), ()), key="file", path="w")


@pytest.mark.parametrize(
    "value",
    [
        Call(Global("torch._utils", "_rebuild_tensor_v2"), ()),
        _rebuild(None),
        _rebuild("0"),
        _rebuild(Persistent("0")),
        _rebuild(Persistent(())),
        _rebuild(Persistent(("storage", None, "0", "cpu", 1))),
        _rebuild(Persistent(("storage", Global("os", "FloatStorage"), "0", "cpu", 1))),
        _rebuild(_storage("FloatStorage", -1)),
        _rebuild(_storage("FloatStorage", 1 << 70)),
        _rebuild(_storage("FloatStorage", True)),
        _rebuild(_storage("FloatStorage", "1")),
        _rebuild(_storage(), -1),
        _rebuild(_storage(), 1 << 70),
        _rebuild(_storage(), 1.0),
        _rebuild(_storage(), 0, (-1,)),
        _rebuild(_storage(), 0, (2,), (-1,)),
        _rebuild(_storage(), 0, (2, 2), (1,)),
        _rebuild(_storage(), 0, (1,) * 65, (1,) * 65),
        _rebuild(_storage(), 0, (1 << 61, 1 << 61), (0, 0)),
        _rebuild(_storage(), 0, (0, 1 << 61, 1 << 61), (0, 0, 0)),
        _rebuild(_storage(), 0, (True,), (1,)),
        _rebuild(_storage(), 0, 5, (1,)),
        _rebuild(_storage("UntypedStorage"), name="_rebuild_tensor_v3"),
        _rebuild(_storage("UntypedStorage"), 0, (1,), (1,), "float32", name="_rebuild_tensor_v3"),
        _rebuild(_storage("UntypedStorage"), 0, (1,), (1,), Global("os", "float32"), name="_rebuild_tensor_v3"),
    ],
)
def test_invalid_tensors_are_refused(value: Value) -> None:
    with pytest.raises(CorruptCheckpointError):
        stored_tensor(value, key="file", path="w")


def test_deeply_nested_tensors_are_refused() -> None:
    value: Value = _rebuild(_storage())
    for _ in range(100_000):
        value = Call(Global("torch._utils", "_rebuild_parameter"), (value, True, _HOOKS))
    with pytest.raises(CorruptCheckpointError, match="too many nested calls"):
        stored_tensor(value, key="file", path="w")
    value = _rebuild(_storage())
    for _ in range(100_000):
        value = Call(
            Global("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
            (value, Global("torch", "float32"), "cpu", True),
        )
    with pytest.raises(CheckpointError):
        stored_tensor(value, key="file", path="w")


def test_large_views_of_a_few_bytes_are_refused() -> None:
    for strides in ((0, 0), (0, 1), (1, 1)):
        tensor = StoredTensor("0", "float32", (1 << 16, 1 << 16), strides, 0)
        with pytest.raises(UnsupportedLeafError, match="expand"):
            check_bounds(tensor, 1 << 20, key="file", path="w")
    check_bounds(StoredTensor("0", "float32", (1000, 1000), (0, 0), 0), 4, key="file", path="w")


def test_trees_of_plain_values() -> None:
    state: dict[str, Any] = {
        "list": [1, -2.5, None, True],
        "tuple": ("s", b"\xff\0", 1j),
        "ordered": OrderedDict(b=1, a=2),
        "numbers": {0: "x", 5: "y"},
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "empty": {},
    }
    skeleton, leaves = tree_of(_pickled(state), key="file")
    assert isinstance(skeleton, Node) and skeleton.keys == tuple(state)
    children = dict(zip(skeleton.keys, skeleton.children, strict=True))
    assert children["list"] == Node("list", (0, 1, 2, 3), (LEAF,) * 4)
    assert children["tuple"] == Node("tuple", (0, 1, 2), (LEAF,) * 3)
    assert children["ordered"] == Node("OrderedDict", ("b", "a"), (LEAF,) * 2)
    assert children["numbers"] == Node("dict", (0, 5), (LEAF,) * 2)
    assert children["empty"] == Node("dict", (), ())
    expected = [1, -2.5, None, True, "s", b"\xff\0", 1j, 1, 2, "x", "y", 2, 3, "cuda:1", "torch.bfloat16"]
    assert list(leaves) == expected
    assert [type(leaf) for leaf in leaves] == [type(leaf) for leaf in expected]


def test_numpy_scalars_are_numbers() -> None:
    state = [
        np.float64(0.5),
        np.float32(1.5),
        np.int64(-3),
        np.uint8(200),
        np.bool_(True),
        np.complex64(1j),
        np.float16(2),
    ]
    state.append(np.array([7], ">i4")[0])
    _, leaves = tree_of(_pickled(state), key="file")
    assert list(leaves) == [0.5, 1.5, -3, 200, True, 1j, 2.0, 7]
    assert [type(leaf) for leaf in leaves] == [float, float, int, int, bool, complex, float, int]


def test_calls_that_only_resemble_numpy_scalars_stay_inert() -> None:
    made = Global("numpy.core.multiarray", "scalar")
    dtype = Call(Global("numpy", "dtype"), ("f8", False, True), state=(3, "<"))
    for arguments in (
        (dtype, b"short"),
        (dtype,),
        ("f8", b"\0" * 8),
        (Call(Global("numpy", "dtype"), ("O",)), b"\0" * 8),
    ):
        skeleton, _ = tree_of(Call(made, arguments), key="file")
        assert isinstance(skeleton, Node) and skeleton.kind == "object"


class _Settings:
    def __init__(self) -> None:
        self.rate = 0.5
        self.weight = torch.ones(2)


def test_objects_of_unknown_classes_are_trees_of_their_attributes() -> None:
    skeleton, leaves = tree_of(_pickled(_Settings()), key="file")
    assert isinstance(skeleton, Node)
    assert (skeleton.kind, skeleton.keys) == ("object", (Attribute("rate"), Attribute("weight")))
    assert skeleton.type is not None and skeleton.type.endswith("._Settings")
    assert leaves[0] == 0.5 and isinstance(leaves[1], StoredTensor)


def test_whole_modules_are_trees_of_their_attributes() -> None:
    skeleton, leaves = tree_of(_pickled(torch.nn.Sequential(torch.nn.Linear(2, 3))), key="file")
    assert isinstance(skeleton, Node) and skeleton.type == "torch.nn.modules.container.Sequential"
    assert sorted(leaf.shape for leaf in leaves if isinstance(leaf, StoredTensor)) == [(3,), (3, 2)]


def test_dicts_with_unsupported_keys_become_pairs() -> None:
    skeleton, leaves = tree_of(_pickled({(1, 2): 3, None: 4}), key="file")
    pair = Node("tuple", (0, 1), (Node("tuple", (0, 1), (LEAF, LEAF)), LEAF))
    assert skeleton == Node("object", (0, 1), (pair, Node("tuple", (0, 1), (LEAF, LEAF))), "builtins.dict")
    assert list(leaves) == [1, 2, 3, None, 4]


def test_sets_have_a_fixed_order() -> None:
    names = {"b", "a", "c", "z", "q"}
    _, leaves = tree_of(names, key="file")  # type: ignore[arg-type]  # a set of values
    assert list(leaves) == sorted(names)


def test_infinite_and_huge_trees_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    laughs: Any = [0] * 10
    for _ in range(30):
        laughs = [laughs] * 10
    calls: Any = 1
    for _ in range(100_000):
        calls = Call(Global("a", "b"), (calls,))
    ids: Any = 1
    for _ in range(100_000):
        ids = Persistent(("module", ids))
    encodes: Any = b""
    for _ in range(100_000):
        encodes = Call(Global("builtins", "bytearray"), (encodes,))
    sizes: Any = (1,)
    for _ in range(100_000):
        sizes = (Call(Global("torch", "Size"), (sizes,)),)
    assert [type(leaf) for leaf in tree_of(loop, key="file")[1]] == [Unreadable]
    for value in (deep, laughs, calls, ids, encodes, sizes):
        with pytest.raises(CorruptCheckpointError):
            tree_of(value, key="file", limit=100_000)


def test_records_of_leaves() -> None:
    assert leaf_record(None) == ValueRecord("none", None)
    assert leaf_record(True) == ValueRecord("bool", True)
    assert leaf_record(1 << 60) == ValueRecord("int", hex(1 << 60))
    assert leaf_record(float("-inf")) == ValueRecord("float", "-inf")
    assert leaf_record(1 + 2j) == ValueRecord("complex", [1.0, 2.0])
    assert leaf_record("\ud800") == ValueRecord("str", {"utf8": "7aCA"})
    assert leaf_record(b"\xff") == ValueRecord("bytes", "/w==")
    record = leaf_record(StoredTensor("0", "uint8", (3,), (1,), 0, "torch.uint4"))
    assert isinstance(record, ArrayRecord) and record.kind == "torch.uint4"
