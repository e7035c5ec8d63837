"""Checkpoints written by earlier versions of the layouts load bit for bit, with ckptcore and with Orbax."""

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


def assert_same(found: Any, saved: Any, path: str = "") -> None:
    if isinstance(saved, dict):
        assert list(found) == list(saved), path
        for key, child in saved.items():
            assert_same(found[key], child, f"{path}/{key}")
    elif isinstance(saved, list | tuple):
        assert type(found) is type(saved) and len(found) == len(saved), path
        for number, child in enumerate(saved):
            assert_same(found[number], child, f"{path}/{number}")
    elif isinstance(saved, jax.Array | np.ndarray | np.generic):
        elements = (
            jax.random.key_data(saved) if isinstance(saved, jax.Array) and saved.dtype == STATE["key"].dtype else saved
        )
        expected = np.asarray(elements)
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        assert np.asarray(found).tobytes() == expected.tobytes(), path
    else:
        assert type(found) is type(saved) and found == saved, path


def test_there_is_one_of_every_layout() -> None:
    assert {path.name for path in CHECKPOINTS} >= set(WRITTEN.golden_layouts())


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_a_save_gives_its_bytes(path: Path, tmp_path: Path) -> None:
    WRITTEN.save_golden(path.name, tmp_path / "c")
    found = {
        file.relative_to(tmp_path / "c"): file.read_bytes() for file in (tmp_path / "c").rglob("*") if file.is_file()
    }
    golden = {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert sorted(found) == sorted(golden)
    for key, data in golden.items():
        assert found[key] == data, key


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_it_loads_as_it_was_saved(path: Path) -> None:
    assert_same(ckptcore.load(path), STATE)
    assert ckptcore.verify(path).ok
    assert ckptcore.metadata(path).custom == {"made for": "golden"}


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_it_loads_without_our_root(path: Path, tmp_path: Path) -> None:
    """Load with the files of Orbax only, without distinctions that Orbax cannot make."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for part in copy.glob("checkpoint.*"):
        part.unlink()
    found = ckptcore.metadata(copy)
    assert found.layout == path.name.split("-")[0]
    assert found.custom == {"made for": "golden"}


def test_what_orbax_wrote_is_not_called_sound(capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of Orbax have no recorded checksums to verify; those of ckptcore do."""

    def verified(path: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path)])
        assert ended.value.code == 0
        return capsys.readouterr().out

    theirs = verified(Path(__file__).parent / "golden" / "v1_default")
    assert theirs.startswith("complete: ")
    assert "sound" not in theirs
    assert verified(CHECKPOINTS[0]).startswith("sound: ")
