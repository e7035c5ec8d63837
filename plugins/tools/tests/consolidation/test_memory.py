"""Copying one large array needs much less memory than the array has bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptcore

pytestmark = pytest.mark.system

MIB = 1 << 20
ARRAY_BYTES = 512 * MIB

# The copy runs in a new process, whose peak memory is measured.
PROGRAM = """
import sys
import ckptcore

source, destination, form, bound, warm = sys.argv[1:]
memory = ckptcore.context.MemoryOptions(load_bytes=int(bound) or None)
context = ckptcore.Context(durability="none", memory=memory)
form = {"subtree": ()} if form == "subtree" else {"layout": form}
ckptcore.copy(warm, warm + "-again", context=context, **form)


def peak():
    # ru_maxrss would start with the peak of the parent process.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


before = peak()
ckptcore.copy(source, destination, context=context, **form)
print(peak() - before)
"""

SLACK_BYTES = 64 * MIB
"""Memory for the buffers of reading and writing threads, 4 MiB for each thread."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "form", "bound_bytes"),
    [
        ("safetensors", "subtree", 0),
        ("dcp", "subtree", 24 * MIB),
        ("zarr3", "safetensors", 0),
    ],
)
def test_the_largest_array_can_exceed_the_memory(layout: str, form: str, bound_bytes: int, tmp_path: Path) -> None:
    context = ckptcore.Context(durability="none")
    array = np.arange(ARRAY_BYTES // 4, dtype=np.float32).reshape(-1, 1024)
    ckptcore.save(tmp_path / "source", {"w": array}, layout=layout, context=context)
    ckptcore.save(tmp_path / "warm", {"w": np.zeros(8 * MIB)}, layout=layout, context=context)
    arguments = [str(tmp_path / "source"), str(tmp_path / "made"), form, str(bound_bytes), str(tmp_path / "warm")]
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert int(completed.stdout) < (bound_bytes or 192 * MIB) + SLACK_BYTES
    assert np.array_equal(ckptcore.load(tmp_path / "made")["w"], array)
