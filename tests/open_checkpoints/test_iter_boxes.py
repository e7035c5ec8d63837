"""Loads in parts with `iter_boxes`: order of parts, bytes read, and memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_transforms import Cast, Stack

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray, select
from ckptcore.context import MemoryOptions
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, TreeMismatchError
from ckptcore.model import BLOCK_BYTES, Box
from ckptcore.results import LoadedBox, LoadReport

FAST = Context(durability="none")
SMALL = Context(durability="none", memory=MemoryOptions(load_bytes=6 << 20))
LAYOUTS = ["safetensors", "dcp", "zarr3", "ocdbt"]
MIB = 1 << 20


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 99, (1000, 700), np.int32)
    return {
        "embed": rng.integers(0, 99, (3000, 1024), np.int32),
        "layers": [{"w": rng.random((512, 512)), "b": np.full(512, number, np.int16)} for number in range(3)],
        "tied": shared,
        "also": shared,
        "none": np.zeros((0, 5), np.float32),
        "one": np.array(3.5),
        "step": 7,
    }


def boxes_of(location: Path, *, context: Context | None = None, **how: Any) -> Generator[LoadedBox, None, None]:
    """Open a checkpoint, and return an iterator over its boxes."""
    return ckptcore.open(location, context=context).iter_boxes(**how)


def joined(parts: Iterable[LoadedBox]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that consist of these parts. Fail if an element is missing or occurs twice."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    seen: dict[str, int] = {}
    for part in parts:
        assert part.elements.shape == part.box.shape and part.elements.dtype == part.spec.numpy_dtype
        array = arrays.setdefault(part.name, np.empty(part.spec.shape, part.spec.numpy_dtype))
        array[part.box.slices] = part.elements
        seen[part.name] = seen.get(part.name, 0) + part.box.size
    assert all(seen[name] == array.size for name, array in arrays.items())
    return arrays


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("context", [FAST, SMALL], ids=["usual", "small"])
def test_the_parts_contain_every_array(tmp_path: Path, layout: str, context: Context) -> None:
    tree = state()
    ckptcore.save(tmp_path / "c", tree, layout=layout, context=FAST)
    parts = list(boxes_of(tmp_path / "c", context=context))
    arrays = joined(parts)
    assert arrays["embed"].tobytes() == tree["embed"].tobytes() and arrays["one"] == 3.5
    for number, layer in enumerate(tree["layers"]):
        assert arrays[f"layers[{number}]/w"].tobytes() == layer["w"].tobytes()
        assert arrays[f"layers[{number}]/b"].tobytes() == layer["b"].tobytes()
    assert arrays["none"].shape == (0, 5)
    (both,) = {(part.path, part.tied) for part in parts if part.tied}
    assert {both[0], *both[1]} == {("tied",), ("also",)} and arrays[str(both[0][0])].tobytes() == tree["tied"].tobytes()
    assert "step" not in arrays
    if context is SMALL and layout in ("safetensors", "dcp"):
        assert max(part.elements.nbytes for part in parts) <= 3 << 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_byte_is_read_twice(tmp_path: Path, layout: str) -> None:
    tree = state()
    ckptcore.save(tmp_path / "c", tree, layout=layout, context=FAST)
    report = LoadReport()
    parts = list(boxes_of(tmp_path / "c", context=SMALL, report=report))
    assert set(report.restored) == {part.name for part in parts} | {"tied", "also"} and report.skipped == ["step"]
    nbytes = sum(part.elements.nbytes for part in parts)
    assert nbytes <= report.bytes_read <= nbytes + 2 * BLOCK_BYTES
    some = LoadReport()
    list(boxes_of(tmp_path / "c", context=SMALL, select=select.glob("layers/1"), report=some))
    assert sorted(some.restored) == ["layers[1]/b", "layers[1]/w"]
    assert some.bytes_read <= tree["layers"][1]["w"].nbytes + 4 * BLOCK_BYTES


def test_leaves_selected_as_first_are_loaded_first(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state(), context=FAST)
    first = [select.names(("layers", 2)), select.names("one", "layers")]
    parts = boxes_of(tmp_path / "c", context=SMALL, first=first, select=~select.names("tied"))
    order = [name for name, _ in itertools.groupby(part.name for part in parts)]
    assert set(order[:2]) == {"layers[2]/w", "layers[2]/b"}
    assert set(order[2:7]) == {"one", *(f"layers[{number}]/{name}" for number in range(2) for name in "wb")}
    assert set(order[7:]) >= {"embed", "none"}
    plain = [part.name for part in boxes_of(tmp_path / "c", first=select.names("one"))]
    assert plain[0] == "one" and sorted(set(plain)) == sorted(set(order))


def test_transformed_arrays_are_loaded_in_parts(tmp_path: Path) -> None:
    tree = state()
    ckptcore.save(tmp_path / "c", tree, context=FAST)
    changes = [Stack("layers/{i}/w", "stacked"), Cast("embed", "int64")]
    arrays = joined(boxes_of(tmp_path / "c", context=SMALL, transforms=changes))
    assert arrays["stacked"].tobytes() == np.stack([layer["w"] for layer in tree["layers"]]).tobytes()
    assert arrays["embed"].tobytes() == tree["embed"].astype(np.int64).tobytes()


def test_breaking_out_of_the_loop_ends_all_threads(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state(), context=FAST)
    report = LoadReport()
    for part in boxes_of(tmp_path / "c", context=SMALL, first=select.names("embed"), report=report):
        assert part.name == "embed"
        break
    del part
    assert not [thread.name for thread in threading.enumerate() if "read-ahead" in thread.name]
    assert 0 < report.bytes_read < 10 * MIB


def test_missing_checkpoints_and_leaves_are_refused_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        boxes_of(tmp_path / "c", context=FAST)
    ckptcore.save(tmp_path / "c", state(), context=FAST)
    with pytest.raises(TreeMismatchError, match="did you mean embed"):
        boxes_of(tmp_path / "c", context=FAST, select=select.names("embd"))
    with pytest.raises(TreeMismatchError, match="did you mean embed"):
        boxes_of(tmp_path / "c", context=FAST, first=select.names("embd"))


def test_no_part_contains_a_damaged_block(tmp_path: Path) -> None:
    tree = {"first": np.zeros(4 * MIB, np.uint8), "second": np.ones(4 * MIB, np.uint8)}
    ckptcore.save(tmp_path / "c", tree, context=FAST)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    with file.open("r+b") as stored:
        stored.seek(-3, 2)
        stored.write(b"\7")
    given = []
    with pytest.raises(CorruptCheckpointError, match="second"):
        for part in boxes_of(tmp_path / "c", context=SMALL):
            given.append(part.name)
            assert part.elements.max() == (part.name == "second")
    assert given


def test_a_replacement_between_parts_is_detected(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state(), context=FAST)
    parts = boxes_of(tmp_path / "c", context=SMALL)
    next(parts)
    ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, overwrite=True, context=FAST)
    with pytest.raises(CheckpointNotFoundError, match="replaced or deleted"):
        list(parts)


RANKS = 64
ROWS = 4096

# Runs in a new process, so that the peak of its memory can be measured.
PROGRAM = """
import sys
import zlib
import ckptcore

