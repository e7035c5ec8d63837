"""Commands of other distributions, which the entry point group ``ckptcore.commands`` adds."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptcore
from plugins.tools.tests.cli.conftest import Run

MODULE = """
import click

@click.command("size")
@click.argument("location")
def size(location):
    "Print a number."
    click.echo(f"{location} has 3 bytes")

no_command = 3
"""


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with a command, two broken commands, and a command with the name of one of ours."""
    (tmp_path / "guest_commands.py").write_text(MODULE, encoding="utf-8")
    information = tmp_path / "guest-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(
        "[ckptcore.commands]\nsize = guest_commands:size\nbroken = guest_missing:command\n"
        "wrong = guest_commands:no_command\nls = guest_commands:size\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("guest")
def test_a_command_of_another_distribution(run: Run) -> None:
    assert run("size", "here").stdout == "here has 3 bytes\n"
    assert "  size " in run("--help").stdout


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "ModuleNotFoundError: No module named 'guest_missing'"),
        ("wrong", "TypeError: guest_commands:no_command"),
    ],
)
def test_a_broken_command_breaks_no_other(name: str, reason: str, run: Run, tmp_path: Path) -> None:
    listed = run("--help")
    assert listed.exit_code == 0
    assert f"  {name} " in listed.stdout and "cannot be loaded" in listed.stdout
    failed = run(name, "anything", "--json")
    assert failed.exit_code == 5
    assert failed.stderr.startswith(f"ckptcore: error: the command {name} of guest cannot be loaded: {reason}")
    assert run("verify", tmp_path / "nothing").exit_code == 3


@pytest.mark.usefixtures("guest")
def test_our_own_commands_are_not_replaced(run: Run, checkpoint: Path) -> None:
    assert "3 bytes" not in run("ls", checkpoint).stdout


@pytest.mark.parametrize(("name", "meant"), [("inspct", "inspect"), ("list", "ls"), ("prune", "gc")])
def test_a_mistyped_command_gets_a_suggestion(name: str, meant: str, run: Run) -> None:
    result = run(name, "somewhere")
    assert result.exit_code == 2 and f"No such command {name!r}. Did you mean {meant!r}?" in result.stderr


def test_remedies_are_in_the_language_of_the_shell(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("ckptcore_transforms")
    run_directory = tmp_path / "run"
    with ckptcore.Checkpointer(run_directory) as checkpointer:
        checkpointer.save(1, {"a": 1})
    errors = [
        run("inspect", run_directory).stderr,
        run("copy", run_directory, tmp_path / "copy", "--steps", "7").stderr,
        run("convert", run_directory / "1", run_directory / "1").stderr,
        run("convert", run_directory / "1", tmp_path / "c", "--map", "llama-to-maxtext").stderr,
    ]
    ckptcore.save(tmp_path / "other", {"a": 2})
    errors.append(run("copy", run_directory / "1", tmp_path / "other").stderr)
    assert f"`ckptcore steps {run_directory}`" in errors[0] and "--head-dim" in errors[3] and "--overwrite" in errors[4]
    assert not any("(" + "'" in error or "=True" in error or "reload" in error for error in errors), errors
