"""The core without the distribution of transforms. It loads, matches and reads updates; errors say what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys

sys.modules["ckptcore_transforms"] = None  # as if it were not installed: an import of it fails

import numpy as np

import ckptcore
from ckptcore.errors import MissingDistributionError

directory = sys.argv[1]
base, update = f"{directory}/base", f"{directory}/update"
ckptcore.save(base, {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})
ckptcore.save(update, {"b": np.zeros(2)}, strategy=ckptcore.Update(base))
assert (ckptcore.load(update)["w"] == np.arange(6.0).reshape(2, 3)).all()
wanted = {"w": ckptcore.AbstractArray((8,), "float32"), "b": ckptcore.AbstractArray((1,), "float64")}
matching = ckptcore.Matching(cast="narrowing", shapes={"reshape", "pad", "truncate"})
try:
    ckptcore.load(base, wanted)
except ckptcore.errors.TreeMismatchError:
    pass
wanted["w"] = ckptcore.AbstractArray((3, 2), "float32")
assert (ckptcore.load(update, wanted, matching=matching)["w"] == np.arange(6.0).reshape(3, 2)).all()
for get in (lambda: ckptcore.transforms, lambda: __import__("ckptcore", fromlist=["transforms"]).transforms):
    try:
        get()
    except MissingDistributionError as error:
        print(error)
"""


@pytest.mark.system
def test_the_core_alone_loads_and_names_what_is_missing(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    assert all("pip install 'ckptcore[transforms]'" in line for line in lines)
