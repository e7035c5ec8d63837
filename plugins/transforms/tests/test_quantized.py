"""Dequantised arrays equal those of each format's own code, bit by bit.

A load of a part reads only the scales of its box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing.strategies import boxes
from ckptcore_transforms.derived_arrays import permute
from ckptcore_transforms.quantized_arrays import _tile, block_scaled, mxfp4, reinterpret, unpack_fp4
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptcore
from ckptcore.derivations import Stored, concatenate, constant
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, HostArray, Node, TreeMetadata, dtype_from_name
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import BoxOutput, Derived, derive
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray
from plugins.transforms.tests.array_chains import open_counted

BFLOAT16, E4M3FN, E8M0 = (dtype_from_name(name) for name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"))

_OWNER = Fp8Dequantize(None)  # type: ignore[no-untyped-call]  # transformers has no types here

SCALES = [0.0, -0.0, 1.0, -3.5, 1e-45, 1.2e-38, 3e38, math.inf, -math.inf, math.nan, 0.0123, 2**-130, 7 / 3]
"""Scales: zero, negative, subnormal, near the maximum, NaN, and values that round."""


def _stored(array: HostArray, leaf: int = 0) -> DerivedArray:
    return Stored(ArraySpec(array.shape, str(array.dtype)), leaf)


def _pair(values: HostArray, scales: HostArray) -> tuple[DerivedArray, DerivedArray]:
    return _stored(values), _stored(scales, 1)


def _derived(checkpoint: Checkpoint, derivation: DerivedArray, most_bytes: int | None = None) -> Checkpoint:
    tree = TreeMetadata(Node("list", (0,), (LEAF,)), (ArrayRecord(derivation.spec),))
    return derive(checkpoint, tree, {0: derivation}, values={}, most_bytes=most_bytes)


def _read(checkpoint: Checkpoint, box: Box) -> HostArray:
    record = checkpoint.tree.leaves[0]
    assert isinstance(record, ArrayRecord)
    out = np.empty(box.shape, record.spec.numpy_dtype)
    list(checkpoint.read(plan_read(checkpoint.tree, [(0, (box,))]), [out]))
    return out


def _made(derivation: DerivedArray, arrays: Sequence[HostArray]) -> HostArray:
    """Compute a whole array from the given stored arrays."""
    ckptcore.save("memory://derivations/made", list(arrays), overwrite="non-atomic")
    checkpoint, _ = open_counted("memory://derivations/made")
    return _read(_derived(checkpoint, derivation), Box.whole(derivation.spec.shape))


def _torch(array: HostArray) -> Any:
    """Return a tensor with the bytes of an array."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy())
    names = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}
    plain = array.view(np.uint8 if array.dtype.itemsize == 1 else np.int16).copy()
    return torch.from_numpy(plain).view(names.get(array.dtype.name, torch.float8_e8m0fnu))


def _assert_bits(made: HostArray, tensor: Any) -> None:
    """Compare bit by bit, but treat all NaNs as equal."""
    bits = {2: np.uint16, 4: np.uint32}[made.dtype.itemsize]
    expected = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[made.dtype.itemsize]).numpy().view(made.dtype)
    nan = np.isnan(expected.astype(np.float32))
    assert made.shape == expected.shape and np.array_equal(np.isnan(made.astype(np.float32)), nan)
    assert np.array_equal(made.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("result", ["bfloat16", "float16", "float32"])
def test_every_code_is_multiplied_by_every_kind_of_scale(dtype: str, result: str) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(SCALES), 1)).view(dtype_from_name(dtype))
    scales = np.array(SCALES, np.float32)[:, None]
    derivation = block_scaled(*_pair(codes, scales), (1, 256), result)
    expected = (_torch(codes).to(torch.float32) * torch.from_numpy(scales)).to(getattr(torch, result))
    _assert_bits(_made(derivation, [codes, scales]), expected)


