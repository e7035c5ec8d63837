"""The commands for directories, used on a single file that PyTorch wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptcore
from ckptcore.errors import CheckpointNotFoundError
from plugins.tools.tests.cli.conftest import Run

torch = pytest.importorskip("torch")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_ls_lists_a_file(file: Path, run: Run) -> None:
    result = run("ls", file)
    assert result.exit_code == 0
    assert "foreign     torch" in result.output


def test_ls_says_what_a_file_is(tmp_path: Path, run: Run) -> None:
    (tmp_path / "page.pt").write_text("<html>Sign in</html>")
    assert "a page of HTML" in run("ls", tmp_path / "page.pt").output


@pytest.mark.parametrize("command", [("steps",), ("gc", "--policy", "latest_n=1", "--dry-run")])
def test_commands_for_runs_say_that_the_location_is_a_file(file: Path, run: Run, command: tuple[str, ...]) -> None:
    output = run(*command, file).output
    assert f"{file} is a file, not a directory" in output
    assert f"`ckptcore inspect {file}`" in output
    assert run("inspect", file).exit_code == 0


def test_a_copy_of_steps_says_that_the_source_may_be_a_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is a file: give the directory of the steps"):
        ckptcore.copy_steps(file, tmp_path / "copy")


def test_verify_says_that_checksums_were_compared(file: Path, run: Run) -> None:
    assert "sound: 1 object" in run("verify", file).output
    data = bytearray(file.read_bytes())
    data[data.index(torch.ones(3).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    output = run("verify", file).output
    assert "do not match their CRC-32 in bytes" in output
    assert "1 problem" in output
