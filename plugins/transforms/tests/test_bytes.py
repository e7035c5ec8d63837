"""To load a part of its result, a transform reads little more than the stored bytes of this part.

The parts are shards of one process and shards of all devices.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_transforms import (
    Apply,
    Average,
    Cast,
    Default,
    Dequantize,
    DequantizeAsConfigured,
    DequantizeMxfp4,
    Drop,
    Fuse,
    IfPresent,
    MergeAxes,
    MergeLora,
    Pad,
    Refuse,
    Rename,
    RenameTable,
    Reshape,
    Scale,
    Slice,
    Split,
    SplitAxis,
    Stack,
    Transform,
    Transpose,
    Unstack,
)

import ckptcore
from ckptcore import AbstractArray, ArrayShard, Context, Matching, ShardedArray
from ckptcore.context import IOOptions, MemoryOptions
from ckptcore.model import Box, dtype_from_name
from ckptcore.results import LoadReport

SIDE, RANK, SHARDS = 1024, 16, 8
WHOLE = SIDE * SIDE * 4
"""Bytes of one whole float32 matrix."""

FLOAT8, BFLOAT16 = dtype_from_name("float8_e4m3fn"), dtype_from_name("bfloat16")

QUANTIZED: dict[str, Any] = {
    "q.weight": np.arange(SIDE * SIDE).astype(np.uint8).reshape(SIDE, SIDE).astype(np.float32).astype(FLOAT8),
    "q.weight_scale_inv": np.full((8, 8), 0.5, np.float32),
}

PACKED: Any = np.full((SIDE, SIDE // 32, 16), 0x22, np.uint8), np.full((SIDE, SIDE // 32), 126, np.uint8)
"""MXFP4 blocks and scales. Each element is 1 times 2 ** -1."""

OF_QUANTIZED = (SIDE * SIDE + 4 * 64) / WHOLE

QUIET = Context(durability="none", io=IOOptions(checksums=False))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save four matrices, an adapter for one of them, four other matrices, and quantised weights.

    No checksums are stored, because verifying them would need reads of whole blocks.
    """
    rng = np.random.default_rng(0)
    state = {f"l.{number}": rng.integers(0, 99, (SIDE, SIDE)).astype(np.float32) for number in range(4)}
    directory = tmp_path_factory.mktemp("bytes")
    ckptcore.save(directory / "c", state, context=QUIET)
    ckptcore.save(directory / "other", {name: array + 2 for name, array in state.items()}, context=QUIET)
    thin = {"l.0.B": np.ones((SIDE, RANK), np.float32), "l.0.A": np.ones((RANK, SIDE), np.float32)}
    ckptcore.save(directory / "adapter", thin, context=QUIET)
    ckptcore.save(
        directory / "quantised",
        {**QUANTIZED, "m.w_blocks": PACKED[0], "m.w_scales": PACKED[1]},
        layout=ckptcore.SafetensorsLayout(standalone=True),
        context=QUIET,
    )
    (directory / "quantised" / "checkpoint.json").unlink()  # Hugging Face's tools write only the remaining files
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (directory / "quantised" / "config.json").write_text(json.dumps(config))
    return directory, state


def _stacked(state: dict[str, Any]) -> Any:
    return np.stack(list(state.values()))


