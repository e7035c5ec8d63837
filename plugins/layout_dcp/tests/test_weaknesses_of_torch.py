"""Known weaknesses of torch.distributed.checkpoint. ckptcore has none of them, also when it reads files of torch."""

from __future__ import annotations

import collections
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing import FailAt, FaultPlan, FullAfter, ThreadJob, run_ranks
from torch.distributed.checkpoint._extension import ZStandard

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageFullError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.protocols import Coordinator
from plugins.layout_dcp.tests.counted_places import counted, place
from plugins.layout_dcp.tests.state_dicts import assert_same, bytes_of, loaded, saved

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

OLD = {"w": torch.full((100,), 1.0), "step": 1}
NEW = {"w": torch.full((100,), 2.0), "large": torch.randn(1 << 19), "names": ["a", 2], "step": 2}


def like(state: dict[str, Any]) -> dict[str, Any]:
    """Return a target state dict for torch."""
    return {name: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None for name, leaf in state.items()}


def flipped(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def places(location: Path, name: str) -> tuple[Path, int, int]:
    """Return the file, the offset and the length of an item."""
    stored = dcp.FileSystemReader(location).read_metadata().storage_data
    ((_, info),) = ((index, info) for index, info in stored.items() if index.fqn == name)
    return location / info.relative_path, info.offset, info.length


# --- failed writes ----------------------------------------------------------------------------------------------------


def _operations(tmp_path: Path, state: dict[str, Any]) -> list[Any]:
    plan = FaultPlan()
    ckptcore.save(place(tmp_path / "tried"), state, layout="dcp", context=counted(plan))
    return plan.operations


def test_every_failed_write_raises_an_error(tmp_path: Path) -> None:
    """After the failure, neither library finds a checkpoint."""
    changes = [operation for operation in _operations(tmp_path, NEW) if operation.name in ("put", "write_at", "finish")]
    assert {".metadata", "__0_0.distcp"} <= {key.rsplit("/")[-1] for operation in changes for key in operation.keys}
    for operation in changes:
        location = tmp_path / f"at {operation.number}"
        plan = FaultPlan(FailAt(operation.number, OSError(5, "Input/output error")))
        with pytest.raises((CheckpointError, OSError)):
            ckptcore.save(place(location), NEW, layout="dcp", context=counted(plan))
        assert not (location / ".metadata").exists()
        with pytest.raises(CheckpointError):
            ckptcore.load(location)


def test_a_failed_overwrite_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, OLD, layout="dcp")
    plan = FaultPlan()
    ckptcore.save(place(location), NEW, layout="dcp", overwrite=True, context=counted(plan))
    changes = [operation for operation in plan.operations if operation.name in ("put", "write_at", "finish", "rename")]
    assert len(changes) > 3
    for operation in changes:
        ckptcore.save(location, OLD, layout="dcp", overwrite=True)
        failing = FaultPlan(FailAt(operation.number, OSError(28, "No space left on device")))
        with pytest.raises((CheckpointError, OSError)):
            ckptcore.save(place(location), NEW, layout="dcp", overwrite=True, context=counted(failing))
        assert_same(loaded(location, like(OLD)), OLD)
        assert_same(ckptcore.load(location, OLD), OLD)
        assert ckptcore.verify(location).ok


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, OLD, layout="dcp")
    for room in (0, 100, 5000, 1 << 20):
        with pytest.raises(StorageFullError):
            ckptcore.save(
                place(location), NEW, layout="dcp", overwrite=True, context=counted(FaultPlan(FullAfter(room)))
            )
        assert_same(loaded(location, like(OLD)), OLD)


def test_an_error_of_a_background_save_is_raised(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, OLD, layout="dcp")
    context = counted(FaultPlan(FullAfter(5000)))
    handle = ckptcore.save_async(place(location), NEW, layout="dcp", overwrite=True, context=context)
    with pytest.raises(StorageFullError):
        handle.result(60)
    assert_same(loaded(location, like(OLD)), OLD)


def test_an_unsupported_leaf_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, OLD, layout="dcp")
    with pytest.raises(UnsupportedLeafError, match="bad"):
        ckptcore.save(location, {**NEW, "bad": object()}, layout="dcp", overwrite=True)
    assert_same(loaded(location, like(OLD)), OLD)


def test_an_overwrite_leaves_no_file_of_the_old_checkpoint(tmp_path: Path) -> None:
    """torch overwrites in place, and would leave the files of a larger job."""
    location = tmp_path / "c"
    saved({f"t{number}": torch.randn(10) for number in range(4)}, location, thread_count=4)
    with pytest.raises(CheckpointError):
        ckptcore.save(location, OLD, layout="dcp")  # a save does not replace a checkpoint unless `overwrite` is set
    ckptcore.save(tmp_path / "d", NEW, layout="safetensors")
    ckptcore.save(tmp_path / "d", OLD, layout="dcp", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "d").glob("*.*")) == [
        ".metadata",
        "__0_0.distcp",
        "checkpoint.json",
    ]
    assert_same(loaded(tmp_path / "d", like(OLD)), OLD)


