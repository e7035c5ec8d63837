"""256 file descriptors, the limit of many systems, are enough for checkpoints of many more files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.system

_PROGRAM: Final = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout

directory = sys.argv[1] + "/"
context = ckptcore.Context(durability="none")
arrays = {f"w{number}": np.full(300, number, np.float32) for number in range(400)}
layouts = {"files": SafetensorsLayout(max_file_bytes=1200), "zarr": "zarr", "zarr3": "zarr3", "dcp": "dcp",
           "ocdbt": "ocdbt"}
for name, layout in layouts.items():
    ckptcore.save(directory + name, arrays, layout=layout, context=context)
    for _ in range(2):
        assert ckptcore.load(directory + name, context=context)["w399"][0] == 399
    assert ckptcore.verify(directory + name, context=context).ok
    ckptcore.load_into(directory + name, arrays, context=context)
    opened = ckptcore.open(directory + name, context=context)
    kept = [opened[f"w{number}"] for number in range(400)]
    assert [array[0] for array in kept] == list(range(400))
    ckptcore.copy(directory + name, directory + name + "-copy", context=context)
    ckptcore.copy(directory + name, directory + name + "-converted", layout="zarr3", context=context)
objects = {f"m{number}": {"w": np.full(3, number)} for number in range(300)}
ckptcore.save_checkpointables(directory + "objects", objects, context=context)
assert ckptcore.load_checkpointables(directory + "objects", context=context)["m299"]["w"][0] == 299
assert ckptcore.verify(directory + "objects", context=context).ok
ckptcore.copy(directory + "objects", directory + "objects-converted", layout="zarr3", context=context)
"""


def test_every_layout_is_saved_loaded_and_copied(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
