"""Budgets of all readers of hostile metadata: work and memory are linear in the size of files, for any stated numbers.

Each test combines a reader with a sample in which one number can be large. The number is doubled twice. Add new
numbers to `budget_samples`, and new readers below.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from tests.corruption.budget_samples import LIMITS, SAMPLES

_GROWTH: Final = 2.3
"""Limit of the growth of calls and memory if a number doubles."""

_FREE_BYTES: Final = 16 << 20
_PER_BYTE: Final = 4
"""Limits of the memory: this for any file, and this per byte of the files."""

_LEAST_GROWTH: Final = 512
"""Minimum growth of memory in bytes, if the number of calls does not grow."""

_NOISE_CALLS: Final = 500
_NOISE_BYTES: Final = 128 << 10
"""Tolerance for differences that do not depend on the number, such as caches and threads."""


def _context() -> ckptcore.Context:
    return ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))


def _read_boxes(location: Path) -> None:
    with ckptcore.open(location, context=_context()) as checkpoint:
        for box in checkpoint.iter_boxes():
            del box


def _read_elements(location: Path) -> None:
    with ckptcore.open(location, context=_context()) as checkpoint:
        for name in checkpoint:
            with contextlib.suppress(CheckpointError):
                array = checkpoint[name]
                if isinstance(array, ckptcore.results.StoredArray) and array.size:
                    _ = array[(0,) * array.ndim]
            break


def _copy(layout: str) -> Callable[[Path], None]:
    def copy(location: Path) -> None:
        ckptcore.copy(location, f"memory://budgets/{secrets.token_hex(8)}", layout=layout, context=_context())

    return copy


READERS: Final[Mapping[str, Callable[[Path], object]]] = {
    "metadata": lambda location: ckptcore.metadata(location, context=_context()).nbytes,
    "load": lambda location: ckptcore.load(location, context=_context()),
    "load_checkpointables": lambda location: ckptcore.load_checkpointables(location, context=_context()),
    "verify": lambda location: ckptcore.verify(location, context=_context()),
    "open": _read_elements,
    "iter_boxes": _read_boxes,
    "inspect": lambda location: CliRunner().invoke(
        application, ["inspect", str(location), "--json"], catch_exceptions=False
    ),
    "diff": lambda location: ckptcore.diff(location, location, context=_context()),
    "copy": lambda location: ckptcore.copy(location, location.parent / secrets.token_hex(8), context=_context()),
    "convert to safetensors": _copy("safetensors"),
    "convert to zarr3": _copy("zarr3"),
    "convert to dcp": _copy("dcp"),
}
"""Readers by name."""


_REFUSED_AT_ONCE: Final = (
    "composite: processes that are missing",
    "dcp: depth of paths",
    "root: blocks",
    "root: cuts",
    "torch: a sparse storage",
    "zarr 2: a large chunk",
)
"""Samples with the same cost for any number: no loop depends on it, or it is first compared with the size of files.

All other samples must cost more for a larger number. This detects samples that no reader reads."""


_SLOW: Final = {"torch: lists that share lists": pytest.mark.slow}
"""Samples that are read up to a limit, which takes half a million calls for any number."""

_BY_PATH: Final = ("inspect", "diff")
"""Readers that store the whole path of each container. Their cost is quadratic in the depth, which is at most 200."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """The number of function calls in all threads, and the peak of allocated bytes."""

    calls: int
    peak: int


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Allow errors, except for a location without a checkpoint, because there no reader reads the metadata."""
    try:
        yield
    except CheckpointError as error:
        if type(error) is CheckpointNotFoundError:
            raise


def _cost(read: Callable[[Path], object], location: Path) -> _Cost:
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start(1)
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        with _refused():
            read(location)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return _Cost(calls, peak)


def _expect_linear(name: str, reader: str, least: int, directory: Path, *, grows: bool = False) -> None:
    """Assert that work grows at most linearly with the number, and memory with the size of the files.

    With `grows`, fail also if the cost does not grow.
    """
    read = READERS[reader]
    least = min(least, LIMITS.get(name, 4 * least) // 4)
    costs: list[_Cost] = []
    for number in (least, 2 * least, 4 * least):
        location = directory / str(number) / "checkpoint"
        location.parent.mkdir()
        SAMPLES[name](location, number)
        if not costs:
            with _refused():
                read(location)  # the first read imports modules and fills caches
        held = sum([path.stat().st_size for path in location.parent.rglob("*") if path.is_file()])
        cost = _cost(read, location)
        assert cost.peak <= _PER_BYTE * held + _FREE_BYTES, f"{number}: {cost}, and the files have {held} bytes"
        if costs:
            assert cost.calls <= _GROWTH * costs[-1].calls + _NOISE_CALLS, (
                f"{number // 2}: {costs[-1]}, {number}: {cost}"
            )
            assert cost.peak <= _GROWTH * costs[-1].peak + _NOISE_BYTES, f"{number // 2}: {costs[-1]}, {number}: {cost}"
        costs.append(cost)
    if grows:  # compared with the minimum, because the first cost may include filling caches
        least_calls, least_bytes = min([cost.calls for cost in costs]), min([cost.peak for cost in costs])
        assert costs[-1].calls > least_calls or costs[-1].peak > least_bytes + _LEAST_GROWTH, costs


@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOW.get(name, ())) for name in SAMPLES])
def test_work_and_memory_are_linear(name: str, tmp_path: Path) -> None:
    _expect_linear(
        name, "verify" if name.startswith("composite") else "load", 16, tmp_path, grows=name not in _REFUSED_AT_ONCE
    )


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", SAMPLES)
def test_work_and_memory_of_all_readers_are_linear(name: str, reader: str, tmp_path: Path) -> None:
    if "depth" in name and reader in _BY_PATH:
        pytest.skip("the output has the whole path of each container")
    if "views" in name and reader.startswith("convert"):
        pytest.skip("the output has each view in full")
    _expect_linear(name, reader, 64, tmp_path)