@pytest.mark.parametrize("holds_nan", [False, True])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_blocks_equal_those_of_transformers(holds_nan: bool, result: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256 if holds_nan else 127, (384, 640), dtype=np.uint8).view(E4M3FN)
    scales = rng.normal(size=(3, 5)).astype(np.float32)
    owner = _OWNER._dequantize_one(_torch(codes), _torch(scales), getattr(torch, result))
    made = _made(block_scaled(*_pair(codes, scales), (128, 128), result), [codes, scales])
    _assert_bits(made, owner)


@pytest.mark.parametrize("scale_dtype", ["uint8", "float8_e8m0fnu"])
def test_mxfp8_equals_that_of_transformers(scale_dtype: str) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (64, 96), dtype=np.uint8).view(E4M3FN)
    scales = rng.integers(0, 255, (64, 3), dtype=np.uint8).view(dtype_from_name(scale_dtype))
    values, of_scales = _pair(codes, scales)
    made = _made(block_scaled(values, reinterpret(of_scales, "float8_e8m0fnu"), (1, 32), "bfloat16"), [codes, scales])
    owner = _OWNER._dequantize_one(_torch(codes), _torch(scales), torch.bfloat16)
    _assert_bits(made, owner)


def test_every_product_of_mxfp4_equals_that_of_transformers() -> None:
    bytes_of_all = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)  # each half of a byte has all 16 codes
    blocks = np.tile(bytes_of_all, (1, 255, 1, 1))
    scales = np.broadcast_to(np.arange(255, dtype=np.uint8)[None, :, None], (1, 255, 16)).copy()
    made = _made(permute(mxfp4(*_pair(blocks, scales), "bfloat16"), (0, 2, 1)), [blocks, scales])
    _assert_bits(made, convert_moe_packed_tensors(_torch(blocks), _torch(scales)))
    assert np.signbit(made[made == 0].astype(np.float32)).any(), "the sign of zero is lost"


