"""Budgets of every reader of hostile metadata: the work and the memory are linear in the files, whatever they state.

A row of the table is a sample, in which one number can be made large, and a reader. Samples are in `budget_samples`,
and readers below: add a new reader or number there. The number is doubled twice.
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
"""Bytes by which memory grows at least if calls do not."""

_NOISE_CALLS: Final = 500
_NOISE_BYTES: Final = 128 << 10
"""Differences that do not depend on the number: caches, threads."""


def _context() -> ckptcore.Context:
    return ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))


def _read_boxes(location: Path) -> None:
    with ckptcore.open(location, context=_context()) as opened:
        for box in opened.iter_boxes():
            del box


def _read_elements(location: Path) -> None:
    with ckptcore.open(location, context=_context()) as opened:
        for name in opened:
            with contextlib.suppress(CheckpointError):
                array = opened[name]
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
"""Samples that cost the same whatever the number is: it is not counted to, or compared with the size of the files.

All others must cost more if the number is larger, so that a sample that no reader looks into cannot pass."""


_SLOW: Final = {"torch: lists that share lists": pytest.mark.slow}
"""Samples that are read up to a limit, which takes half a million calls whatever the number is."""

_BY_PATH: Final = ("inspect", "diff")
"""Readers that name each container by its whole path. Depth, of which there are at most 200, is squared."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """The calls of functions in all threads, and the most bytes that were allocated at a time."""

    calls: int
    peak: int


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Allow errors, but not those about a location without a checkpoint, of which no reader looks into the metadata."""
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
    """Fail unless the cost grows at most as the number does, and the memory is in proportion to the files.

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
                read(location)  # imports modules, and fills caches
        held = sum([path.stat().st_size for path in location.parent.rglob("*") if path.is_file()])
        cost = _cost(read, location)
        assert cost.peak <= _PER_BYTE * held + _FREE_BYTES, f"{number}: {cost}, and the files have {held} bytes"
        if costs:
            assert cost.calls <= _GROWTH * costs[-1].calls + _NOISE_CALLS, (
                f"{number // 2}: {costs[-1]}, {number}: {cost}"
            )
            assert cost.peak <= _GROWTH * costs[-1].peak + _NOISE_BYTES, f"{number // 2}: {costs[-1]}, {number}: {cost}"
        costs.append(cost)
    if grows:  # the first may also have filled caches
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
