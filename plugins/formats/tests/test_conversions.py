"""Conversions of checkpoints of other software into Hugging Face directories.

Each byte is read once, and memory is bounded.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import FaultPlan
from safetensors.numpy import load_file

import ckptcore
from plugins.formats.tests.counted import counted, place
from plugins.formats.tests.other_formats import FORMATS, Arrays, Format
from plugins.formats.tests.zero_files import Shape, array, write_zero

SHAPES: list[dict[str, Shape]] = [
    {"a": (501, 307), "b": (3, 5, 7001), "c": (99991,)},
    {f"n{number}": (37, 3) for number in range(20)},
]
ARRAYS = {name: array(name, shape) for group in SHAPES for name, shape in group.items()}
PIECE = 400_000
"""Memory limit of a conversion, in bytes. Two of the arrays are larger."""

MIB = 1 << 20
LARGE: Shape = (4096, 4096)
"""The shape of an array of 64 MiB. Ten of them exceed the memory of a conversion."""
CONVERSION = """
import sys
import ckptcore


def resident(field):
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


source, destination, subtree = sys.argv[1:]
imported = resident("VmRSS:")
ckptcore.copy(source, destination, layout="safetensors", subtree=subtree, context=ckptcore.Context(durability="none"))
print(resident("VmHWM:") - imported)
"""


def expected(form: Format, arrays: Arrays) -> Arrays:
    """Return the arrays that a copy contains, by name."""
    return {"array": next(iter(arrays.values()))} if form.is_single else arrays


def assert_converted(directory: Path, arrays: Arrays) -> None:
    """Compare the arrays of a Hugging Face directory bit for bit. The directory may contain other arrays."""
    stored: dict[str, np.ndarray[Any, Any]] = {}
    for path in directory.glob("*.safetensors"):
        stored.update(load_file(path))
    assert all(stored[name].shape == original.shape for name, original in arrays.items())
    assert all(stored[name].tobytes() == original.tobytes() for name, original in arrays.items())


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_a_conversion_reads_each_byte_once_in_pieces(form: Format, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    location = form.write(tmp_path / "c", ARRAYS)
    plan = FaultPlan()
    ckptcore.copy(
        place(tmp_path / "c" / location), tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=700_000), subtree=form.subtree, context=counted(plan, PIECE),
    )  # fmt: skip
    sources = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in sources)
    slack = max(160_000, 64_000 * len(sources)) + form.header_bytes  # allows for directories, headers and pickles
    assert plan.bytes_read < 1.02 * stored + slack
    arrays = expected(form, ARRAYS)
    elements = [operation for operation in plan.operations if operation.name == "get_into"]
    if form.by_ranges:
        nbytes = sum([original.nbytes for original in arrays.values()])
        assert 0.99 * nbytes <= sum([read.nbytes for read in elements]) < 1.01 * nbytes
        assert max([read.nbytes for read in elements]) <= PIECE
        assert len({(read.keys, read.offset) for read in elements}) == len(elements)
    assert_converted(tmp_path / "hf", arrays)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_a_conversion_needs_little_memory(form: Format) -> None:
    """A conversion of 640 MiB takes at most 512 MiB, in addition to the imports and one array."""
    arrays = {f"n{number}": array(f"n{number}", LARGE) for number in range(10)}
    if form.is_single:
        arrays = {"n": array("n", (10 * LARGE[0], LARGE[1]))}
    with tempfile.TemporaryDirectory() as directory:  # pytest would keep the files of `tmp_path`
        _convert_alone(form, arrays, Path(directory))


def _convert_alone(form: Format, arrays: Arrays, directory: Path) -> None:
    (directory / "c").mkdir()
    location = form.write(directory / "c", arrays)
    arguments = [str(directory / "c" / location), str(directory / "hf"), form.subtree]
    ended = subprocess.run(
        [sys.executable, "-c", CONVERSION, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) - 4 * math.prod(LARGE) <= 512 * MIB
    assert_converted(directory / "hf", expected(form, arrays))


def test_a_box_is_read_from_the_files_that_have_it(tmp_path: Path) -> None:
    write_zero(tmp_path / "c", 3, 3, SHAPES)
    plan = FaultPlan()
    with ckptcore.open(place(tmp_path / "c"), context=counted(plan)) as checkpoint:
        before = plan.bytes_read
        row = checkpoint["module"]["a"][100:101]
        assert np.array_equal(row, ARRAYS["a"][100:101])
        assert plan.bytes_read - before <= 1.05 * math.prod(row.shape) * 4