def test_a_nan_scale_of_mx_gives_nan() -> None:
    """By OCP Microscaling Formats 1.0, section 5.4.1, the scale 0xFF is NaN, and 0 is 2 ** -127."""
    codes, scales = np.full((2, 32), 0x38, np.uint8).view(E4M3FN), np.array([[255], [0]], np.uint8).view(E8M0)
    made = _made(block_scaled(*_pair(codes, scales), (1, 32), "float32"), [codes, scales])
    assert np.isnan(made[0]).all() and (made[1] == 2.0**-127).all()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_boxes_equal_numpy_and_read_only_the_blocks_that_they_overlap(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    block = tuple([data.draw(st.integers(1, extent + 2)) for extent in shape])
    grid = tuple([-(-extent // size) for extent, size in zip(shape, block, strict=True)])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    codes = rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3FN)
    scales = rng.normal(size=grid).astype(np.float32)
    location = "memory://derivations/scaled"
    ckptcore.save(location, [codes, scales], overwrite="non-atomic")
    factors = scales
    for axis, size in enumerate(block):
        factors = np.repeat(factors, size, axis)
    expected = (codes.astype(np.float32) * factors[tuple(map(slice, shape))]).astype(BFLOAT16)
    checkpoint, counted = open_counted(location)
    box = data.draw(boxes(shape))
    order = data.draw(st.permutations(range(len(shape))))
    derivation = permute(block_scaled(*_pair(codes, scales), block, "bfloat16"), order)
    turned = Box(tuple([box.start[axis] for axis in order]), tuple([box.stop[axis] for axis in order]))
    made = _read(_derived(checkpoint, derivation, data.draw(st.sampled_from([None, 1]))), turned)
    assert made.tobytes() == expected[box.slices].transpose(order).tobytes()
    touched = [-(-high // size) - low // size for low, high, size in zip(box.start, box.stop, block, strict=True)]
    assert counted.elements <= box.size + (math.prod(touched) if box.size else 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_of_fp4_read_only_the_bytes_and_scales_that_they_overlap(data: st.DataObject) -> None:
    experts, rows, groups = (data.draw(st.integers(1, 3)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(0, 255, (experts, rows, groups), dtype=np.uint8)
    location = "memory://derivations/fp4"
    ckptcore.save(location, [blocks, scales], overwrite="non-atomic")
    checkpoint, counted = open_counted(location)
    whole = convert_moe_packed_tensors(_torch(blocks), _torch(scales)).transpose(1, 2)
    box = data.draw(boxes((experts, rows, 32 * groups)))
    made = _read(
        _derived(checkpoint, mxfp4(*_pair(blocks, scales), "bfloat16"), data.draw(st.sampled_from([None, 1]))), box
    )
    _assert_bits(made, whole[box.slices])
    if box.size:
        count = box.shape[0] * box.shape[1]
        of_bytes, of_scales = (-(-box.stop[2] // size) - box.start[2] // size for size in (2, 32))
        assert counted.elements == count * (of_bytes + of_scales)


def test_kernels_of_convolutions_are_computed_in_few_steps() -> None:
    """Each step computes many small matrices. One step for each matrix would take a second."""
    shape, rng = (256, 128, 3, 3), np.random.default_rng(4)
    codes = rng.integers(0, 127, shape, dtype=np.uint8).view(E4M3FN)
    scales = rng.normal(size=(256, 1, 1, 1)).astype(np.float32)
    expected = (codes.astype(np.float32) * scales).astype(BFLOAT16)
    derivation = block_scaled(*_pair(codes, scales), None, "bfloat16")
    for order in ((0, 1, 2, 3), (2, 3, 1, 0)):
        out = np.empty([shape[axis] for axis in order], BFLOAT16).transpose(np.argsort(order))
        derivation.make(Box.whole(shape), [codes, scales], out)
        assert out.tobytes() == expected.tobytes()
        tile, _ = _tile(out)
        assert math.prod([-(-extent // most) for extent, most in zip(shape, tile, strict=True)]) < 40


@pytest.mark.parametrize(("shape", "block"), [((600, 9000), (128, 128)), ((40, 9000), (1, 32)), ((3, 600), (2, 7))])
@pytest.mark.parametrize("turned", [False, True])
def test_arrays_larger_than_a_tile(shape: tuple[int, int], block: tuple[int, int], turned: bool) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3FN)
    scales = rng.normal(size=[-(-extent // size) for extent, size in zip(shape, block, strict=True)]).astype(np.float32)
    factors = scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
    expected = (codes.astype(np.float32) * factors).astype(BFLOAT16)
    location = "memory://derivations/tiles"
    ckptcore.save(location, [codes, scales], overwrite="non-atomic")
    checkpoint, _ = open_counted(location)
    derivation = block_scaled(*_pair(codes, scales), block, "bfloat16")
    for start, stop in itertools.pairwise((0, 1, shape[0] // 2, shape[0])):
        box = Box((start, start), (stop, shape[1] - start))
        rows = expected[box.slices]
        if turned:
            box, rows = Box(box.start[::-1], box.stop[::-1]), rows.T
        made = _read(_derived(checkpoint, permute(derivation, (1, 0)) if turned else derivation), box)
        assert made.tobytes() == rows.tobytes()


def test_reinterpreted_bytes_are_read_into_the_buffer_without_a_copy() -> None:
    codes = np.arange(24, dtype=np.uint8).reshape(4, 6)
    ckptcore.save("memory://derivations/bytes", [codes], overwrite="non-atomic")
    checkpoint, _ = open_counted("memory://derivations/bytes")
    derivation = reinterpret(_stored(codes), "float8_e8m0fnu")
    derived = _derived(checkpoint, derivation)
    assert isinstance(derived.derived, Derived)
    out = np.empty((4, 6), E8M0)
    (fill,) = derived.derived._fills(derivation, [BoxOutput(0, Box.whole((4, 6)), out)])
    assert fill.held_bytes == 0 and fill.steps == []
    assert _read(derived, Box((1, 2), (3, 6))).tobytes() == codes[1:3, 2:6].tobytes()
    assert reinterpret(derivation, "float8_e8m0fnu") is derivation


def test_memory_is_limited_by_bands() -> None:
    """In addition to the result, memory is needed for stored bytes, which are read in bands of limited size."""
    rows, columns = 8192, 8192
    codes, scales = ArraySpec((rows, columns), "float8_e4m3fn"), ArraySpec((64, 64), "float32")
    derivation = block_scaled(Stored(codes, 0), Stored(scales, 1), (128, 128), "bfloat16")
    ckptcore.save("memory://derivations/held", [np.zeros(codes.shape, E4M3FN), np.ones(scales.shape, np.float32)])
    checkpoint, _ = open_counted("memory://derivations/held")
    derived = _derived(checkpoint, derivation, 20 << 20).derived
    assert isinstance(derived, Derived)
    fills = derived._fills(derivation, [BoxOutput(0, Box.whole(codes.shape), np.empty(codes.shape, BFLOAT16))])
    assert len(fills) == 4 and max(fill.held_bytes for fill in fills) <= 20 << 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v, s: block_scaled(v, s, (128, 128)), r"float32\[2, 3\]; expected \[2, 2\]"),
        (lambda v, s: block_scaled(v, s, None), "do not determine the blocks"),
        (lambda v, s: block_scaled(v, s, (0, 1)), "cannot have blocks of"),
        (lambda v, s: block_scaled(v, s, (1, 1, 1)), "cannot have blocks of"),
        (lambda v, s: block_scaled(v, v, (1, 1)), "scales are float8_e4m3fn"),
        (lambda v, s: block_scaled(v, s, (128, 86), "int8"), "a float dtype"),
        (lambda v, s: block_scaled(v, s, (128, 86), "complex64"), "a float dtype"),
        (lambda v, s: unpack_fp4(s), "not an array of bytes"),
        (lambda v, s: unpack_fp4(constant(ArraySpec((), "uint8"), 0)), "not an array of bytes"),
        (lambda v, s: reinterpret(v, "float16"), "item sizes differ"),
        (lambda v, s: mxfp4(v, s), "expected 16 bytes for each scale"),
        (lambda v, s: mxfp4(v, constant(ArraySpec((), "uint8"), 0)), "expected 16 bytes for each scale"),
        (lambda v, s: mxfp4(v, constant(ArraySpec((200, 16), "float32"), 0)), "expected uint8 or float8_e8m0fnu"),
        (lambda v, s: mxfp4(v, constant(ArraySpec((200, 16), "uint8"), 0)), "not an array of bytes"),
    ],
)
def test_invalid_shapes_and_dtypes_are_refused(make: Any, message: str) -> None:
    values, scales = Stored(ArraySpec((200, 256), "float8_e4m3fn"), 0), Stored(ArraySpec((2, 3), "float32"), 1)
    with pytest.raises(ValueError, match=message):
        make(values, scales)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6, 1), (1, 8), (6, 8)])
def test_scales_for_an_array_a_row_a_column_or_an_element(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, (6, 8), dtype=np.uint8).view(E4M3FN)
    scales = rng.normal(size=shape).astype(BFLOAT16)
    ckptcore.save("memory://derivations/axes", [codes, scales], overwrite="non-atomic")
    checkpoint, _ = open_counted("memory://derivations/axes")
    made = _read(_derived(checkpoint, block_scaled(*_pair(codes, scales), None, "bfloat16")), Box((2, 1), (6, 7)))
    expected = (codes.astype(np.float32) * scales.astype(np.float32)).astype(BFLOAT16)[2:6, 1:7]
    assert made.tobytes() == expected.tobytes()


def test_arrays_without_elements() -> None:
    codes, scales = np.zeros((0, 8), E4M3FN), np.zeros((0, 1), np.float32)
    ckptcore.save("memory://derivations/none", [codes, scales], overwrite="non-atomic")
    checkpoint, _ = open_counted("memory://derivations/none")
    derivation = block_scaled(*_pair(codes, scales), (128, 128), "bfloat16")
    both = concatenate([derivation, constant(ArraySpec((1, 8), "bfloat16"), 1.0)], 0)
    assert (_read(_derived(checkpoint, both), Box.whole((1, 8))) == 1).all()
