"""The command as a program: its imports, output streams and exit codes."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ckptcore_tools.cli import inspect
from ckptcore_tools.cli.command import EXIT_CODE_HELP, ExitCode, exit_code_of

import ckptcore
from ckptcore.errors import CheckpointError
from plugins.tools.tests.cli.conftest import Run, flip, read_terminal
from plugins.tools.tests.cli.runs import save_run

pytestmark = pytest.mark.system

FRAMEWORKS = ("torch", "jax", "jaxlib", "tensorflow", "flax", "optax", "equinox")
PROGRAM = [sys.executable, "-m", "ckptcore"]


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    return subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False)


def imported_by(*arguments: object) -> set[str]:
    """The top-level modules that a command imports."""
    script = (
        "import json, sys; sys.argv = ['ckptcore', *json.loads(sys.argv[1])]\n"
        "from ckptcore_tools.cli import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script, json.dumps([str(argument) for argument in arguments])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stderr))


def test_help_imports_no_framework() -> None:
    imported = imported_by("--help")
    assert "click" in imported
    assert imported.isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize("command", ["inspect", "verify", "ls", "plugins"])
def test_commands_import_no_framework(command: str, checkpoint: Path) -> None:
    arguments = [] if command == "plugins" else [checkpoint]
    assert imported_by(command, *arguments).isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize("arguments", [["steps", "--verify"], ["gc", "--policy", "latest_n=1", "--yes"]])
def test_commands_on_runs_import_no_framework(arguments: list[str], tmp_path: Path) -> None:
    save_run(tmp_path / "run", {1: 0.5, 2: 0.25})
    assert imported_by(*arguments, tmp_path / "run").isdisjoint(FRAMEWORKS)


def test_the_check_for_frameworks_detects_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    finished = subprocess.run(
        [sys.executable, "-c", "import torch, sys; sys.exit('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert finished.returncode == 1


def test_the_core_alone_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "ckptcore_tools.py").write_text("raise ModuleNotFoundError('', name='ckptcore_tools')")
    finished = subprocess.run(
        [sys.executable, "-m", "ckptcore", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == (
        "ckptcore: the command line needs the distribution ckptcore-tools, which is not installed: "
        "run pip install 'ckptcore[tools]'\n"
    )


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    finished = program("inspect", tmp_path / "nothing")
    assert finished.returncode == 3
    assert finished.stderr.count("\n") == 1
    assert "Traceback" not in finished.stderr
    assert "Traceback" in program("inspect", tmp_path / "nothing", "--debug").stderr


def test_a_usage_error_has_exit_code_2() -> None:
    assert program("inspect").returncode == 2
    assert program("unknown").returncode == 2
    assert program("diff", "a").returncode == 2


def test_help_lists_exit_codes(run: Run) -> None:
    text = run("--help").stdout
    for code in ExitCode:
        if code is not ExitCode.BROKEN_PIPE:
            assert f" {int(code)}  " in EXIT_CODE_HELP
            assert f" {int(code)}  " in text


def test_every_command_has_help_and_json(run: Run) -> None:
    for command in ("inspect", "ls", "steps", "verify", "diff", "convert", "gc", "plugins"):
        text = run(command, "--help").stdout
        assert "--json" in text
        assert "--debug" in text
        assert f"  {command} " in run("--help").stdout


def test_every_error_has_an_exit_code_of_failure() -> None:
    kinds = [CheckpointError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    assert len(kinds) > 20
    for kind in kinds:
        assert exit_code_of(kind.__new__(kind)) not in (ExitCode.OK, ExitCode.FOUND, ExitCode.USAGE, ExitCode.BUG)


def test_bug_has_another_exit_code_than_difference(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(location: object, context: object) -> None:
        raise RuntimeError("oh dear")

    monkeypatch.setattr(inspect, "describe_and_check", broken)
    result = run("inspect", checkpoint)
    assert result.exit_code == 70
    assert "RuntimeError: oh dear. This is a bug" in result.stderr


def test_an_interrupt_has_exit_code_130(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(location: object, context: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "describe_and_check", interrupted)
    result = run("inspect", checkpoint)
    assert result.exit_code == 130
    assert result.stderr == "ckptcore: error: interrupted\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_has_exit_code_141(tmp_path: Path, options: list[str]) -> None:
    ckptcore.save(tmp_path / "many", {f"leaf_{number}": np.float64(number) for number in range(5000)})
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    saw = subprocess.Popen(
        [*PROGRAM, "inspect", str(tmp_path / "many"), *options],
        env=buffered,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert saw.stdout is not None
    assert saw.stderr is not None
    saw.stdout.read(10)
    saw.stdout.close()
    errors = saw.stderr.read()
    saw.stderr.close()
    assert saw.wait() == 141
    assert errors == b""


EACH = (
    "import json, sys\n"
    "from ckptcore_tools.cli import main\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    "    try:\n"
    "        main(arguments)\n"
    "    except SystemExit as ended:\n"
    "        sys.stderr.write(f'{arguments[0]} {int(ended.code or 0)}\\n')\n"
)
"""A program that runs several commands, and writes the exit code of each to stderr."""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_other_encodings(encoding: str, tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "größe", tmp_path / "größe" / "漢字"
    save_run(run, {1: 0.5})
    ckptcore.save(checkpoint, {"größe": {"漢字": np.ones((3, 3))}, "zähler": list(range(50))})
    commands: list[list[object]] = [
        ["inspect", checkpoint],
        ["verify", checkpoint],
        ["ls", run],
        ["steps", run],
        ["diff", checkpoint, run / "1"],
        ["--help"],
    ]
    finished = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps([list(map(str, words)) for words in commands])],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert finished.stderr.split() == b"inspect 0 verify 0 ls 0 steps 0 diff 1 --help 0".split()
    text = finished.stdout.decode(encoding)
    assert "\\u6f22\\u5b57" in text
    assert "|-" in text and "`-" in text, "the lines of the tree are not in ASCII"


FULL = ("--help > /dev/full", "ls {0} > /dev/full", "inspect {0}/nothing --json > /dev/full")


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&-", "--json >&-", *FULL])
def test_streams_that_are_closed_or_full(redirection: str, unbuffered: str, checkpoint: Path, tmp_path: Path) -> None:
    commands: list[list[object]] = [["inspect", checkpoint], ["inspect", tmp_path / "nothing"], ["ls", tmp_path]]
    if redirection in FULL:
        commands = [[*redirection.removesuffix("> /dev/full").format(tmp_path).split()]]
    elif "--json" in redirection:
        commands = [[*words, "--json"] for words in commands]
    program = [sys.executable, "-c", EACH, json.dumps([list(map(str, words)) for words in commands])]
    stream = "> /dev/full" if redirection in FULL else redirection.removeprefix("--json ")
    script = f"{' '.join(map(shlex.quote, program))} {stream}"
    finished = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0
    if redirection in FULL:
        full = f"ckptcore: error: cannot write the output to stdout: No space left on device\n{commands[0][0]} 6\n"
        assert finished.stderr.endswith(full) if "--json" in redirection else finished.stderr == full
        assert ("check the path" in finished.stderr) == ("--json" in redirection)
    elif "2>" not in redirection:
        codes = [line for line in finished.stderr.splitlines() if not line.startswith("ckptcore: error: ")]
        assert codes == ["inspect 0", "inspect 3", "ls 0"]
        assert "bug" not in finished.stderr


@pytest.mark.parametrize(
    "option",
    ["hidden-secret", "s3.secret_access_key:hidden-secret", "s3.secret_access_key hidden-secret=", "hidden-secret=1"],
)
def test_a_malformed_option_is_not_repeated(run: Run, option: str, checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--option", "s3.region=here", "--option", option)
    assert result.exit_code == 2
    assert "number 2: expected SCHEME.NAME=VALUE" in result.output
    assert "hidden-secret" not in result.output
    url = "s3://me:hidden-secret@host/run"
    for arguments in (["inspect", checkpoint, url], [url], ["gc", url, "--polcy", url], ["inspect", f"--{url}"]):
        assert "hidden-secret" not in run(*arguments).output


def on_terminal(*arguments: object) -> tuple[int, str, str]:
    """Run the command with a terminal as stderr. Return the exit code, stdout and the output on the terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen([*PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    seen = read_terminal(master)
    output, _ = process.communicate()
    return process.returncode, output, seen


@pytest.mark.parametrize("command", ["verify", "diff", "convert"])
def test_progress_is_shown_on_a_terminal_only(command: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "a", {"x": np.ones(1 << 20, np.float32)})
    arguments = {"verify": [], "diff": [tmp_path / "a"], "convert": [tmp_path / "b"]}[command]
    code, output, seen = on_terminal(command, tmp_path / "a", *arguments, "--json")
    assert code == 0
    assert json.loads(output)
    assert {"verify": "verifying", "diff": "comparing", "convert": "converting"}[command] in seen
    finished = program(command, tmp_path / "a", *arguments, *(["--overwrite"] if command == "convert" else []))
    assert finished.returncode == 0
    assert finished.stderr == ""
    assert "\x1b" not in finished.stdout


def test_a_checkpoint_that_is_damaged_anywhere_never_gives_a_traceback(run: Run, checkpoint: Path) -> None:
    whole = (checkpoint / "checkpoint.json").read_bytes()
    for offset in range(0, len(whole), 37):
        flip(checkpoint / "checkpoint.json", offset)
        for command in ("inspect", "verify", "ls"):
            result = run(command, checkpoint)
            assert result.exit_code in (1, 3, 4, 5) or (command == "ls" and "corrupt" in result.stdout), result.output
            assert "Traceback" not in result.output
        (checkpoint / "checkpoint.json").write_bytes(whole)
