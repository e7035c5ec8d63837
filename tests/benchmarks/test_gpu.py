"""The benchmark of a device, run with fakes of `torch.cuda`, from a checkout of which nothing is installed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.alternating import Case, Contender, measure
from benchmarks.gpu import TESTS, Budget
from tests.architecture.sources import ROOT
from tools.isolated import copied_checkout, environment_without_metadata, packages_without_metadata

_FAKES: Final = Path(__file__).with_name("fake_cuda.py")


class Clock:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the modules of this checkout, with the program that has the fakes."""
    copied = copied_checkout(tmp_path_factory.mktemp("checkout") / "copy")
    (copied / _FAKES.name).symlink_to(_FAKES)
    packages_without_metadata(copied.parent / "packages")
    return copied


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a checkout, without installed distributions."""
    environment = {**environment_without_metadata(checkout.parent / "packages"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-S", *command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def fake_run(checkout: Path, out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the benchmark with fakes. Return how it ended, and its report."""
    out.parent.mkdir(exist_ok=True)
    ended = run(checkout, "-m", _FAKES.stem, *arguments, "--directory", str(out.parent), "--out", str(out))
    assert [path.name for path in out.parent.iterdir() if path != out] == [], "the benchmark left files"
    return ended, json.loads(out.read_text("utf-8")) if out.exists() else None


def rows_of(report: Any, section: str) -> Sequence[tuple[str, str]]:
    return [(row["case"].partition(" ")[0], row["contender"]) for row in report["benchmarks"][section]]


@pytest.mark.system
def test_without_a_device_nothing_is_written(checkout: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, sys\n"
        "found = [each.name for each in importlib.metadata.distributions()]\n"
        "assert not [name for name in found if name.startswith('ckptcore')], found\n"
        "from benchmarks.gpu import main\n"
        f"sys.exit(main(['--directory', {str(tmp_path)!r}, '--out', {str(tmp_path / 'report.json')!r}]))\n"
    )
    ended = run(checkout, "-c", code)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == "gpu: nothing was measured: PyTorch finds no CUDA device\n"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "torch.py").touch()
    without = f"import sys\nsys.path = {[str(checkout)]!r} + [p for p in sys.path if 'packages' not in p]\n"
    ended = run(checkout, "-c", without + code.partition("assert")[0] + "from benchmarks.gpu import main\nmain([])")
    assert "nothing was measured: torch is not installed" in ended.stderr


@pytest.mark.system
@pytest.mark.slow
def test_every_row_is_measured_and_written(checkout: Path, tmp_path: Path) -> None:
    ended, report = fake_run(checkout, tmp_path / "out" / "report.json", "--only", "copies", "stall", "load")
    assert ended.returncode in (0, 1) and "failed to load" not in ended.stderr, ended.stderr
    assert "0 sections failed or left out" in ended.stdout, ended.stderr
    assert ": left out: " not in ended.stderr, "a contender failed"
    assert report["machine"]["device"] == "a fake device"
    assert {"ckptcore", "ckptcore-torch"} <= report["versions"].keys()
    assert report["seconds"].keys() == {"copies", "stall", "load"}
    copies = rows_of(report, "copies")
    names = ["ckptcore", "pinned.copy_", "pageable.copy_"]
    names += [f"{memory}, {count} streams" for count in (2, 4) for memory in ("pinned", "pageable")]
    names += [f"staged, {count} streams" for count in (1, 2, 4)]
    assert [name for _, name in copies] == names * 2
    limits = [row for row in report["benchmarks"]["copies"] if row["contender"] == "pinned.copy_"]
    assert [row["target"] for row in limits] == ["at least 0.90"] * 2
    assert [name for _, name in rows_of(report, "stall")] == ["ckptcore.save_async", "pinned.copy_", "DCP async_save"]
    peers = {name for _, name in rows_of(report, "load")}
    assert {"ckptcore.load_into", "dcp.load", "safetensors, then copy_"} <= peers


@pytest.mark.system
def test_a_run_ends_with_its_time(checkout: Path, tmp_path: Path) -> None:
    """Each look at the clock takes 60 of 480 seconds: the last section is left out, and the first is in the report."""
    out = tmp_path / "out" / "report.json"
    ended, report = fake_run(checkout, out, "--step", "60", "--only", "copies", "load")
    assert ended.returncode == 1
    assert "gpu: load is left out: no time is left" in ended.stderr
    assert "copies" in report["benchmarks"] and "load" not in report["benchmarks"]


@pytest.mark.parametrize(("seconds_of_a_round", "rounds"), [(1.0, 7), (40.0, 4), (100.0, 1), (1000.0, 1)])
def test_rounds_fit_in_their_share_of_the_time(seconds_of_a_round: float, rounds: int) -> None:
    """After a trial and the warm-up round, rounds are measured while one more fits in half of 480 seconds."""
    clock = Clock()

    def work() -> float:
        clock.now += seconds_of_a_round
        return seconds_of_a_round

    budget = Budget(480.0, clock)
    go_on = budget.go_on(0.5)
    work()  # the trial
    times = measure(Case("case", [Contender("ours", work, seconds=float)]), 7, go_on=go_on)
    assert len(times["ours"].seconds) == rounds
    assert budget.left() == 480.0 - (2 + rounds) * seconds_of_a_round


def test_a_second_run_takes_its_share_of_what_is_left() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    clock.now += 60.0
    go_on = budget.go_on(0.5)  # 20 seconds
    clock.now += 12.0  # three passes of 4 seconds
    assert go_on()
    clock.now += 5.0  # the mean of four passes is 4.25 seconds: 17 + 4.25 > 20
    assert not go_on()


def test_all_tests_that_wait_for_a_device_are_run() -> None:
    """Find tests that skip without CUDA, in modules without libraries that train."""
    found = set()
    for path in [*ROOT.glob("plugins/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = path.read_text("utf-8")
        if "cuda.is_available()" not in text or path.parent.name == "trainers":
            continue
        for node in ast.parse(text).body:
            marks = [ast.unparse(mark) for mark in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
            if any("cuda" in mark and "parametrize" not in mark for mark in marks):
                assert isinstance(node, ast.FunctionDef)
                found.add(f"{path.relative_to(ROOT)}::{node.name}")
    assert found == set(TESTS)
