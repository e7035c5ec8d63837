"""``ckptcore convert``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import ckptcore
from ckptcore.cli.documents import ConvertDocument, ErrorDocument
from ckptcore.model import HostArray
from tests.cli.conftest import Run, RunJson, flip


def test_a_bare_file_becomes_a_checkpoint(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    arrays: dict[str, HostArray] = {"a.b": np.arange(6, dtype=np.float16).reshape(2, 3), "c": np.ones((), np.int64)}
    save_file(arrays, tmp_path / "model.safetensors")
    code, document = run_json(ConvertDocument, "convert", tmp_path / "model.safetensors", tmp_path / "ours")
    assert (code, document["arrays"], document["nbytes"], document["layout"]) == (0, 2, 20, "safetensors")
    assert ckptcore.verify(tmp_path / "ours").ok
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(np.array_equal(written[name], array) for name, array in arrays.items())
    assert run("diff", tmp_path / "model.safetensors", tmp_path / "ours").exit_code == 0


def test_text(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", checkpoint, tmp_path / "copy")
    assert result.stdout == f"written: 5 arrays of 66 B to {tmp_path / 'copy'} as safetensors\n"
    assert ckptcore.metadata(tmp_path / "copy").custom == {"accuracy": 0.5}


def test_replaces_only_when_told(run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "there", {"x": 1})
    code, document = run_json(ErrorDocument, "convert", checkpoint, tmp_path / "there")
    assert (code, document["error"]) == (7, "CheckpointExistsError")
    assert ckptcore.load(tmp_path / "there") == {"x": 1}
    assert run("convert", checkpoint, tmp_path / "there", "--overwrite").exit_code == 0
    assert run("diff", checkpoint, tmp_path / "there").exit_code == 0


def test_a_layout_that_is_not_installed(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    code, document = run_json(ErrorDocument, "convert", checkpoint, tmp_path / "copy", "--layout", "parchment")
    assert (code, document["error"]) == (5, "UnknownPluginError")
    assert "safetensors" in document["message"]
    assert not (tmp_path / "copy").exists()


def test_damage_is_not_copied(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    flip(checkpoint / "model.safetensors", -1)
    assert run_json(ErrorDocument, "convert", checkpoint, tmp_path / "copy")[0] == 4
    assert not (tmp_path / "copy").exists()


def test_nothing_there(run_json: RunJson, tmp_path: Path) -> None:
    assert run_json(ErrorDocument, "convert", tmp_path / "nothing", tmp_path / "copy")[0] == 3
