"""Derived arrays equal NumPy's results, and only the required stored elements are read."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.strategies import boxes
from ckptcore_transforms import Stack, Transform, Transpose
from ckptcore_transforms.derived_arrays import computed, merge_low_rank, permute, stack, weighted_sum
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore.context import Context, MemoryOptions
from ckptcore.derivations import ChangedArray, Stored, cast, concatenate, constant, cut, pad, pieces, reshape
from ckptcore.errors import TransformError
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, HostArray, Node, TreeMetadata
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import BoxOutput, Derived, derive
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray, Part
from plugins.transforms.tests.array_chains import Chain, chains, open_counted

STORED: Sequence[HostArray] = [
    np.arange(24 * 10, dtype=np.float32).reshape(24, 10),
    np.arange(60, dtype=np.int32).reshape(3, 4, 5),
    np.arange(36, dtype=np.float32).reshape(6, 6) / 7,
    np.full((), 3, np.float32),
    np.arange(1024, dtype=np.int16),
]


def _saved(location: str, arrays: Sequence[HostArray] = STORED) -> str:
    ckptcore.save(location, list(arrays), overwrite="non-atomic")
    return location


def _tree(derivations: Sequence[DerivedArray]) -> TreeMetadata:
    return TreeMetadata(
        Node("list", tuple(range(len(derivations))), (LEAF,) * len(derivations)),
        tuple([ArrayRecord(derivation.spec) for derivation in derivations]),
    )


def _read(checkpoint: Checkpoint, wanted: Sequence[tuple[int, Box]]) -> list[HostArray]:
    """Read boxes in one plan."""
    buffers = []
    for leaf, box in wanted:
        record = checkpoint.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)
        buffers.append(np.empty(box.shape, record.spec.numpy_dtype))
    plan = plan_read(checkpoint.tree, [(leaf, (box,)) for leaf, box in wanted])
    assert sorted(checkpoint.read(plan, buffers)) == list(range(len(wanted)))
    return buffers


def _made(location: str, derivation: DerivedArray, *, most_bytes: int | None = None) -> HostArray:
    checkpoint = open_checkpoint(location, Context())
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, most_bytes=most_bytes, values={})
    return _read(derived, [(0, Box.whole(derivation.spec.shape))])[0]


@pytest.fixture(scope="module")
def location() -> str:
    return _saved("memory://derivations/stored")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_equal_numpy_and_read_only_required_elements(location: str, data: st.DataObject) -> None:
    checkpoint, counted = open_counted(location)
    drawn: list[Chain] = data.draw(st.lists(chains(STORED), min_size=1, max_size=3))
    derivations = [chain.derivation for chain in drawn]
    derived = derive(
        checkpoint,
        _tree(derivations),
        dict(enumerate(derivations)),
        most_bytes=data.draw(st.sampled_from([None, 1, 200])),
        values={},
    )
    for leaf, chain in enumerate(drawn):
        assert chain.derivation.spec.shape == chain.expected.shape
        box = data.draw(boxes(chain.expected.shape))
        counted.plans.clear()
        (made,) = _read(derived, [(leaf, box)])
        expected = chain.expected[box.slices]
        assert made.dtype == expected.dtype and made.tobytes() == expected.tobytes()
        assert counted.elements <= chain.least(box)


def test_a_box_of_many_runs_is_read_with_the_bytes_between_them() -> None:
    array = np.arange(30000, dtype=np.int32).reshape(3, 10000)
    location = _saved("memory://derivations/runs", [array])
    of = Stored(ArraySpec(array.shape, "int32"), 0)
    derivation = reshape(of, (3, 2500, 2, 2))
    derived = derive(open_checkpoint(location, Context()), _tree([derivation]), {0: derivation}, values={})
    box = Box((1, 3, 1, 0), (3, 2400, 2, 1))
    expected = array.reshape(3, 2500, 2, 2)[box.slices]
    assert len(derivation.needed(box)) == 1 and (_read(derived, [(0, box)])[0] == expected).all()
    across = permute(derivation, (3, 0, 2, 1))
    derived = derive(open_checkpoint(location, Context()), _tree([across]), {0: across}, values={})
    assert (_read(derived, [(0, Box((0, 1, 1, 3), (1, 3, 2, 2400)))])[0] == expected.transpose(3, 0, 2, 1)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_many_boxes_in_one_plan(location: str, dtype: str) -> None:
    checkpoint = open_checkpoint(location, Context())
    of = Stored(ArraySpec((24, 10), "float32"), 0)
    derivation = cast(permute(reshape(of, (4, 6, 10)), (2, 0, 1)), dtype)
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, most_bytes=64, values={})
    wanted = [Box((a, b, 0), (a + 1, b + 2, 6)) for a, b in itertools.product(range(10), (0, 2))]
    expected = STORED[0].reshape(4, 6, 10).transpose(2, 0, 1).astype(derivation.spec.numpy_dtype)
    for box, made in zip(wanted, _read(derived, [(0, box) for box in wanted]), strict=True):
        assert made.tobytes() == expected[box.slices].tobytes()


def test_cuts_of_joined_arrays_return_the_original_arrays() -> None:
    layers = [Stored(ArraySpec((24, 10), "float32"), leaf) for leaf in range(4)]
    for axis in range(3):
        stacked = stack(layers, axis)
        for number, layer in enumerate(layers):
            band = Box.whole(stacked.spec.shape).band(axis, number, number + 1)
            assert reshape(cut(stacked, band), (24, 10)) == layer
    fused = concatenate(layers, 0)
    assert cut(fused, Box((24, 0), (48, 10))) == layers[1]
    assert cut(fused, Box((24, 0), (72, 10))) == concatenate(layers[1:3], 0)
    assert cut(fused, Box((30, 2), (40, 4))) == cut(layers[1], Box((6, 2), (16, 4)))


def test_elements_are_read_into_the_buffer_without_a_copy(location: str) -> None:
    checkpoint, counted = open_counted(location)
    rows = [cut(Stored(ArraySpec((24, 10), "float32"), 0), Box((row, 0), (row + 1, 10))) for row in (5, 2, 9)]
    derivation = stack([reshape(row, (10,)) for row in rows], 0)
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, values={})
    assert isinstance(derived.derived, Derived)
    buffer = np.empty((3, 10), np.float32)
    plan = plan_read(derived.tree, [(0, (Box.whole((3, 10)),))])
    (fill,) = derived.derived._fills(derivation, [BoxOutput(0, Box.whole((3, 10)), buffer)])
    assert fill.held_bytes == 0 and fill.steps == []
    assert list(derived.read(plan, [buffer])) == [0]
    assert (buffer == STORED[0][[5, 2, 9]]).all() and counted.elements == 30


def test_arrays_that_need_the_same_box_share_one_read() -> None:
    checkpoint, counted = open_counted(_saved("memory://derivations/once"))
    of = Stored(ArraySpec((24, 10), "float32"), 0)
    total = computed([of], lambda array: array.sum(0), ArraySpec((10,), "float32"))
    derived = derive(checkpoint, _tree([total, of]), {0: total, 1: of}, values={})
    made = _read(derived, [(0, Box((0,), (5,))), (0, Box((5,), (10,))), (1, Box.whole((24, 10)))])
    assert counted.elements == 240
    assert (np.concatenate(made[:2]) == STORED[0].sum(0)).all() and (made[2] == STORED[0]).all()


def test_large_arrays_are_computed_in_pieces(tmp_path: Path) -> None:
    array = np.arange(8 << 20, dtype=np.int32).reshape(2048, -1)
    ckptcore.save(tmp_path / "c", [array])
    checkpoint = open_checkpoint(tmp_path / "c", Context())
    of = Stored(ArraySpec(array.shape, "int32"), 0)
    derivation = cast(of, "float32")
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, most_bytes=16 << 20, values={})
    assert isinstance(derived.derived, Derived)
    out = np.empty(array.shape, np.float32)
    fills = derived.derived._fills(derivation, [BoxOutput(0, Box.whole(array.shape), out)])
    assert len(fills) == 2 and max(fill.held_bytes for fill in fills) == 16 << 20
    assert (_read(derived, [(0, Box.whole(array.shape))])[0] == array).all()
    assert checkpoint.store.bytes_read <= 1.1 * array.nbytes
    across = derive(
        checkpoint,
        _tree([permute(derivation, (1, 0))]),
        {0: permute(derivation, (1, 0))},
        most_bytes=16 << 20,
        values={},
    )
    assert (_read(across, [(0, Box.whole(array.T.shape))])[0] == array.T).all()
    assert checkpoint.store.bytes_read <= 2.2 * array.nbytes  # cut along the contiguous axis


def test_a_large_layer_of_a_stack_is_cut_into_pieces() -> None:
    shape = (8192, 8192)
    ckptcore.save(
        "memory://derivations/layers", [np.zeros(shape, np.int8), np.ones(shape, np.int8)], overwrite="non-atomic"
    )
    checkpoint = open_checkpoint("memory://derivations/layers", Context())
    derivation = cast(stack([Stored(ArraySpec(shape, "int8"), number) for number in range(2)], 0), "int16")
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, most_bytes=20 << 20, values={}).derived
    assert isinstance(derived, Derived)
    out = np.empty(derivation.spec.shape, np.int16)
    fills = derived._fills(derivation, [BoxOutput(0, Box.whole(out.shape), out)])
    assert len(fills) == 8 and max(fill.held_bytes for fill in fills) <= 20 << 20


def test_pieces_cover_an_array_and_have_a_limited_size() -> None:
    for shape in (
        (),
        (0,),
        (3, 0, 2),
        (5,),
        (1 << 19,),
        (3, 1 << 19),
        (2, 3, 200_000),
        (1 << 10, 1 << 9),
        (1 << 18, 3),
    ):
        counts = np.zeros(shape, np.int8)
        for piece in pieces(shape):
            assert counts[piece].size <= 1 << 18 and isinstance(counts[piece], np.ndarray)
            counts[piece] += 1
        assert (counts == 1).all()


@pytest.mark.parametrize("merged", [False, True])
def test_sums_are_computed_with_little_memory(merged: bool) -> None:
    """A whole array in float32 would be twice as large as the stored array, and a sum would need several of them."""
    shape = (4096, 2048)
    base, up, down = [
        Stored(ArraySpec(of, "bfloat16"), number) for number, of in enumerate((shape, (4096, 4), (4, 2048)))
    ]
    derivation = merge_low_rank(base, up, down, 2) if merged else weighted_sum([base, base], [1, 2])
    parts = [np.ones(part.spec.shape, part.spec.numpy_dtype) for part in derivation.inputs]
    out = np.empty(shape, base.spec.numpy_dtype)
    tracemalloc.start()
    try:
        derivation.make(Box.whole(shape), parts, out)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (out == (9 if merged else 3)).all() and most <= 14 << 20 < out.nbytes


def test_pieces_of_a_stack_are_whole_layers(tmp_path: Path) -> None:
    state = {f"l.{layer}": np.full((2048, 1024), layer, np.int32) for layer in range(4)}
    ckptcore.save(tmp_path / "c", state, context=Context(durability="none"))
    spec = ArraySpec((2048, 1024), "int32")
    derivation = stack([permute(Stored(spec, layer), (1, 0)) for layer in range(4)], 0)
    checkpoint = open_checkpoint(tmp_path / "c", Context())
    made = derive(checkpoint, _tree([derivation]), {0: derivation}, values={}).derived
    assert made is not None
    assert [box.start[0] for box in made.pieces(0, 9 << 20)] == [0, 1, 2, 3]
    assert [box.stop[0] for box in made.pieces(0, 16 << 20)] == [2, 4]
    across = stack([permute(Stored(spec, layer), (1, 0)) for layer in range(4)], 1)
    made = derive(checkpoint, _tree([across]), {0: across}, values={}).derived
    assert made is not None and made.pieces(0, 9 << 20) == [Box.whole((1024, 4, 2048))], (
        "each piece would read every layer"
    )
    chain: list[Transform] = [Stack("l.{i}", "w"), Transpose("w")]
    context = Context(memory=MemoryOptions(load_bytes=24 << 20), durability="none")
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors", transforms=chain, context=context)
    assert (ckptcore.load(tmp_path / "d")["w"] == np.arange(4)[:, None, None]).all()


def test_adapters_are_merged_and_arrays_averaged_by_boxes() -> None:
    rng = np.random.default_rng(0)
    base, up, down = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 12), (16, 3), (3, 12)))
    checkpoint, counted = open_counted(_saved("memory://derivations/lora", [base, up, down]))
    stored = [Stored(ArraySpec(array.shape, "float32"), leaf) for leaf, array in enumerate((base, up, down))]
    merged = merge_low_rank(stored[0], stored[1], stored[2], 0.5)
    mean = weighted_sum([merged, stored[0]], [0.25, 0.75], "float64")
    derived = derive(checkpoint, _tree([merged, mean]), {0: merged, 1: mean}, values={})
    box = Box((2, 4), (6, 12))
    (made,) = _read(derived, [(0, box)])
    assert np.allclose(made, (base + 0.5 * up @ down)[box.slices], rtol=1e-6)
    assert counted.elements == 4 * 8 + 4 * 3 + 3 * 8
    (made,) = _read(derived, [(1, box)])
    assert made.dtype == np.float64 and np.allclose(made, (base + 0.125 * up @ down)[box.slices], rtol=1e-5)


def test_arrays_of_several_checkpoints_are_combined() -> None:
    first, second = _saved("memory://derivations/first"), _saved("memory://derivations/second", [STORED[0] + 1])
    checkpoint, other = open_checkpoint(first, Context()), open_checkpoint(second, Context())
    spec = ArraySpec((24, 10), "float32")
    derivation = weighted_sum([Stored(spec, 0), Stored(spec, 0, 1)], [0.5, 0.5])
    derived = derive(checkpoint, _tree([derivation]), {0: derivation}, additional=[other], values={})
    assert (_read(derived, [(0, Box.whole(spec.shape))])[0] == STORED[0] + 0.5).all()


def test_a_derived_checkpoint_can_be_derived_again() -> None:
    checkpoint = open_checkpoint(_saved("memory://derivations/again"), Context())
    for shape in ((24, 10), (10, 24), (24, 10)):
        derivation = permute(Stored(ArraySpec(shape, "float32"), 0), (1, 0))
        checkpoint = derive(checkpoint, _tree([derivation]), {0: derivation}, values={})
    assert (_read(checkpoint, [(0, Box.whole((10, 24)))])[0] == STORED[0].T).all()


class _Added(ChangedArray):
    """A stored array to which other stored arrays are added."""

    __slots__ = ("inputs", "spec")

    def __init__(self, *inputs: Stored) -> None:
        self.inputs, self.spec = inputs, inputs[0].spec

    def needed(self, box: Box) -> Sequence[Part]:
        return [Part(number, Box.whole(array.spec.shape)) for number, array in enumerate(self.inputs)]

    def change(self, number: int, part: HostArray, elements: HostArray) -> None:
        elements += part


def test_an_array_can_be_computed_from_a_changed_array() -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.ones((2, 3)), np.full((2, 3), 2.0)]
    location = _saved("memory://derivations/changed", arrays)
    added = _Added(*[Stored(ArraySpec((2, 3), "float64"), leaf) for leaf in range(3)])
    expected = arrays[0] + 3
    assert (_made(location, added) == expected).all()
    assert (_made(location, cast(added, "float32")) == expected).all()
    assert (_made(location, concatenate([added, added], 0)) == np.concatenate([expected, expected])).all()
    assert (_made(location, permute(added, (1, 0))) == expected.T).all()
    assert (_made(location, weighted_sum([added, added], [0.5, 0.5])) == expected).all()


def test_constants_and_empty_arrays() -> None:
    location = _saved("memory://derivations/constant", [np.zeros((0, 3), np.float32)])
    empty = Stored(ArraySpec((0, 3), "float32"), 0)
    assert _made(location, reshape(permute(empty, (1, 0)), (0,))).shape == (0,)
    assert (_made(location, pad(empty, (1, 0), (1, 2), 2.0)) == np.full((2, 5), 2, np.float32)).all()
    assert (_made(location, constant(ArraySpec((2, 3), "int8"), [1, 2, 3])) == [[1, 2, 3]] * 2).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda derivation: reshape(derivation, (7,)),
        lambda derivation: cut(derivation, Box((0, 0), (25, 10))),
        lambda derivation: cut(derivation, Box((0,), (2,))),
        lambda derivation: permute(derivation, (0, 0)),
        lambda derivation: concatenate([derivation, cast(derivation, "int8")], 0),
        lambda derivation: concatenate([], 0),
        lambda derivation: concatenate([derivation], 2),
        lambda derivation: stack([derivation, reshape(derivation, (10, 24))], 0),
        lambda derivation: pad(derivation, (1,), (0,), 0),
        lambda derivation: pad(cast(derivation, "int8"), (1, 1), (0, 0), 300),
        lambda derivation: pad(cast(derivation, "int4"), (1, 1), (0, 0), 0.5),
        lambda derivation: cast(cast(derivation, "complex64"), "float32"),
        lambda derivation: cast(derivation, "S3"),
        lambda derivation: weighted_sum([derivation], [1.0, 2.0]),
        lambda derivation: merge_low_rank(derivation, derivation, derivation, 1.0),
        lambda derivation: constant(derivation.spec, np.zeros(3)),
    ],
)
def test_invalid_operations_are_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make(Stored(ArraySpec((24, 10), "float32"), 0))  # type: ignore[operator]  # a lambda


def test_an_error_in_a_function_names_the_array(location: str) -> None:
    of = Stored(ArraySpec((24, 10), "float32"), 0)
    with pytest.raises(TransformError, match=r"\[0\] could not be computed.*ZeroDivisionError"):
        _made(location, computed([of], lambda array: 1 // 0, of.spec))
    with pytest.raises(TransformError, match=r"the function returned float32\[10, 24\]"):
        _made(location, computed([of], lambda array: array.T, of.spec))


def test_a_tree_that_does_not_match_its_arrays_is_refused() -> None:
    checkpoint = open_checkpoint(_saved("memory://derivations/refused"), Context())
    of = Stored(ArraySpec((24, 10), "float32"), 0)
    with pytest.raises(TransformError, match="is declared as"):
        derive(checkpoint, _tree([of]), {0: cast(of, "int8")}, values={})
