"""Data loaders with worker processes, and Keras with each backend, in separate programs.

The loaders fork workers, and a process with threads of JAX must not fork. Keras chooses its backend when it is
imported. The programs are forked from a server that has imported JAX and PyTorch, has not used them, and has not
imported Keras.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.jobs.torch_scripts import run_script

pytestmark = pytest.mark.system

PROGRAMS = ROOT / "tests" / "stateful" / "programs"


def run(program: str, directory: Path, **environment: str) -> str:
    done = run_script(1, PROGRAMS / program, directory, variables=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed")
def test_data_loaders_resume(tmp_path: Path) -> None:
    assert len(run("torchdata_resume.py", tmp_path).splitlines()) == 12


@pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed")
def test_only_a_sampler_with_a_state_resumes_to_the_bit(tmp_path: Path) -> None:
    """Runs that were killed in the first or second epoch resume as the guide describes."""
    told = dict(line.split(": ") for line in run("torchdata_samplers.py", tmp_path).splitlines())
    results = {name: tuple(said.split()) for name, said in told.items()}
    assert results == {
        "torchdata 3": ("True", "True", "0"),
        "torchdata 8": ("True", "True", "0"),
        "torch 3": ("True", "True", "1"),
        "torch 8": ("False", "True", "1"),
        "subset 3": ("True", "True", "1"),
        "subset 8": ("False", "True", "1"),
        "weighted 3": ("True", "True", "1"),
        "weighted 8": ("False", "True", "1"),
        "batches 3": ("True", "True", "1"),
        "batches 8": ("False", "True", "1"),
        "one generator 3": ("False", "True", "1"),
        "one generator 8": ("False", "True", "1"),
        "no generator 3": ("True", "False", "0"),  # the loader draws from the global generator
        "no generator 8": ("True", "False", "0"),
    }


@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_resumes(backend: str, tmp_path: Path) -> None:
    printed = run("keras_resume.py", tmp_path, KERAS_BACKEND=backend, KERAS_HOME=str(tmp_path / "keras"))
    assert printed.split()[0] == backend
