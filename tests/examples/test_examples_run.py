"""Each example runs to its end in a new process, as a reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {
    "quickstart_numpy.py": ["numpy"],
    "quickstart_jax.py": ["jax"],
    "quickstart_torch.py": ["torch"],
    "train_jax.py": ["grain", "jax", "optax", "sklearn"],
    "train_loop_async.py": ["torch"],
    "train_torch.py": ["sklearn", "torch", "torchdata"],
}
ARGUMENTS = {name: ["--directory", "run", "--steps", "30"] for name in ("train_jax.py", "train_torch.py")}


def test_every_example_is_listed() -> None:
    others = {"__init__.py", "demo.py"}  # test_demo.py tests the demo
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*others, *NEEDS}


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_example_runs(name: str, tmp_path: Path) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *ARGUMENTS.get(name, [])],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout
    assert finished.stderr == ""
    made = ["run"] if name in ARGUMENTS else []
    assert [path.name for path in tmp_path.iterdir()] == made  # it wrote nothing else to its working directory
