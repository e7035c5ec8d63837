"""Comparisons of worktrees detect slower rows, relative to the noise of the old worktree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import Comparison, Options, RowSamples, compare_trees, main, spread, summarise
from tests.architecture.sources import ROOT

_BENCHMARK = """
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row

def rows(setting):
    ran = []
    def run(name, seconds):
        ran.append(name)
        return seconds * (7 if len(ran) == 1 else 1)  # warming up is slow
    for case in {cases}:
        contenders = [
            Contender("ckptcore.save", lambda: run("ours", {seconds}), seconds=float),
            Contender("peer", lambda: run("peer", 1.0), seconds=float),
            Contender("ckptcore.load", lambda: run("ours", 0.5), seconds=float),
        ]
        yield from compare(Case(case, contenders), setting.rounds)
    assert "peer" not in ran
    print("not a reply")
    yield Row("requests", "ckptcore.save", {requests}, "requests")
"""


def _tree(root: Path, *, cases: list[str], seconds: float, requests: int) -> Path:
    """Create a worktree with an empty library and one benchmark."""
    (root / "ckptcore").mkdir(parents=True)
    (root / "ckptcore" / "__init__.py").touch()
    (root / "benchmarks").mkdir()
    for name in ("__init__", "alternating", "report", "setting"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", root / "benchmarks")
    text = _BENCHMARK.format(cases=cases, seconds=seconds, requests=requests)
    (root / "benchmarks" / "tiny.py").write_text(text, encoding="utf-8")
    return root


def _committed(tree: Path) -> list[str]:
    """Make a tree a repository with one commit. Return the beginning of commands of git there."""
    git = ["git", "-c", "user.name=tester", "-c", "user.email=tester@example.com", "-C", str(tree)]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*git, *command], check=True)
    return git


def _worktrees(git: list[str]) -> list[str]:
    listed = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def test_worktrees_are_compared_by_the_names_of_their_rows(tmp_path: Path) -> None:
    old = _tree(tmp_path / "old", cases=["first", "gone", "last"], seconds=2.0, requests=3)
    new = _tree(tmp_path / "new", cases=["first", "last", "added"], seconds=4.0, requests=4)
    comparisons = list(compare_trees("tiny", Options(old, new, tmp_path, pairs=3, launches=2, scale=0.01)))
    rows = {(row.case, row.contender): row for row in comparisons if isinstance(row, Comparison)}
    slower = rows["first", "ckptcore.save"]
    assert (slower.pairs, slower.old, slower.new, slower.ratio, slower.spread) == (3, 2.0, 4.0, 2.0, 1.0)
    assert not slower.passed and slower.line().endswith("WORSE")
    same = rows["last", "ckptcore.load"]
    assert (same.ratio, same.passed) == (1.0, True)
    counted = rows["requests", "ckptcore.save"]
    assert (counted.unit, counted.old, counted.new, counted.passed) == ("requests", 3, 4, False)
    assert {case for case, _ in rows} == {"first", "last", "requests"}
    notes = [row for row in comparisons if isinstance(row, str)]
    assert notes == [
        f"only in the {tree} worktree: {case}, {contender}"
        for tree, case in (("old", "gone"), ("new", "added"))
        for contender in ("ckptcore.save", "ckptcore.load")
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}


def test_a_contender_of_one_worktree_only_is_not_compared(tmp_path: Path) -> None:
    old = _tree(tmp_path / "old", cases=["first"], seconds=2.0, requests=3)
    new = _tree(tmp_path / "new", cases=["first"], seconds=2.0, requests=3)
    tiny = new / "benchmarks" / "tiny.py"
    tiny.write_text(
        tiny.read_text(encoding="utf-8").replace('"ckptcore.load"', '"ckptcore.load_into"'), encoding="utf-8"
    )
    comparisons = list(compare_trees("tiny", Options(old, new, tmp_path, pairs=3, launches=1, scale=0.01)))
    assert {row.contender for row in comparisons if isinstance(row, Comparison)} == {"ckptcore.save"}
    assert {row for row in comparisons if isinstance(row, str)} == {
        "only in the old worktree: first, ckptcore.load",
        "only in the new worktree: first, ckptcore.load_into",
    }


def test_a_failed_benchmark_reports_its_error(tmp_path: Path) -> None:
    old = _tree(tmp_path / "old", cases=["first"], seconds=2.0, requests=3)
    (old / "benchmarks" / "tiny.py").write_text("raise RuntimeError('no such library')", encoding="utf-8")
    with pytest.raises(RuntimeError, match="no such library"):
        list(compare_trees("tiny", Options(old, old, tmp_path)))


def test_a_library_from_outside_the_worktree_is_refused(tmp_path: Path) -> None:
    old = _tree(tmp_path / "old", cases=["first"], seconds=2.0, requests=3)
    shutil.rmtree(old / "ckptcore")
    with pytest.raises(RuntimeError, match="expected ckptcore of"):
        list(compare_trees("tiny", Options(old, old, tmp_path)))


def test_the_spread_has_both_directions() -> None:
    assert spread([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1.0
    assert spread([1.0, 1.0], [1.1, 1.1]) == spread([1.1, 1.1], [1.0, 1.0]) == pytest.approx(1.1)
    assert spread([], []) == 1.0


@pytest.mark.parametrize(
    ("new", "again", "passed"), [(1.04, 1.0, True), (1.06, 1.0, False), (1.06, 1.08, True), (1.06, 0.9, True)]
)
def test_a_row_passes_within_the_limit_or_the_spread(new: float, again: float, passed: bool) -> None:
    assert summarise("case", "ours", RowSamples("s", [1.0] * 3, [new] * 3, [again] * 3)).passed == passed


@pytest.mark.parametrize(("new", "passed"), [(1_000_000, True), (1_010_000, True), (1_020_000, False)])
def test_a_run_must_not_read_more_bytes(new: int, passed: bool) -> None:
    samples = RowSamples("s", [1.0], [1.0], [1.0], [1_000_000], [new])
    assert summarise("case", "ours", samples).passed == passed


def test_a_benchmark_that_the_old_worktree_lacks_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = [_tree(tmp_path / name, cases=["first"], seconds=2.0, requests=3) for name in ("old", "new")]
    (trees[1] / "benchmarks" / "bounds.py").touch()
    arguments = ["--new", str(trees[1]), "--only", "bounds", "--directory", str(tmp_path)]
    assert main([str(trees[0]), *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "bounds: only in the new worktree",
        "0 rows are worse, 0 benchmarks failed",
    ]


def test_an_unknown_commit_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = _tree(tmp_path / "new", cases=["first"], seconds=2.0, requests=3)
    _committed(new)
    with pytest.raises(SystemExit) as exit:
        main(["v0.0.unknown", "--new", str(new), "--directory", str(tmp_path)])
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith(f"error: old: 'v0.0.unknown' is neither a commit in {new} nor a directory")


def test_the_worktree_is_removed_if_the_comparison_is_terminated(tmp_path: Path) -> None:
    began = tmp_path / "began"
    new = _tree(tmp_path / "new", cases=["first"], seconds=2.0, requests=3)
    text = f"""
