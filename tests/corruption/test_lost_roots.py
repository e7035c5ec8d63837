"""Our checkpoints without their root. They are not loaded as files of other software."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError

STATE: Final[dict[str, Any]] = {"w": np.arange(6.0), "layers": [np.ones(3), (np.zeros(2), 5)], "step": 3}


def _open(location: Path) -> object:
    with ckptcore.open(location) as checkpoint:
        return checkpoint["w"]


READERS: Final[Mapping[str, Callable[[Path], object]]] = {
    "load": ckptcore.load,
    "load a part": lambda location: ckptcore.load(location, {"w": np.zeros(6)}),
    "load_into": lambda location: ckptcore.load_into(location, {"w": np.zeros(6)}),
    "load_checkpointables": ckptcore.load_checkpointables,
    "open": _open,
    "metadata": ckptcore.metadata,
    "copy": lambda location: ckptcore.copy(location, location.parent / "copy"),
    "update": lambda location: ckptcore.save(location.parent / "new", {"b": 1}, strategy=ckptcore.Update(location)),
}


SAVES: Final[Mapping[str, Callable[[Path], object]]] = {
    "one file": lambda location: ckptcore.save(location, STATE),
    "several files": lambda location: ckptcore.save(
        location, STATE, layout=ckptcore.SafetensorsLayout(max_file_bytes=30)
    ),
    "another stem": lambda location: ckptcore.save(location, STATE, layout=ckptcore.SafetensorsLayout(stem="mine")),
    "no array": lambda location: ckptcore.save(location, {"step": 3}),
    "a copy": lambda location: (
        ckptcore.save(location.parent / "source", STATE, layout="dcp"),
        ckptcore.copy(location.parent / "source", location, layout="safetensors"),
    ),
    "own metadata": lambda location: ckptcore.save(
        location, STATE, layout=ckptcore.SafetensorsLayout(metadata={"format": "np"})
    ),
}


@pytest.mark.parametrize("save", SAVES)
def test_the_error_names_a_lost_root(save: str, tmp_path: Path) -> None:
    SAVES[save](tmp_path / "c")
    (tmp_path / "c" / "checkpoint.json").unlink()
    for read in READERS.values():
        with pytest.raises(
            CorruptCheckpointError, match=r"checkpoint\.json is missing.*restore.*name the file"
        ) as caught:
            read(tmp_path / "c")
        assert caught.value.key == "checkpoint.json"
    report = ckptcore.verify(tmp_path / "c")
    assert not report.ok and report.problems[0].key == "checkpoint.json"
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(application, [command, str(tmp_path / "c")])
        assert result.exit_code and "checkpoint.json" in result.output


def test_a_lost_root_without_arrays_names_the_file(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"step": 3})
    (tmp_path / "c" / "checkpoint.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"^model\.safetensors is part"):
        ckptcore.load(tmp_path / "c")


def test_the_error_names_a_lost_root_of_sessions_without_an_index(tmp_path: Path) -> None:
    for number in range(2):
        ckptcore.partial(tmp_path / "c", layout="safetensors").save({f"w{number}": np.ones(2)})
    ckptcore.partial(tmp_path / "c").finalize()
    for name in ("checkpoint.json", "model.safetensors.index.json"):
        (tmp_path / "c" / name).unlink()
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    for read in READERS.values():
        with pytest.raises(CorruptCheckpointError, match=r"checkpoint\.json is missing"):
            read(tmp_path / "c")


def test_the_remedy_of_the_error_loads_the_arrays(tmp_path: Path) -> None:
    for name, layout in (
        ("one", ckptcore.SafetensorsLayout()),
        ("some", ckptcore.SafetensorsLayout(max_file_bytes=30)),
    ):
        ckptcore.save(tmp_path / name, STATE, layout=layout)
        (tmp_path / name / "checkpoint.json").unlink()
    expected = {"w", "layers.0", "layers.1.0"}
    for file in ("one/model.safetensors", "some/model.safetensors.index.json"):
        loaded = ckptcore.load(tmp_path / file)
        assert set(loaded) == expected and loaded["w"].tolist() == [0, 1, 2, 3, 4, 5]
        assert "__ckptcore__" not in ckptcore.metadata(tmp_path / file).custom
        assert ckptcore.verify(tmp_path / file).ok
    assert set(safetensors.numpy.load_file(tmp_path / "one" / "model.safetensors")) == expected


def test_files_for_publication_load_without_their_root(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", {"model": {"w": np.ones(2)}, "step": 3})
    ckptcore.copy(tmp_path / "source", tmp_path / "published", layout="safetensors", subtree="model")
    ckptcore.save(tmp_path / "alone", {"w": np.ones(2)}, layout=ckptcore.SafetensorsLayout(standalone=True))
    for name in ("published", "alone"):
        (tmp_path / name / "checkpoint.json").unlink()
        assert ckptcore.load(tmp_path / name)["w"].tolist() == [1, 1]
        assert ckptcore.metadata(tmp_path / name).custom == {"format": "pt"}


def test_a_run_resumes_from_the_previous_step(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {**STATE, "step": step})
    (tmp_path / "run" / "2" / "checkpoint.json").unlink()
    with ckptcore.CheckpointReader(tmp_path / "run") as reader:
        assert reader.load()["step"] == 1
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.load()["step"] == 1
        with pytest.raises(CheckpointError):
            checkpointer.load(2)
    assert (tmp_path / "run" / "2" / "model.safetensors").exists()  # the files of the step are kept


@pytest.mark.parametrize("layout", ["dcp", "ocdbt", "zarr3"])
def test_other_layouts_load_like_checkpoints_of_other_software(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", STATE, layout=layout)
    (tmp_path / "c" / "checkpoint.json").unlink()
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (loaded["step"], loaded["layers"][1][1]) == (3, 5)
    assert ckptcore.metadata(tmp_path / "c").writer in ("torch.distributed.checkpoint", "Orbax")
