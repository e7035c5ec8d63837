"""Jobs of real processes: each library loads what the other saved, in as many processes, fewer, or only one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptcore
from tests.jobs.torch_scripts import run_script, run_torchrun

pytestmark = pytest.mark.system

HERE = Path(__file__).parent


def launch(program: str, size: int, *arguments: str | Path, start: Callable[..., Any] = run_script) -> None:
    """Run a program in several processes.

    Raises:
        AssertionError: a process failed; contains their output.
    """
    done = start(size, HERE / program, *arguments)
    assert done.returncode == 0, done.stderr[-6000:]


def losses(directory: Path, task: str, size: int) -> list[float]:
    """Return the losses of a task."""
    losses_of_task: list[float] = json.loads((directory / f"{task}.{size}.json").read_text())
    assert len(losses_of_task) == 3
    return losses_of_task


def resumed(
    directory: Path, saver: str, saved_by: int, sizes: tuple[int, ...], start: Callable[..., Any] = run_script
) -> None:
    """Save with one library, and resume with the other in several process counts. All losses must agree."""
    loader = {"ckptcore": "load-torch", "torch": "load-ckptcore"}[saver]
    launch("fsdp_job.py", saved_by, f"save-{saver}", directory, start=start)
    expected = losses(directory, f"save-{saver}", saved_by)
    for size in sizes:
        launch("fsdp_job.py", size, loader, directory, start=start)
        assert losses(directory, loader, size) == expected, size


@pytest.mark.slow
def test_torch_resumes_in_fewer_processes(tmp_path: Path) -> None:
    resumed(tmp_path, "ckptcore", 2, (1,))
    _expect_weights_in_slices(tmp_path)


def _expect_weights_in_slices(directory: Path) -> None:
    """Check weights that the job also exported in another layout, in slices that one process collects."""
    ckptcore.copy(directory / "weights", directory / "published", subtree=())
    loaded = load_file(directory / "published" / "model.safetensors")
    expected = ckptcore.load(directory / "ckptcore")["model"]
    assert list(loaded) == list(expected) == ["0.weight", "0.bias", "2.weight"]
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_ckptcore_resumes_in_fewer_processes(tmp_path: Path) -> None:
    resumed(tmp_path, "torch", 2, (1,), run_torchrun)


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["ckptcore", "torch"])
def test_four_processes_resume_as_four_and_fewer(tmp_path: Path, saver: str) -> None:
    resumed(tmp_path, saver, 4, (4, 2, 1))


LOADS = {"fsdp-tp": [("hsdp", 4), ("whole", 1)], "hsdp": [("fsdp-tp", 4), ("fsdp", 2)]}


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["ckptcore", "torch"])
@pytest.mark.parametrize("kind", LOADS)
def test_a_mesh_of_two_axes_loads_on_another_mesh(tmp_path: Path, kind: str, saver: str) -> None:
    """FSDP divides tensor-parallel shards into strided boxes. Processes of one replica group have equal shards."""
    launch("mesh_job.py", 4, f"save-{saver}", kind, tmp_path)
    for loaded_as, size in LOADS[kind]:
        for loader in ("ckptcore", "torch"):
            task = f"load-{loader}"
            launch("mesh_job.py", size, task, loaded_as, tmp_path)
            assert len(list(tmp_path.glob(f"{task}.{loaded_as}.*"))) == size