def test_a_failed_process_fails_the_save_on_all_processes(tmp_path: Path) -> None:
    location = tmp_path / "c"
    ckptcore.save(location, OLD, layout="dcp")

    def save(rank: int, context: ckptcore.Context) -> None:
        state: dict[str, Any] = {"w": np.zeros(3), "mine": object() if rank == 2 else 1}
        ckptcore.save(location, state, layout="dcp", overwrite=True, context=context)

    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(3, save, timeout_seconds=30)
    assert len(raised.value.exceptions) == 3
    assert_same(loaded(location, like(OLD)), OLD)


# --- flipped bits -----------------------------------------------------------------------------------------------------

SIZES = {"small": 64, "window": 60_000, "large": 1 << 18, "blocks": (3 << 18) + 5}


def _noise(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def _with_ckptcore(state: dict[str, Any], location: Path) -> None:
    ckptcore.save(location, state, layout="dcp")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("save", [_with_ckptcore, saved], ids=["ours", "torch's"])
def test_flipped_bits_of_elements_are_found(
    tmp_path: Path, save: Callable[[dict[str, Any], Path], None], size: str
) -> None:
    """torch does not verify checksums, so it loads wrong numbers without an error."""
    location, tensor = tmp_path / "c", _noise(SIZES[size])
    save({"w": tensor, "step": 1}, location)
    path, offset, length = places(location, "w")
    with path.open("rb") as file:
        file.seek(offset)
        first = offset + file.read(length).index(bytes_of(tensor))
    nbytes = 4 * tensor.numel()
    for number in range(8):
        position = first + (nbytes - 1) * number // 7
        flipped(path, position, number)
        with pytest.raises(CorruptCheckpointError):
            ckptcore.load(location)
        with pytest.raises(CorruptCheckpointError):
            ckptcore.load(location, {"w": torch.zeros_like(tensor), "step": 0})
        assert not ckptcore.verify(location).ok
        by_torch = loaded(location, {"w": torch.zeros_like(tensor), "step": None})
        assert not torch.equal(by_torch["w"].view(torch.int32), tensor.view(torch.int32))
        flipped(path, position, number)
    assert ckptcore.verify(location).ok
    assert_same(ckptcore.load(location, {"w": torch.zeros_like(tensor), "step": 0})["w"], tensor)


@pytest.mark.parametrize("save", [_with_ckptcore, saved], ids=["ours", "torch's"])
def test_a_flipped_bit_anywhere_never_changes_the_result(
    tmp_path: Path, save: Callable[[dict[str, Any], Path], None]
) -> None:
    """Flips bits outside of elements, too. The load returns the saved state or raises an error."""
    location = tmp_path / "c"
    state = {"w": _noise(40), "f8": _noise(20).to(torch.float8_e5m2), "names": ["a", (1, 2.5)], "step": 12345}
    save(dict(state), location)
    (path,) = location.glob("*.distcp")
    size, seen = path.stat().st_size, 0
    for position in range(0, size, 1 + size // 400):
        flipped(path, position, position % 8)
        try:
            restored = ckptcore.load(location, state)
        except CheckpointError:
            seen += 1
        else:
            assert_same(restored, state, f"byte {position}")
        flipped(path, position, position % 8)
    assert seen > 10


def test_a_flipped_bit_of_a_compressed_item_is_found(tmp_path: Path) -> None:
    location, tensor, seen = tmp_path / "c", _noise(3000), 0
    saved({"w": tensor}, location, _extensions=[ZStandard()])
    path, offset, length = places(location, "w")
    for number in range(1, 100):
        position = offset + length * number // 100
        flipped(path, position, number % 8)
        try:
            restored = ckptcore.load(location)["w"]
        except CorruptCheckpointError:
            seen += 1
        else:
            assert restored.tobytes() == bytes_of(tensor)  # this bit does not affect the elements
        flipped(path, position, number % 8)
    assert seen > 90
    assert ckptcore.load(location)["w"].tobytes() == bytes_of(tensor)


@pytest.mark.parametrize(
    "options", [{}, {"single_file_per_rank": False}, {"_extensions": [ZStandard()]}], ids=["plain", "files", "zstd"]
)
def test_errors_name_the_damaged_array(tmp_path: Path, options: dict[str, Any]) -> None:
    """This also applies to items that are not the first in their file, and to damage outside of the elements."""
    location = tmp_path / "c"
    state = {"first": _noise(500), "second": _noise(501), "large": _noise(1 << 17), "third": _noise(502)}
    saved(dict(state), location, **options)
    for name in state:
        path, offset, length = places(location, name)
        for position in range(offset, offset + length, 23 if length < 10_000 else 7_919):
            flipped(path, position, position % 8)
            try:
                ckptcore.load(location)
            except CorruptCheckpointError as error:
                assert str(location) in str(error) and f"(this is in {name})" in str(error), position - offset
            flipped(path, position, position % 8)


@pytest.mark.parametrize("save", [_with_ckptcore, saved], ids=["ours", "torch's"])
@pytest.mark.parametrize("size", [64, 1 << 18])
def test_a_truncated_file_is_an_error(tmp_path: Path, save: Callable[[dict[str, Any], Path], None], size: int) -> None:
    location = tmp_path / "c"
    save({"w": _noise(size)}, location)
    (path,) = location.glob("*.distcp")
    data = path.read_bytes()
    for left in (0, 10, len(data) // 2, len(data) - 800):
        path.write_bytes(data[:left])
        with pytest.raises(CheckpointError):
            ckptcore.load(location)
        assert not ckptcore.verify(location).ok
    path.unlink()
    with pytest.raises(CheckpointError, match="distcp"):
        ckptcore.load(location)


def test_our_checkpoint_loads_without_its_root(tmp_path: Path) -> None:
    """A copy may contain only the files that torch needs.

    Such a copy has all elements, and checksums of items still detect flipped bits.
    """
    location = tmp_path / "c"
    state = {"w": _noise(100), "large": _noise(1 << 18), "step": 3}
    ckptcore.save(location, state, layout="dcp")
    (location / "checkpoint.json").unlink()
    shutil.rmtree(location / ".ckptcore", ignore_errors=True)
    assert_same(ckptcore.load(location, state), state)
    assert ckptcore.verify(location).ok
    for name in ("w", "large"):
        path, offset, length = places(location, name)
        flipped(path, offset + length // 2)
        with pytest.raises(CorruptCheckpointError):
            ckptcore.load(location)
        flipped(path, offset + length // 2)


# --- casts, types of errors, code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_the_error_for_another_dtype_names_the_path(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch casts without an error, even if the other dtype cannot represent a number."""
    ckptcore.save(tmp_path / "c", {"model": {"layer.weight": torch.full((3,), 1e30)}}, layout="dcp")
    asked = {"model": {"layer.weight": torch.zeros(3, dtype=dtype)}}
    with pytest.raises(TreeMismatchError, match=r"layer\.weight.*float32|float32.*layer\.weight"):
        ckptcore.load(tmp_path / "c", asked)
    assert asked["model"]["layer.weight"].count_nonzero() == 0


def test_errors_are_exceptions(tmp_path: Path) -> None:
    """`except Exception` does not catch errors of torch."""
    saved({"a": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(Exception, match="b"):
        ckptcore.load(tmp_path / "c", {"b": torch.ones(1)})
    assert issubclass(TreeMismatchError, Exception)
    with pytest.raises(BaseException, match="Missing key") as raised:
        loaded(tmp_path / "c", {"b": torch.ones(1)})
    assert not isinstance(raised.value, Exception)


class _Runs:
    """Runs code if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    saved({"w": torch.ones(2), "bad": _Runs(mark)}, tmp_path / "c")
    assert not mark.exists()
    restored = ckptcore.load(tmp_path / "c", {"w": torch.zeros(2), "bad": ckptcore.PLACEHOLDER})
    assert_same(restored["w"], torch.ones(2))
    try:
        ckptcore.load(tmp_path / "c")
        ckptcore.verify(tmp_path / "c")
    except CheckpointError:
        pass  # the value may be rejected
    assert not mark.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded(tmp_path / "c", {"w": torch.zeros(2), "bad": None})
    assert mark.exists()  # torch runs the code


def test_values_of_classes_that_torch_pickles_by_name(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(1),
        "ordered": collections.OrderedDict(a=1),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "path": tmp_path,
        "set": {1, 2},
        "numpy": np.float32(1.5),
    }
    saved(dict(state), tmp_path / "c")
    restored = ckptcore.load(tmp_path / "c")
    assert restored["w"].tolist() == [1] and restored["ordered"] == {"a": 1} and restored["numpy"] == 1.5
    assert tuple(restored["size"]) == (2, 3)
    assert set(restored) == set(state)


# --- state of each process --------------------------------------------------------------------------------------------


def test_the_state_of_each_process_is_restored(tmp_path: Path) -> None:
    """torch saves the state of only one process."""
    location, size = tmp_path / "c", 3

    def save(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        objects = {
            "model": {"w": np.arange(5.0)},
            "data": ckptcore.PerProcess({"position": 10 * rank, "seed": np.full(rank + 1, rank)}),
        }
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        ckptcore.save_checkpointables(location, objects, layout="dcp", context=context)

    def load(rank: int, context: ckptcore.Context) -> Any:
        wanted = {"model": None, "data": ckptcore.PerProcess(None)}
        return ckptcore.load_checkpointables(location, wanted, context=context)

    ThreadJob(size, timeout_seconds=30).run(save)
    for rank, restored in enumerate(run_ranks(size, load, timeout_seconds=30)):
        assert restored["model"]["w"].tolist() == [0, 1, 2, 3, 4]
        assert restored["data"]["position"] == 10 * rank
        assert restored["data"]["seed"].tolist() == [rank] * (rank + 1)
    assert ckptcore.verify(location).ok
    assert_same(loaded(location / "model", {"w": torch.zeros(5).double()}), {"w": torch.arange(5.0).double()})
    own = [location / f"data.rank_{rank}" for rank in range(size)]
    assert [loaded(path, {"position": None})["position"] for path in own] == [0, 10, 20]