CASES: dict[str, tuple[Any, Any, int, float, float]] = {
    # For each name: the transforms that make w, the expected array, the axis of the shards, and the data that a load
    # reads for all of w and for one eighth of it, in matrices.
    "rename": (lambda d: [Rename("l.0", "w")], lambda s: s["l.0"], 0, 1, 1 / 8),
    "table": (lambda d: [RenameTable({"l.0": "w", "l.1": "l.0"})], lambda s: s["l.0"], 0, 1, 1 / 8),
    "drop": (
        lambda d: [Drop("l.1"), IfPresent(Drop("l.9")), Rename("l.0", "w"), Refuse("l.1")],
        lambda s: s["l.0"],
        0,
        1,
        1 / 8,
    ),
    "default": (lambda d: [Default("w", np.ones((8, 8), np.float32))], lambda s: np.ones((8, 8), np.float32), 0, 0, 0),
    "cast": (lambda d: [Rename("l.0", "w"), Cast("w", "float64")], lambda s: s["l.0"].astype("f8"), 0, 1, 1 / 8),
    "transpose": (lambda d: [Rename("l.0", "w"), Transpose("w")], lambda s: s["l.0"].T, 1, 1, 1 / 8),
    "reshape": (
        lambda d: [Rename("l.0", "w"), Reshape("w", (-1, 16, SIDE))],
        lambda s: s["l.0"].reshape(64, 16, SIDE),
        0,
        1,
        1 / 8,
    ),
    "split axis": (
        lambda d: [Rename("l.0", "w"), SplitAxis("w", 0, (8, -1))],
        lambda s: s["l.0"].reshape(8, -1, SIDE),
        0,
        1,
        1 / 8,
    ),
    "inner axis": (
        lambda d: [Rename("l.0", "w"), SplitAxis("w", 0, (8, -1))],
        lambda s: s["l.0"].reshape(8, -1, SIDE),
        1,
        1,
        1 / 8,
    ),
    "merge axes": (
        lambda d: [Rename("l.0", "w"), MergeAxes("w", 0, (-1, -1))],
        lambda s: s["l.0"].reshape(-1),
        0,
        1,
        1 / 8,
    ),
    "scale": (lambda d: [Rename("l.0", "w"), Scale("w", 3)], lambda s: s["l.0"] * np.float32(3), 0, 1, 1 / 8),
    "slice": (lambda d: [Rename("l.0", "w"), Slice("w", 256, 512)], lambda s: s["l.0"][256:512], 0, 1 / 4, 1 / 32),
    "pad": (
        lambda d: [Rename("l.0", "w"), Pad("w", 2 * SIDE)],
        lambda s: np.pad(s["l.0"], ((0, SIDE), (0, 0))),
        0,
        1,
        1 / 4,
    ),
    "apply": (lambda d: [Rename("l.0", "w"), Apply("w", lambda w: w[::-1])], lambda s: s["l.0"][::-1], 0, 1, 1),
    "stack": (lambda d: [Stack("l.{i}", "w")], _stacked, 1, 4, 1 / 2),
    "stack last": (lambda d: [Stack("l.{i}", "w", -1)], lambda s: np.moveaxis(_stacked(s), 0, -1), 0, 4, 1 / 2),
    "unstack": (
        lambda d: [
            Fuse([f"l.{i}" for i in range(4)], "x"),
            SplitAxis("x", 0, (2, -1)),
            Unstack("x", "y.{i}"),
            Rename("y.1", "w"),
        ],
        lambda s: np.concatenate([s["l.2"], s["l.3"]]),
        0,
        2,
        1 / 4,
    ),
    "split": (lambda d: [Split("l.0", ["v", "w"])], lambda s: s["l.0"][512:], 0, 1 / 2, 1 / 16),
    "fuse": (lambda d: [Fuse(["l.0", "l.1"], "w")], lambda s: np.concatenate([s["l.0"], s["l.1"]]), 0, 2, 1 / 4),
    "average": (
        lambda d: [Average([d / "other"], [3, 1]), Rename("l.0", "w")],
        lambda s: s["l.0"] + np.float32(0.5),
        0,
        2,
        1 / 4,
    ),
    "lora": (
        lambda d: [MergeLora("{n...}", "{n...}.B", "{n...}.A", 0.5, d / "adapter"), Rename("l.0", "w")],
        lambda s: s["l.0"] + np.float32(RANK / 2),
        0,
        1 + 2 * RANK / SIDE,
        1 / 8 + (1 + 1 / 8) * RANK / SIDE,
    ),
}


def _dequantized(state: dict[str, Any]) -> Any:
    return (QUANTIZED["q.weight"].astype(np.float32) / 2).astype(BFLOAT16)


CASES |= {
    "dequantize": (
        lambda d: [Dequantize("{n...}", "{n}_scale_inv", (128, 128)), Rename("q.weight", "w")],
        _dequantized,
        0,
        OF_QUANTIZED,
        OF_QUANTIZED / 8,
    ),
    "dequantize as configured": (
        lambda d: [DequantizeAsConfigured(), Rename("q.weight", "w")],
        _dequantized,
        0,
        OF_QUANTIZED,
        OF_QUANTIZED / 8,
    ),
    "dequantize mxfp4": (
        lambda d: [DequantizeMxfp4("m.{n}_blocks", "m.{n}_scales", "{n}")],
        lambda s: np.full((SIDE, SIDE), 0.5, BFLOAT16),
        0,
        17 / 32 / 4,
        17 / 32 / 4 / 8,
    ),
}


def test_every_transform_has_a_case() -> None:
    import ckptcore_transforms

    kinds = {type(transform).__name__ for make, *_ in CASES.values() for transform in make(Path())}
    assert {name for name in ckptcore_transforms.__all__ if hasattr(getattr(ckptcore_transforms, name), "inverse")} - {
        "TreeTransform"
    } == kinds


def _loaded(
    location: Path, whole: Any, boxes: Sequence[Box], chain: list[Transform], load_bytes: int | None
) -> LoadReport:
    report = LoadReport()
    asked = ShardedArray(whole.shape, whole.dtype, [ArrayShard(box) for box in boxes])
    loaded = ckptcore.load(
        location,
        {"w": asked},
        transforms=chain,
        report=report,
        matching=Matching(unexpected="ignore"),
        context=Context(memory=MemoryOptions(load_bytes=load_bytes)),
    )
    for shard in loaded["w"].shards:
        assert np.array_equal(shard.elements, whole[shard.box.slices])
    return report


