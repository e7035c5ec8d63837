"""The tool that tests other versions: which interpreter it takes, what it installs, and that its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.versions import ROOT, find_interpreter, requirements, runs_of


def test_interpreters_are_found_in_order(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    assert find_interpreter("3.99", nowhere | {"PYTHON399": "/some/python"}) == "/some/python"
    assert find_interpreter("3.99", nowhere) is None
    python = tmp_path / "versions" / "3.99.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_interpreter("3.99", nowhere) == str(python)


def test_requirements_are_those_of_all_distributions_needed() -> None:
    ours, others = requirements(["ckptcore[transformers]"])
    assert {"ckptcore", "ckptcore-integrations", "ckptcore-torch"} <= set(ours)
    assert any(text.startswith("transformers>=") for text in others)
    assert not any(text.startswith("ckptcore") for text in others)


@pytest.mark.parametrize("kind", ["oldest", "newest", "short"])
def test_the_tests_of_every_run_exist(kind: str) -> None:
    paths = [test.removeprefix("--ignore=") for run in runs_of(kind) for test in run.part.tests]
    assert [path for path in paths if not (ROOT / path).exists()] == []
