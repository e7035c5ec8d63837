"""Memory of conversions: only the arrays that are being read and written, however many the checkpoint has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from tests.composites.foreign_format import ShelfPlugin

pytestmark = pytest.mark.system

MIB = 1 << 20
ARRAYS = 10
ARRAY_BYTES = 32 * MIB

# Runs in a new process, whose peak of memory is that of the conversion.
PROGRAM = """
import sys
import ckptcore
from tests.composites.foreign_format import ShelfPlugin

source, destination, layout, warm = sys.argv[1:]
memory = ckptcore.context.MemoryOptions(load_bytes=64 << 20)
plugins = ckptcore.context.PluginOptions(extra=(ShelfPlugin(),))
context = ckptcore.Context(plugins=plugins, durability="none", memory=memory)
ckptcore.copy(warm, warm + "-again", layout=layout, context=context)


def peak():
    # Not ru_maxrss: it begins with the peak of the parent process.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


before = peak()
ckptcore.copy(source, destination, layout=layout, context=context)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("source_layout", ["safetensors", "shelf"])
@pytest.mark.parametrize("layout", ["safetensors", "shelf"])
def test_few_arrays_are_in_memory_at_a_time(source_layout: str, layout: str, tmp_path: Path) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=(ShelfPlugin(),)), durability="none")
    elements = np.arange(ARRAY_BYTES // 4, dtype=np.float32)
    state = {f"layer_{number}": elements + number for number in range(ARRAYS)}
    ckptcore.save(tmp_path / "source", state, layout=source_layout, context=context)
    ckptcore.save(tmp_path / "warm", {"w": np.zeros(MIB)}, layout=source_layout, context=context)
    assert ckptcore.metadata(tmp_path / "source", context=context).nbytes == ARRAYS * ARRAY_BYTES
    arguments = [str(tmp_path / "source"), str(tmp_path / "converted"), layout, str(tmp_path / "warm")]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 2 * ARRAY_BYTES + 48 * MIB
    loaded = ckptcore.load(tmp_path / "converted", context=context)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