@pytest.mark.parametrize("load_bytes", [None, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_a_load_reads_needed_bytes_only(saved: tuple[Path, dict[str, Any]], name: str, load_bytes: int | None) -> None:
    directory, state = saved
    make, expected, axis, of_all, of_one = CASES[name]
    whole, chain = expected(state), make(directory)
    step = whole.shape[axis] // SHARDS
    boxes = Box.whole(whole.shape).bands(axis, step)
    assert len(boxes) == SHARDS
    for own, share in ((boxes, of_all), (boxes[3:4], of_one)):
        location = directory / ("quantised" if name.startswith("dequantize") else "c")
        report = _loaded(location, whole, own, chain, load_bytes)
        assert report.bytes_read <= 1.1 * share * WHOLE
        assert report.bytes_read >= 0.99 * share * WHOLE, "reads are not counted completely"


@pytest.mark.parametrize("name", ["cast", "transpose", "scale", "apply", "average", "lora", "stack", "dequantize"])
def test_devices_of_one_process_share_reads(saved: tuple[Path, dict[str, Any]], name: str) -> None:
    """The shards are cut across the rows of the stored arrays, and the memory is enough for one shard.

    If each shard had its own read, each would read the whole array.
    """
    directory, state = saved
    make, expected, axis, of_all, _ = CASES[name]
    whole, chain = expected(state), make(directory)
    across = 2 if name == "stack" else 1 - axis
    boxes = Box.whole(whole.shape).bands(across, whole.shape[across] // SHARDS)
    location = directory / ("quantised" if name.startswith("dequantize") else "c")
    report = _loaded(location, whole, boxes, chain, 1 << 20)
    assert report.bytes_read <= 1.1 * of_all * WHOLE


def test_devices_share_reads_of_casts_by_matching(saved: tuple[Path, dict[str, Any]]) -> None:
    directory, state = saved
    boxes = Box.whole((SIDE, SIDE)).bands(1, SIDE // SHARDS)
    for chain in ([], [Scale("l.0", 2)]):
        report = LoadReport()
        asked = ShardedArray((SIDE, SIDE), np.dtype(np.float64), [ArrayShard(box) for box in boxes])
        loaded = ckptcore.load(
            directory / "c",
            {"l.0": asked},
            report=report,
            transforms=chain,
            matching=Matching(unexpected="ignore", cast="safe"),
            context=Context(memory=MemoryOptions(load_bytes=1 << 20)),
        )
        for shard in loaded["l.0"].shards:
            assert np.array_equal(shard.elements, state["l.0"][shard.box.slices] * (2 if chain else 1))
        assert report.bytes_read <= 1.1 * WHOLE


class _Counted:
    """A function that counts its calls. Its class has no hash."""

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]  # a function without a hash must work too

    def __call__(self, array: Any) -> Any:
        with self._lock:
            self.calls += 1
        return array + self.calls  # each call returns other values, so boxes of two calls do not fit together


@pytest.mark.parametrize("load_bytes", [None, 1 << 20])
def test_a_function_is_called_once_for_all_boxes(saved: tuple[Path, dict[str, Any]], load_bytes: int | None) -> None:
    directory, state = saved
    counted = _Counted()
    whole = state["l.0"] + 1
    _loaded(
        directory / "c",
        whole,
        Box.whole(whole.shape).bands(0, 128),
        [Rename("l.0", "w"), Apply("w", counted)],
        load_bytes,
    )
    assert counted.calls == 1
    target = {
        "w": ShardedArray(whole.shape, whole.dtype, [ArrayShard(box) for box in Box.whole(whole.shape).bands(1, 512)])
    }
    chain = [Rename("l.0", "w"), Apply("w", counted), Transpose("w")]
    ckptcore.load(directory / "c", target, transforms=chain, matching=Matching(unexpected="ignore"))
    assert counted.calls == 2


def test_a_function_is_called_once_for_each_stacked_layer(saved: tuple[Path, dict[str, Any]]) -> None:
    directory, state = saved
    calls: list[float] = []

    def negative(array: Any) -> Any:
        calls.append(float(array[0, 0]))
        return -array

    chain = [Apply("l.{i}", negative), Stack("l.{i}", "w")]
    whole = -_stacked(state)
    report = _loaded(directory / "c", whole, Box.whole(whole.shape).bands(2, SIDE // SHARDS), chain, 10 << 20)
    assert len(calls) == 4 and report.bytes_read <= 1.1 * 4 * WHOLE


def test_a_load_of_a_whole_stack_reads_each_byte_once(saved: tuple[Path, dict[str, Any]]) -> None:
    directory, state = saved
    report = LoadReport()
    loaded = ckptcore.load(
        directory / "c",
        {"w": AbstractArray((4, SIDE, SIDE), "float32")},
        transforms=[Stack("l.{i}", "w")],
        report=report,
    )
    assert np.array_equal(loaded["w"], _stacked(state)) and report.bytes_read == 4 * WHOLE
