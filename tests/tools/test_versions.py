"""The tool that tests other versions: its choice of interpreters, its installations and its list of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import versions
from tools.versions import ROOT, find_interpreter, projects, requirements, runs_of


def test_interpreters_are_found_in_order(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    assert find_interpreter("3.99", nowhere | {"PYTHON399": "/some/python"}) == "/some/python"
    assert find_interpreter("3.99", nowhere) is None
    python = tmp_path / "versions" / "3.99.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_interpreter("3.99", nowhere) == str(python)


def test_requirements_include_those_of_all_needed_distributions() -> None:
    ours, others = requirements(["ckptcore[transformers]"])
    assert {"ckptcore", "ckptcore-integrations", "ckptcore-torch"} <= set(ours)
    assert any(text.startswith("transformers>=") for text in others)
    assert not any(text.startswith("ckptcore") for text in others)


@pytest.mark.parametrize("kind", ["oldest", "newest", "short"])
def test_the_tests_of_every_run_exist(kind: str) -> None:
    paths = [test.removeprefix("--ignore=") for run in runs_of(kind) for test in run.part.tests if test != "--trainers"]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("kind", ["oldest", "newest"])
def test_every_distribution_is_installed_and_tested(kind: str) -> None:
    runs = runs_of(kind)
    assert {name for run in runs for name in requirements(run.part.distributions)[0]} == projects().keys()
    tested = {test for run in runs for test in run.part.tests}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/tests")} <= tested
    ignored = {test.removeprefix("--ignore=") for test in runs[0].part.tests if test.startswith("--ignore=")}
    assert ignored - tested - set(runs[-1].part.tests) == {
        "plugins/formats/tests/test_conversions.py",
        "plugins/formats/tests/test_numpy_files.py",
        "plugins/formats/tests/test_pickle_files.py",
        "plugins/formats/tests/test_rank_files.py",
        "plugins/formats/tests/test_torch_checkpointing.py",
        "plugins/jax_backend/tests/test_jax_keys.py",
        "plugins/jax_backend/tests/test_jax_registered_subclasses.py",
        "plugins/jax_backend/tests/test_static_content.py",
        "plugins/layout_orbax/tests/test_zarr_groups.py",
        "plugins/torch_backend/tests/test_torchao.py",
        "plugins/tools/tests/consolidation/test_hugging_face.py",
        "plugins/transforms/tests/test_dequantizing.py",
        "plugins/transforms/tests/test_dequantizing_parts.py",
        "plugins/transforms/tests/test_quantised_jobs.py",
        "plugins/transforms/tests/test_quantized.py",
        "plugins/view/tests/page",
    }, "the page Install says what is left out"


@pytest.mark.parametrize("given", [[], ["--"], ["--", "-x", "--workers"]])
def test_arguments_for_pytest_follow_two_dashes(
    given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make test-versions` passes the two dashes even without arguments."""
    commands: list[list[str]] = []
    for path in (ROOT / "pyproject.toml", ROOT / "plugins", *ROOT.glob("constraints*.txt")):
        (tmp_path / path.name).symlink_to(path)

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[1:3] == ["-m", "venv"]:
            (Path(command[-1]) / "lib" / "python3" / "site-packages").mkdir(parents=True, exist_ok=True)
        elif command[1:3] == ["-m", "pytest"]:
            commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(versions, "find_interpreter", lambda python: "python")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    assert versions.main(["short", "--workers", "3", *given]) == 0
    for command, tried in zip(commands, runs_of("short"), strict=True):
        kept = versions.KEEP_FILES if tried.constraints == versions.OLDEST else ()
        assert command[1:] == ["-m", "pytest", "-n", "3", *kept, *tried.part.tests, *given[1:]]
        assert Path(command[0]).is_relative_to(tmp_path)
    commands.clear()
    assert versions.main(["newest", "--pythons", "3.13"]) == 0
    assert len(commands) == 1
