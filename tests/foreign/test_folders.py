"""Folders of unrelated checkpoints or runs are not read as one checkpoint, for all layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from plugins.tools.tests.cli.conftest import Run, RunJson
from plugins.tools.tests.cli.expected_documents import ListDocument

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STATE = {"w": np.ones(3), "n": 1}


def _of_torch(place: Path) -> None:
    torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not export it
        {"a": torch.ones(5)}, checkpoint_id=str(place), no_dist=True
    )


def _of_hugging_face(place: Path) -> None:
    place.mkdir(parents=True)
    save_file({"a": np.ones(4)}, place / "model.safetensors")


def _ours(layout: str) -> Callable[[Path], None]:
    return lambda place: ckptcore.save(place, _STATE, layout=layout)


_WRITERS: dict[str, Callable[[Path], None]] = {
    **{layout: _ours(layout) for layout in ("safetensors", "dcp", "ocdbt", "zarr", "zarr3")},
    "torch": _of_torch,
    "hugging face": _of_hugging_face,
}


@pytest.mark.parametrize("writer", _WRITERS)
@pytest.mark.parametrize("also", ["torch", "dcp"])
def test_unrelated_checkpoints_are_not_read_as_one(writer: str, also: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    _WRITERS[writer](folder / "gpt2-small")
    _WRITERS[also](folder / "llama")
    reads: list[Callable[[], object]] = [
        lambda: ckptcore.load(folder),
        lambda: ckptcore.load_checkpointables(folder),
        lambda: ckptcore.metadata(folder),
        lambda: ckptcore.open(folder),
        lambda: ckptcore.verify(folder),
        lambda: ckptcore.copy(folder, tmp_path / "copy"),
        lambda: ckptcore.copy(folder, tmp_path / "copy", layout="safetensors"),
    ]
    for read in reads:
        with pytest.raises(CheckpointNotFoundError) as raised:
            read()
        assert f"{folder} is not a checkpoint. It holds separate checkpoints (gpt2-small, llama)" in str(raised.value)
        assert f"load one by its own location, such as {folder}/gpt2-small" in str(raised.value)
    assert not (tmp_path / "copy").exists()
    ckptcore.load(folder / "gpt2-small")


def test_parts_of_one_training_state_are_several_checkpointables(tmp_path: Path) -> None:
    for name in ("model", "optimizer"):
        _of_torch(tmp_path / "folder" / name)
    assert list(ckptcore.load_checkpointables(tmp_path / "folder")) == ["model", "optimizer"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Create a folder of two runs, a checkpoint, and a folder without checkpoints."""
    for step in (1, 2):
        ckptcore.save(tmp_path / "mine" / f"step_{step}", _STATE)
        _of_torch(tmp_path / "theirs" / f"step-{step}")
    (tmp_path / "theirs/step-3").mkdir()  # an unfinished step
    ckptcore.save(tmp_path / "final", _STATE)
    (tmp_path / "logs/1").mkdir(parents=True)
    (tmp_path / "logs/1/a.log").write_text("no checkpoint")
    return tmp_path


def test_the_error_about_a_folder_of_runs_lists_them(runs: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as raised:
        ckptcore.load(runs)
    said = str(raised.value)
    assert "It holds separate checkpoints (final): load one by its own location" in said
    assert "It also holds runs (mine with 2 steps, theirs with 3 steps)" in said
    way = said.partition("load the newest step of one with ")[2]
    assert way == f"CheckpointReader('{runs}/mine').load()"
    assert eval(way, {"CheckpointReader": ckptcore.CheckpointReader})["n"] == 1


def test_the_command_line_lists_runs(runs: Path, run: Run, run_json: RunJson) -> None:
    code, document = run_json(ListDocument, "ls", runs)
    assert code == 0
    states = {
        entry["name"]: (entry["state"], entry.get("steps"), entry.get("newest")) for entry in document["checkpoints"]
    }
    assert states == {"final": ("committed", None, None), "mine": ("run", 2, 2), "theirs": ("run", 3, 2)}
    lines = {line.split()[0]: line for line in run("ls", runs).stdout.splitlines()}
    assert lines["mine"].endswith("2 steps, the newest is 2")
    for arguments in (("steps", runs), ("gc", runs, "--policy", "latest_n=1", "--dry-run")):
        result = run(*arguments)
        assert result.exit_code == 3
        assert f"has no steps. It holds runs (mine, theirs): give one of them, such as {runs}/mine" in result.stderr
    for names in (("inspect", runs), ("diff", runs, runs / "final"), ("verify", runs)):
        result = run(*names)
        assert result.exit_code == 3 and f"list the steps of one with `ckptcore steps {runs}/mine`" in result.stderr
    assert run("steps", runs / "mine").exit_code == 0


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_the_error_of_a_reader_for_a_folder_of_runs_names_a_run(layout: str, tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        ckptcore.save(tmp_path / name / "7", _STATE, layout=layout)
    for read in (ckptcore.CheckpointReader, ckptcore.Checkpointer):
        with pytest.raises(CheckpointError, match=rf"has checkpoints, such as r2/7: .*, {tmp_path}/r2\. "):
            read(tmp_path)
    assert ckptcore.CheckpointReader(tmp_path / "r2").load()["n"] == 1


def test_a_save_does_not_replace_a_folder_of_runs(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="a save does not replace them"):
        ckptcore.save(runs, _STATE, overwrite=True)
    assert ckptcore.load(runs / "final")["n"] == 1
