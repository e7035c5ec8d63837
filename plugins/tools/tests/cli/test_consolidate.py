"""``ckptcore consolidate``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import ckptcore
from plugins.tools.tests.cli.conftest import Run, RunJson
from plugins.tools.tests.cli.expected_documents import ConsolidateDocument, ErrorDocument


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    state = {"model": {"a": np.ones((30, 10), np.float32), "b": np.zeros(300, np.float32)}, "step": 1}
    ckptcore.save(tmp_path / "sharded", state, layout="zarr3")
    return tmp_path / "sharded"


def test_prints_a_report(run: Run, sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = ["--subtree", "model", "--max-file-size", "1.2kB", "--file", tmp_path / "config.json"]
    result = run("consolidate", sharded, tmp_path / "hf", *options)
    assert result.stdout == f"written: 2 arrays of 2.40 kB to {tmp_path / 'hf'} in 2 safetensors files\n"
    assert list(load_file(tmp_path / "hf" / "model-00001-of-00002.safetensors")) == ["a"]
    assert (tmp_path / "hf" / "config.json").is_file()


def test_prints_json(run_json: RunJson, sharded: Path, tmp_path: Path) -> None:
    code, document = run_json(ConsolidateDocument, "consolidate", sharded, tmp_path / "hf", "--stem", "adapter_model")
    assert (code, document["arrays"], document["nbytes"]) == (0, 2, 2400)
    assert document["files"] == ["adapter_model.safetensors"]
    assert set(load_file(tmp_path / "hf" / "adapter_model.safetensors")) == {"model.a", "model.b"}


def test_options_for_metadata_and_tied_arrays_are_used(run_json: RunJson, tmp_path: Path) -> None:
    shared = np.ones(300, np.float32)
    ckptcore.save(tmp_path / "tied", {"a": shared, "b": shared})
    options = ["--metadata", "by=us", "--metadata", "license=a=b", "--max-file-size", "1.2kB"]
    _, document = run_json(ConsolidateDocument, "consolidate", tmp_path / "tied", tmp_path / "each", *options)
    assert (document["arrays"], document["nbytes"]) == (2, 2400)
    for name, file in zip("ab", document["files"], strict=True):
        with safe_open(tmp_path / "each" / file, "np") as reader:
            assert reader.keys() == [name] and reader.metadata() == {"format": "pt", "by": "us", "license": "a=b"}
    _, document = run_json(ConsolidateDocument, "consolidate", tmp_path / "tied", tmp_path / "once", "--tied", "once")
    assert (document["files"], document["nbytes"]) == (["model.safetensors"], 1200)
    assert list(load_file(tmp_path / "once" / "model.safetensors")) == ["a"]


@pytest.mark.parametrize("entry", ["by", "=us", ""])
def test_an_invalid_entry_is_refused(entry: str, run: Run, sharded: Path, tmp_path: Path) -> None:
    result = run("consolidate", sharded, tmp_path / "hf", "--metadata", entry)
    assert result.exit_code == 2 and not (tmp_path / "hf").exists()


def test_a_missing_part_is_refused(run_json: RunJson, sharded: Path, tmp_path: Path) -> None:
    code, document = run_json(ErrorDocument, "consolidate", sharded, tmp_path / "hf", "--subtree", "optimizer")
    assert (code, document["error"]) == (6, "TreeMismatchError")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("size", ["0", "-1", "5 apples", "GB", "1e9", "0.0001kB"])
def test_an_invalid_size_is_refused(size: str, run: Run, sharded: Path, tmp_path: Path) -> None:
    result = run("consolidate", sharded, tmp_path / "hf", "--max-file-size", size)
    assert result.exit_code == 2 and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("size", "files"), [("1200", 2), ("1.2 KB", 2), ("1KiB", 2), ("3kb", 1), ("1MB", 1), ("1TiB", 1)]
)
def test_sizes_have_units(size: str, files: int, run_json: RunJson, sharded: Path, tmp_path: Path) -> None:
    _, document = run_json(ConsolidateDocument, "consolidate", sharded, tmp_path / "hf", "--max-file-size", size)
    assert len(document["files"]) == files
