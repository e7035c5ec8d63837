"""Amounts read by the processes of another mesh: little more than they request, if their parts are contiguous."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from ckptcore_dcp.storages import should_read_whole
from ckptcore_testing import FaultPlan

import ckptcore
from ckptcore.errors import ChecksumError
from ckptcore.model import ArraySpec, Box, HostArray
from plugins.layout_dcp.tests.counted_places import Part, counted, place
from plugins.layout_dcp.tests.sharded_saves import boxes_of, save_ours, save_torch

SHAPE = (4096, 4096)
SAVES = {"ours": save_ours, "torch": save_torch}
Grid = tuple[int, int]


@pytest.fixture(scope="module")
def state() -> Mapping[str, HostArray]:
    """A model with a 32 MiB matrix and a small one."""
    generator = np.random.default_rng(0)
    shapes = {"q": SHAPE, "norm": (64, 16)}
    return {name: generator.integers(0, 1 << 15, shape, np.int16) for name, shape in shapes.items()}


def _read_by_all(location: Path, state: Mapping[str, HostArray], grid: Grid) -> tuple[float, float]:
    """Return how often the processes of a mesh read each requested byte: the average, and the maximum of a process."""
    needed, read, worst = 0, 0, 0.0
    for rank in range(math.prod(grid)):
        boxes = {name: boxes_of(array.shape, grid)[rank] for name, array in state.items()}
        like = {name: Part(ArraySpec(array.shape, "int16"), boxes[name]) for name, array in state.items()}
        plan = FaultPlan()
        loaded = ckptcore.load(place(location), like, context=counted(plan))
        for name, array in state.items():
            assert np.array_equal(loaded[name], array[boxes[name].slices]), (rank, name)
        nbytes = sum(box.size * 2 for box in boxes.values())
        needed, read = needed + nbytes, read + plan.bytes_read
        worst = max(worst, plan.bytes_read / nbytes)
    return read / needed, worst


# Cases in which the requests are contiguous in each saved part: groups of rows, or whole parts. A range of 8 MiB that
# begins and ends inside checksum blocks needs 9 blocks.
TOGETHER: list[tuple[Grid, Grid]] = [
    ((4, 1), (2, 1)),
    ((4, 1), (1, 1)),
    ((2, 1), (4, 1)),
    ((3, 1), (2, 1)),
    ((1, 4), (1, 2)),
    ((2, 2), (2, 1)),
    ((2, 2), (1, 2)),
]


@pytest.mark.parametrize("writer", SAVES)
@pytest.mark.parametrize("saved", sorted({saved for saved, _ in TOGETHER}))
def test_contiguous_requests_read_little_more_than_requested(
    tmp_path: Path, state: Mapping[str, HostArray], writer: str, saved: Grid
) -> None:
    SAVES[writer](tmp_path / "c", state, saved)
    for grid in [grid for before, grid in TOGETHER if before == saved]:
        ratio, worst = _read_by_all(tmp_path / "c", state, grid)
        assert 1 <= ratio <= 1.1, grid
        assert worst <= (1.13 if writer == "ours" else 1.01), grid


@pytest.mark.parametrize("writer", SAVES)
def test_parts_of_rows_are_read_with_the_gaps_between_them(
    tmp_path: Path, state: Mapping[str, HostArray], writer: str
) -> None:
    """Disks do not read 2 KiB faster than 4 KiB, so the gaps are read, too.

    Contiguous ranges are read once and without gaps.
    """
    SAVES[writer](tmp_path / "c", state, (1, 2))
    ratio, worst = _read_by_all(tmp_path / "c", state, (1, 4))
    assert 1.9 <= ratio <= worst <= 2.01


@pytest.mark.parametrize(("grid", "is_detected"), [((2, 1), True), ((1, 4), True), ((4, 1), False)])
def test_items_that_are_read_completely_are_verified(
    tmp_path: Path, state: Mapping[str, HostArray], grid: Grid, *, is_detected: bool
) -> None:
    """A wrong byte in a file of torch is found only if the request makes the load read the whole item."""
    save_torch(tmp_path / "c", {"q": state["q"]}, (2, 1))
    file = tmp_path / "c" / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.seek(1 << 20)
        byte = stream.read(1)
        stream.seek(1 << 20)
        stream.write(bytes([byte[0] ^ 1]))
    like = {"q": Part(ArraySpec(SHAPE, "int16"), boxes_of(SHAPE, grid)[0])}
    with pytest.raises(ChecksumError, match="__0_0") if is_detected else nullcontext():
        ckptcore.load(place(tmp_path / "c"), like, context=counted(FaultPlan()))


@pytest.mark.parametrize(
    ("wanted", "whole"),
    [
        ([Box((0, 0), (100, 1000))], True),
        ([Box((0, 0), (91, 1000))], True),
        ([Box((0, 0), (90, 1000))], False),
        ([Box((0, 0), (50, 1000))], False),
        ([Box((0, 0), (50, 1000)), Box((50, 0), (200, 1000))], True),
        ([Box((0, 0), (100, 1))], True),
        ([Box((0, 0), (50, 1))], False),
        ([Box((200, 0), (300, 1000))], False),
        ([], False),
    ],
)
def test_large_requests_read_the_whole_box(wanted: list[Box], *, whole: bool) -> None:
    """A column of 8 kB rows makes the load read the whole box.

    A column of 1 MB rows does not, because its parts are far apart.
    """
    assert should_read_whole(wanted, Box((0, 0), (100, 1000)), 8) == whole
    if wanted == [Box((0, 0), (100, 1))]:
        assert not should_read_whole(wanted, Box((0, 0), (100, 1000)), 1000)