import pathlib, sys
def rows(setting):
    pathlib.Path({str(began)!r}).touch()
    sys.exit(sys.stdin.read())
"""
    (new / "benchmarks" / "local.py").write_text(text, encoding="utf-8")
    git = _committed(new)
    arguments = ["HEAD", "--new", str(new), "--only", "local", "--directory", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.compare", *arguments], cwd=ROOT) as process:
        while not began.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert len(_worktrees(git)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"began", "new"}


def test_a_commit_is_compared_in_a_worktree_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "BUDGET", {"tiny": 1})
    new = _tree(tmp_path / "new", cases=["first"], seconds=2.0, requests=3)
    git = _committed(new)
    tiny = new / "benchmarks" / "tiny.py"
    arguments = ["HEAD", "--new", str(new), "--pairs", "3", "--launches", "1", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith("0 rows are worse, 0 benchmarks failed\n")
    # Of another size, because a compiled module of the same second and size would be taken for that of this text.
    tiny.write_text(tiny.read_text(encoding="utf-8").replace('"ours", 2.0', '"ours", 4.00'), encoding="utf-8")
    assert main(arguments) == 1
    *_, count, worse = capsys.readouterr().out.splitlines()
    assert count == "1 rows are worse, 0 benchmarks failed"
    assert worse.split()[:2] == ["first", "ckptcore.save"] and worse.endswith("WORSE")
    assert len(_worktrees(git)) == 1
    assert list(tmp_path.iterdir()) == [new]


@pytest.mark.slow
def test_this_worktree_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    arguments = ["--only", "local", "--pairs", "1", "--launches", "1", "--scale", "0.005"]
    main([str(ROOT), *arguments, "--directory", str(tmp_path), "--out", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]["local"]
    assert {"load into fresh memory", "save, durable"} <= {row["case"] for row in rows}
    assert all(row["pairs"] == 1 and "ckptcore" in row["contender"] for row in rows)
    assert "benchmarks failed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
