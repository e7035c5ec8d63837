"""The programs of the guide for Flax NNX and Equinox, which are killed during a save and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[4]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from ckptcore import Context
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

page = Path(sys.argv[1])
module = page_module(page, "trainers")
for block in code_blocks(page.read_text(encoding="utf-8")):
    if block.language == "python":
        run_python(block, page, module)

def kill(event):
    if event.phase == "write" and event.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

train, directory = getattr(module, sys.argv[2]), sys.argv[3]
print(json.dumps(train(directory, 6, Context(observers=[kill] if sys.argv[4] == "killed" else []))))
"""


def run(train: str, directory: Path, fate: str) -> subprocess.CompletedProcess[str]:
    """Run the code of the guide, and then call one of its functions."""
    page = ROOT / "docs/how-to/with-flax-and-equinox.md"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(page), train, str(directory / "run"), fate]
    return subprocess.run(command, env=environment, cwd=directory, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("train", ["train_nnx", "train_equinox"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, train: str) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(train, tmp_path / "whole", "whole")
    assert whole.returncode == 0, whole.stderr
    losses = list(json.loads(whole.stdout).items())
    assert [step for step, _ in losses] == ["1", "2", "3", "4", "5", "6"]
    killed = run(train, tmp_path / "killed", "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(train, tmp_path / "killed", "resumed")
    assert resumed.returncode == 0, resumed.stderr
    assert list(json.loads(resumed.stdout).items()) == losses[2:]  # step 3 was not committed
