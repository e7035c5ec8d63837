"""The tool that loads files of other software, and compares the results with those of their own libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tools import strangers
from tools.owners import NotReadError

SYMBOLS = ("equal", "read", "refused", "different", "unnamed")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Create a readable file, a recognized file that is no checkpoint, and a folder with another readable file."""
    (tmp_path / "inside").mkdir()
    safetensors.numpy.save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    safetensors.numpy.save_file({"b": np.arange(4)}, tmp_path / "inside" / "other.safetensors")
    (tmp_path / "inside" / "page.pt").write_text("<!DOCTYPE html><html>")
    return tmp_path


def results(output: str) -> dict[str, str]:
    lines = [line.split() for line in output.splitlines()]
    return {words[1]: words[0] for words in lines if len(words) > 2 and words[0] in SYMBOLS}


def test_each_file_has_a_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert strangers.main([str(directory / "inside")]) == 0
    output = capsys.readouterr().out
    assert results(output) == {".": "equal", "other.safetensors": "equal", "page.pt": "refused"}
    assert output.endswith(
        "equal           2\nread            0\nrefused         1\ndifferent       0\nunnamed         0\n"
    )


def test_a_file_of_an_unrecognized_kind_fails(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "inside" / "noise").write_bytes(bytes(range(128, 256)))
    assert strangers.main([str(directory / "inside"), "--only", "unnamed"]) == 1
    assert results(capsys.readouterr().out) == {"noise": "unnamed"}


@pytest.mark.parametrize("other", [{"w": np.arange(3.0) + 1}, {"w": np.arange(3)}, {"v": np.arange(3.0), "w": 1}])
def test_a_result_that_differs_from_that_of_the_own_library_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    monkeypatch.setattr(strangers, "read_as_owner", lambda path, metadata: ("owner", other))
    line = strangers.examine(directory / "model.safetensors", "model")
    assert (line.result, line.detail.startswith("owner: ")) == ("different", True)


def test_a_copy_is_compared_if_own_library_is_not_installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, metadata: object) -> tuple[str, object]:
        raise NotReadError("it is not installed")

    monkeypatch.setattr(strangers, "read_as_owner", refuse)
    line = strangers.examine(directory / "model.safetensors", "model")
    assert (line.result, line.detail) == ("read", "complete; it is not installed")


def test_trees_of_other_containers_and_number_types_are_equal() -> None:
    first = strangers.flatten({"a": [1, (2.0, {3})], "b": {}, "nan": float("nan")})
    second = strangers.flatten({"b": [], "a": (np.int64(1), [np.float64(2), [3]]), "nan": np.float64("nan")})
    assert strangers.difference(first, second) == ""
    assert "a/0: 1 and 2" in strangers.difference(strangers.flatten({"a": ["1"]}), strangers.flatten({"a": ["2"]}))
