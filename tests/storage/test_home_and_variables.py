"""``~`` and variables in locations: ``~`` is the home directory, and a variable is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ckptcore_tiers import TieredDirectory
from ckptcore_tools.cli.application import application
from ckptcore_view.documents import Request, document_of
from ckptcore_view.viewed import Viewed
from click.testing import CliRunner

import ckptcore
from ckptcore.errors import CheckpointError, InvalidLocationError
from ckptcore.events import Event

STATE = {"w": np.arange(3.0)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home directory, and another working directory. Return the home directory."""
    directory = tmp_path / "home"
    (tmp_path / "work").mkdir()
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.chdir(tmp_path / "work")
    return directory


def _run(directory: object) -> None:
    with ckptcore.Checkpointer(directory) as checkpointer:  # type: ignore[arg-type]  # not always a path
        checkpointer.save(1, STATE)


WAYS: dict[str, Callable[[str], object]] = {
    "save": lambda path: ckptcore.save(f"{path}/run/step_1", STATE),
    "pathlib": lambda path: ckptcore.save(Path(f"{path}/run/step_1"), STATE),
    "Checkpointer": lambda path: _run(f"{path}/run"),
    "far tier": lambda path: _run(TieredDirectory("near", f"{path}/run")),
    "near tier": lambda path: _run(TieredDirectory(f"{path}/run", "far")),
    "copy": lambda path: (ckptcore.save("source", STATE), ckptcore.copy("source", f"{path}/run/step_1")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tilde_is_the_home_directory(way: str, home: Path) -> None:
    WAYS[way]("~")
    assert (home / "run").is_dir() and not Path("~").exists()
    with ckptcore.CheckpointReader("~/run") as reader:
        assert reader.load(1)["w"].tolist() == [0, 1, 2]
    assert CliRunner().invoke(application, ["steps", "~/run"]).exit_code == 0


def test_users_see_the_expanded_path(home: Path) -> None:
    """Attributes, errors, events and output have the expanded path, because programs use them as paths."""
    events = list[Event]()
    context = ckptcore.Context(observers=[events.append])
    ckptcore.save("~/c", STATE, context=context)
    ckptcore.load("~/c", context=context)
    with ckptcore.Checkpointer("~/run", context=context) as run:
        run.save(1, STATE)
        run.wait()
        assert run.directory == str(home / "run") and f"{home}/run" in repr(run)
        run.load()
    with ckptcore.CheckpointReader("~/run") as reader:
        assert reader.directory == str(home / "run")
    with ckptcore.Checkpointer(TieredDirectory("~/near", "~/far")) as run:
        assert run.directory == str(home / "far")
    assert ckptcore.save_async("~/d", STATE).location == str(home / "d")
    assert events and all(event.location.startswith(str(home)) for event in events)
    errors = []
    for call in (
        lambda: ckptcore.save("~/c", STATE),
        lambda: ckptcore.load("~/missing"),
        lambda: ckptcore.load("~/c", {"v": np.ones(3)}),
        lambda: ckptcore.delete("~/missing"),
        lambda: ckptcore.copy("~/missing", "~/d"),
        lambda: ckptcore.CheckpointReader("~/run").load(7),
        lambda: ckptcore.CheckpointReader("~/c"),
        lambda: ckptcore.partial("~/missing").finalize(),
    ):
        with pytest.raises(CheckpointError) as raised:
            call()
        errors.append(str(raised.value))
    assert all(str(home) in error and "~" not in error for error in errors)
    commands = "inspect ~/c", "ls ~/c", "steps ~/run", "inspect ~/missing", "steps ~/missing", "copy ~/c ~/copied"
    for command in commands:
        output = CliRunner().invoke(application, command.split()).output
        assert "~" not in output and (str(home) in output or command == "steps ~/run"), command
    shown = document_of(Viewed("~/c", context), "view", Request())
    assert shown["location"] == str(home / "c")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variable", ["$NOWHERE", "${NOWHERE}", "runs_$NOWHERE", "~nobody-of-that-name"])
def test_a_location_with_a_variable_is_refused(way: str, variable: str, home: Path) -> None:
    with pytest.raises(InvalidLocationError, match="expandvars|home directory"):
        WAYS[way](variable)
    assert not {"run", variable} & {path.name for path in Path().iterdir()}
    with pytest.raises(InvalidLocationError, match="expandvars|home directory"):
        ckptcore.CheckpointReader(f"{variable}/run")


def test_a_url_with_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "run")
    for url in (
        "memory://$SOMEWHERE/run",
        "s3://bucket/$SOMEWHERE/run",
        "s3://bucket/$NOWHERE/run",
        "gs://bucket/${now}/a",
    ):
        with pytest.raises(InvalidLocationError, match=r"\$.*expandvars"):
            ckptcore.save(url, STATE)


@pytest.mark.parametrize("name", ["price_$usd", "$web", "_$folder$", "$1"])
def test_names_with_a_dollar_sign_in_urls(name: str) -> None:
    """Such names exist in object stores, and URLs cannot escape the dollar sign."""
    ckptcore.save(f"memory://dollars/{name}/step_1", STATE)
    assert ckptcore.load(f"memory://dollars/{name}/step_1")["w"].tolist() == [0, 1, 2]


def test_the_remedy_for_a_local_directory_with_a_dollar_sign(home: Path) -> None:
    with pytest.raises(InvalidLocationError, match="create the directory first"):
        ckptcore.save("cost$team/step_1", STATE)
    Path("cost$team").mkdir()
    ckptcore.save("cost$team/step_1", STATE)


def test_directories_with_special_names_can_be_used(home: Path) -> None:
    """A name is used literally if the directory exists, if it begins with ``./``, or if it cannot be a variable."""
    ckptcore.save("./~/step_1", STATE)
    Path("cost$team").mkdir()
    ckptcore.save("cost$team/step_1", STATE)
    for path in ("./~/step_1", "cost$team/step_1", "a$1"):
        if path == "a$1":
            ckptcore.save(path, STATE)
        assert ckptcore.load(path)["w"].tolist() == [0, 1, 2]


def test_a_missing_home_directory_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container, the id of the user may have no name and no home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654321)
    with pytest.raises(InvalidLocationError, match="cannot find the home directory for '~'"):
        ckptcore.save("~/run", STATE)
    assert list(tmp_path.iterdir()) == []
