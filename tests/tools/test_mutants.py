"""The tool for mutants: it finds and names mutants, and reports whether tests detect them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tools.mutant_hook import VARIABLE
from tools.mutants import Mutant, Result, compare, find_mutants, main, mutated_source, try_mutant

_SOURCE = '''
LIMIT = 3

class Claim:
    def take(self, size: int, most: int = 4) -> bool:
        """Take it."""
        if size <= most and not self.held:
            self.store(size, most)
            raise ValueError(f"{size} > {1 + 1}")
        for number in range(2):
            continue
        return True if size else None

def count(a, b):
    def inner():
        return None
    logger.debug("one", "two")
    return a + b
'''


def _project(root: Path) -> Path:
    (root / "package").mkdir()
    (root / "package" / "claims.py").write_text(_SOURCE, encoding="utf-8")
    return root


def _kinds(mutants: list[Mutant]) -> list[tuple[str, str, str]]:
    parts = [mutant.name.split(" | ") for mutant in mutants]
    return sorted((function, kind, text) for function, kind, text, _ in parts)


def test_mutants_change_only_code_inside_functions(tmp_path: Path) -> None:
    mutants = list(find_mutants(_project(tmp_path), ["package"]))
    take = "Claim.take"
    assert _kinds(mutants) == [
        (take, "and-or", "size <= most and (not self.held)"),
        (take, "compare", "size <= most (0)"),
        (take, "constant", "2"),
        (take, "constant", "True"),
        (take, "loop", "continue"),
        (take, "negate", "size"),
        (take, "negate", "size <= most and (not self.held)"),
        (take, "not", "not self.held"),
        (take, "remove", "raise ValueError(f'{size} > {1 + 1}')"),
        (take, "remove", "self.store(size, most)"),
        (take, "return", "True if size else None"),
        (take, "swap", "self.store(size, most)"),
        ("count", "arithmetic", "a + b"),
        ("count", "return", "a + b"),
    ]


def test_no_two_mutants_make_the_same_change(tmp_path: Path) -> None:
    mutants = find_mutants(_project(tmp_path), ["package/claims.py"])
    changed = {mutated_source(_SOURCE, mutant.index) for mutant in mutants}
    assert len(changed) == len(mutants)
    for source in changed:
        compile(source, "claims.py", "exec")
    with pytest.raises(IndexError, match="fewer than"):
        mutated_source(_SOURCE, len(mutants))


def test_names_of_mutants_do_not_depend_on_files_or_lines(tmp_path: Path) -> None:
    before = find_mutants(_project(tmp_path), ["package"])
    (tmp_path / "package" / "claims.py").unlink()
    (tmp_path / "package" / "transaction.py").write_text("# moved\n\n" + _SOURCE, encoding="utf-8")
    after = find_mutants(tmp_path, ["package"])
    assert [mutant.name for mutant in before] == [mutant.name for mutant in after]
    assert {mutant.path for mutant in after} == {"package/transaction.py"}


def test_mutants_with_equal_names_are_numbered(tmp_path: Path) -> None:
    _project(tmp_path)
    (tmp_path / "package" / "other.py").write_text(_SOURCE, encoding="utf-8")
    names = [mutant.name for mutant in find_mutants(tmp_path, ["package"])]
    assert len(set(names)) == len(names)
    assert {name.rpartition(" | ")[2] for name in names} == {"0", "1"}


def test_results_are_compared_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: Result("killed", 1.0, "old.py") for name in ("both", "lost", "gone")}
    before |= {"late": Result("timeout", 9.0, "old.py"), "never": Result("survived", 1.0, "old.py")}
    after = {"both": Result("killed", 1.0, "new.py"), "lost": Result("survived", 1.0, "new.py")}
    after |= {"late": Result("killed", 1.0, "new.py"), "never": Result("survived", 1.0, "new.py")}
    assert compare(before, after) == (["lost"], ["gone"])
    for name, results in (("before", before), ("after", after)):
        report = {
            "mutants": {
                key: {"outcome": of.outcome, "seconds": of.seconds, "path": of.path} for key, of in results.items()
            }
        }
        (tmp_path / name).write_text(json.dumps(report), encoding="utf-8")
    assert main(["--compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert main(["--compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 0
    assert "  lost\n" in capsys.readouterr().out


_LIMITS = """
def allowed(size):
    return size < 3

def waits(size):
    while size > 0:
        size = size - 1
    return size

def unused(size):
    return size + 1
"""

_TESTS = """
import subprocess, sys
from limits import waits

def test_in_a_process():
    code = "import limits; assert limits.allowed(2) and not limits.allowed(3)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_waits():
    assert waits(2) == 0
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("allowed | compare | size < 3 (0) | 0", "killed"),
        ("waits | arithmetic | size - 1 | 0", "timeout"),
        ("unused | arithmetic | size + 1 | 0", "survived"),
    ],
)
def test_mutants_also_apply_to_processes_that_tests_start(tmp_path: Path, name: str, outcome: str) -> None:
    (tmp_path / "limits.py").write_text(_LIMITS, encoding="utf-8")
    (tmp_path / "test_limits.py").write_text(_TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow\n", encoding="utf-8")
    # Run in a new process, because a forked one would inherit imported modules.
    program = (
        "import sys; from pathlib import Path; from tools.mutants import find_mutants, try_mutant\n"
        "root = Path(sys.argv[1]); mutants = {mutant.name: mutant for mutant in find_mutants(root, ['limits.py'])}\n"
        "print(try_mutant(root, mutants[sys.argv[2]], ['test_limits.py'], float(sys.argv[3])).outcome)"
    )
    seconds = "5" if outcome == "timeout" else "300"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", program, str(tmp_path), name, seconds]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=400)
    assert done.stdout.split()[-1] == outcome
    assert VARIABLE not in os.environ


@pytest.mark.system
def test_tests_must_pass_without_a_mutant(tmp_path: Path) -> None:
    (tmp_path / "test_limits.py").write_text("def test_fails():\n    assert 1 == 2\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="fail without a mutant"):
        try_mutant(tmp_path, None, ["test_limits.py"], 300)
