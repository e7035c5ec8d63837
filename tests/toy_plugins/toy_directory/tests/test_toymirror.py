"""A `Checkpointer` of a plugin's run directory saves, loads and deletes steps in two directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from toymirror import MirroredDirectory

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import CheckpointExistsError, DirectoryInUseError, OnlyStepError
from ckptcore.policies import LatestN
from ckptcore.training import RunDirectory


@pytest.fixture(params=["local", "memory"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    second = str(tmp_path / "second") if request.param == "local" else f"memory://{tmp_path.name}/second"
    return str(tmp_path / "first"), second


def _save(run: Checkpointer, *steps: int) -> None:
    for step in steps:
        run.save(step, {"w": np.full((3, 4), step), "step": step})
        run.wait()


def test_a_mirrored_directory_is_a_run_directory(places: tuple[str, str]) -> None:
    assert isinstance(MirroredDirectory(*places), RunDirectory)


def test_both_directories_have_the_steps_that_the_policy_keeps(places: tuple[str, str]) -> None:
    with Checkpointer(MirroredDirectory(*places), preservation_policy=LatestN(2)) as run:
        _save(run, 1, 2, 3)
        assert run.steps == (2, 3) and run.latest == 3 and run.directory == places[0]
    for place in (*places, MirroredDirectory(*places)):
        reader = CheckpointReader(place)
        assert reader.steps == (2, 3)
        assert reader.load()["step"] == 3


def test_a_load_falls_back_to_the_second_directory(places: tuple[str, str]) -> None:
    with Checkpointer(MirroredDirectory(*places)) as run:
        _save(run, 1, 2)
    Path(places[0], "2", "model.safetensors").unlink()
    shutil.rmtree(Path(places[0], "1"))
    with Checkpointer(MirroredDirectory(*places)) as run:
        assert run.load()["step"] == 2 and run.restored_step == 2 and run.skipped_steps == ()
        assert run.load(1)["step"] == 1
        assert run.metadata(1) is not None


def test_deletions_and_pins_apply_to_both_directories(places: tuple[str, str]) -> None:
    with Checkpointer(MirroredDirectory(*places)) as run:
        _save(run, 1)
        with pytest.raises(OnlyStepError):
            run.delete(1)
        _save(run, 2)
        run.delete(1)
        run.wait()
        with run.pin(2):
            pass
    assert all(CheckpointReader(place).steps == (2,) for place in places)


def test_existing_steps_and_directories_in_use_are_refused(places: tuple[str, str]) -> None:
    with Checkpointer(MirroredDirectory(*places)) as run:
        _save(run, 1)
        with pytest.raises(CheckpointExistsError):
            _save(run, 1)
        with pytest.raises(DirectoryInUseError):
            Checkpointer(places[1])
    with Checkpointer(places[1]) as run:
        assert run.load()["step"] == 1
