"""Golden checkpoints that earlier versions of the layouts wrote load bit for bit. Saves write the same files."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from ckptcore_tools.cli import main

import ckptcore

DIRECTORY = Path(__file__).parent / "golden_ours"
CHECKPOINTS = sorted(path for version in (DIRECTORY / "checkpoints").iterdir() for path in version.iterdir())


def _written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_ours_write", DIRECTORY / "write.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WRITTEN = _written()
STATE: dict[str, Any] = WRITTEN.golden_state()


def assert_same(loaded: Any, saved: Any, path: str = "") -> None:
    if isinstance(saved, dict):
        assert list(loaded) == list(saved), path
        for key, child in saved.items():
            assert_same(loaded[key], child, f"{path}/{key}")
    elif isinstance(saved, list | tuple):
        assert type(loaded) is type(saved) and len(loaded) == len(saved), path
        for number, child in enumerate(saved):
            assert_same(loaded[number], child, f"{path}/{number}")
    elif isinstance(saved, jax.Array | np.ndarray | np.generic):
        elements = (
            jax.random.key_data(saved) if isinstance(saved, jax.Array) and saved.dtype == STATE["key"].dtype else saved
        )
        expected = np.asarray(elements)
        assert loaded.dtype == expected.dtype and loaded.shape == expected.shape, path
        assert np.asarray(loaded).tobytes() == expected.tobytes(), path
    else:
        assert type(loaded) is type(saved) and loaded == saved, path


def test_every_layout_has_a_golden_checkpoint() -> None:
    assert {path.name for path in CHECKPOINTS} >= set(WRITTEN.golden_layouts())


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_a_save_writes_the_files_of_the_golden_checkpoint(path: Path, tmp_path: Path) -> None:
    WRITTEN.save_golden(path.name, tmp_path / "c")
    written = {
        file.relative_to(tmp_path / "c"): file.read_bytes() for file in (tmp_path / "c").rglob("*") if file.is_file()
    }
    golden = {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert sorted(written) == sorted(golden)
    for key, data in golden.items():
        assert written[key] == data, key


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_a_golden_checkpoint_loads_with_its_saved_values(path: Path) -> None:
    assert_same(ckptcore.load(path), STATE)
    assert ckptcore.verify(path).ok
    assert ckptcore.metadata(path).custom == {"made for": "golden"}


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_metadata_is_read_without_the_root(path: Path, tmp_path: Path) -> None:
    """Without the root, only the files in the format of Orbax remain."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for part in copy.glob("checkpoint.*"):
        part.unlink()
    metadata = ckptcore.metadata(copy)
    assert metadata.layout == path.name.split("-")[0]
    assert metadata.custom == {"made for": "golden"}


def test_verify_reports_checkpoints_of_orbax_as_complete_instead_of_sound(capsys: pytest.CaptureFixture[str]) -> None:
    """Orbax records no checksums, so ckptcore can only verify that its checkpoints are complete."""

    def verified(path: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path)])
        assert ended.value.code == 0
        return capsys.readouterr().out

    theirs = verified(Path(__file__).parent / "golden" / "v1_default")
    assert theirs.startswith("complete: ")
    assert "sound" not in theirs
    assert verified(CHECKPOINTS[0]).startswith("sound: ")