location, warm = sys.argv[1:]
context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(load_bytes=16 << 20))
list(ckptcore.open(warm, context=context).iter_boxes())


def peak():
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


before = peak()
sums = {}
for part in ckptcore.open(location, context=context).iter_boxes():
    sums[part.name] = sums.get(part.name, 0) + int(part.elements.sum(dtype="uint64"))
print(peak() - before, sorted(sums.items()))
"""


def _sharded(rank: int, layers: int, rows: int) -> dict[str, Any]:
    """Return the part of a rank: rows of some arrays, and columns of others."""
    tree: dict[str, Any] = {}
    for layer in range(layers):
        whole = (rows, 2048) if layer % 2 else (2048, rows)
        axis, step = 1 - layer % 2, rows // RANKS
        box = Box((0, 0), whole).bands(axis, step)[rank]
        cuts = [range(step, whole[own], step) if own == axis else [] for own in range(2)]
        elements = np.full(box.shape, rank + layer, np.uint32)
        tree[f"layer_{layer}"] = ShardedArray(whole, np.uint32, [ArrayShard(box, elements)], cuts=cuts)
    return tree


@pytest.mark.system
@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_a_checkpoint_of_many_hosts_loads_in_little_memory(tmp_path: Path, layout: str) -> None:
    layers = 6

    def save(rank: int, context: Context) -> None:
        ckptcore.save(tmp_path / "warm", _sharded(rank, 2, RANKS * 4), layout=layout, context=context)
        ckptcore.save(tmp_path / "c", _sharded(rank, layers, ROWS), layout=layout, context=context)

    run_ranks(RANKS, save, timeout_seconds=300, durability="none")
    nbytes = ckptcore.metadata(tmp_path / "c").nbytes
    assert nbytes == layers * ROWS * 2048 * 4
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), str(tmp_path / "warm")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    taken, sums = result.stdout.split(maxsplit=1)
    elements = ROWS // RANKS * 2048
    expected = [(f"layer_{n}", sum(elements * (rank + n) for rank in range(RANKS))) for n in range(layers)]
    assert sums.strip() == str(expected)
    assert int(taken) <= 16 * MIB + 32 * MIB < nbytes / 3  # the budget, and buffers of 4 MiB for each thread
