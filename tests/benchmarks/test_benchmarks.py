"""Every benchmark runs with tiny sizes and writes a readable report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest

from benchmarks import BENCHMARKS, BUDGET, SEPARATE
from benchmarks.__main__ import main, measure
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row, lines
from benchmarks.setting import Setting

_SLOW: Final = {
    "broadcast",
    "dcp_reshard",
    "jobs",
    "orbax",
    "processes",
    "recovery",
    "replaced_jobs",
    "stall",
    "versions",
}
"""Benchmarks that start many processes, or several libraries in them."""

_SCALE: Final = 0.005


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of gcsfs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in BENCHMARKS]
)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    rows = list(measure(name, Setting(tmp_path, rounds=1, scale=_SCALE)))
    assert rows
    assert len({(row.case, row.contender) for row in rows}) == len(rows), "rows have the same name"
    for row in rows:
        assert math.isfinite(row.median) and row.line()
        assert row.unit != "s" or row.median > 0
    assert list(tmp_path.iterdir()) == [], "the benchmark left files"


def test_every_module_with_rows_is_registered() -> None:
    package = Path(__file__).parents[2] / "benchmarks"
    with_rows = {
        path.stem for path in package.glob("*.py") if "\ndef rows(setting: Setting)" in path.read_text("utf-8")
    }
    assert with_rows == set(BENCHMARKS)


def test_a_report_has_the_machine_the_versions_and_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_file = tmp_path / "found.json"
    measured = [Row("save", "ckptcore.save", 0.5, ratio=1.0), Row("save", "peer", 0.25, ratio=0.5, reached=False)]
    monkeypatch.setattr("benchmarks.__main__.measure", lambda name, setting: iter(measured))
    assert main(["--only", "local", "--scale", "0.1", "--directory", str(tmp_path), "--out", str(report_file)]) == 1
    printed = capsys.readouterr().out.splitlines()
    ours, peer = [row.line() for row in measured]
    assert printed[1:] == ["ahead of ckptcore:", peer, "all rows:", ours, peer, "1 targets missed"]
    report = json.loads(report_file.read_text("utf-8"))
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory"] > 0
    assert {"python", "ckptcore", "numpy", "ckptcore-dcp"} <= report["versions"].keys()
    assert report["setting"] == {"rounds": 7, "scale": 0.1}
    assert report["benchmarks"] == {"local": [asdict(row) for row in measured]}
    assert report["seconds"].keys() == {"local"} and report["budget"]["local"] == BUDGET["local"]


def test_rows_of_faster_peers_are_printed_first() -> None:
    ours = Row("load", "ckptcore.load", 2.0, ratio=1.0)
    slower, near, far = [Row("load", name, ratio, ratio=ratio) for name, ratio in (("a", 1.5), ("b", 0.9), ("c", 0.5))]
    limit, variant = Row("load", "raw preadv, 2 threads", 1.0, ratio=0.5), Row("load", "ckptcore.open", 1.0, ratio=0.4)
    rows = [ours, slower, near, limit, far, variant]
    assert lines(rows)[1:] == [
        "ahead of ckptcore:",
        far.line(),
        near.line(),
        "all rows:",
        *[row.line() for row in rows],
    ]
    assert lines([ours, slower, limit, variant])[1] == "no peer is ahead of ckptcore"


def test_what_was_measured_before_an_error_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(name: str, setting: Setting) -> Iterator[Row]:
        yield Row("save", "ckptcore.save", 0.5, ratio=1.0)
        if name == "stall":
            raise RuntimeError("no memory")

    monkeypatch.setattr("benchmarks.__main__.measure", measured)
    with pytest.raises(RuntimeError, match="no memory"):
        main(["--only", "local", "stall", "--directory", str(tmp_path)])
    assert capsys.readouterr().out.count("ckptcore.save") == 2


def test_make_bench_has_a_budget_of_half_an_hour() -> None:
    assert (*BUDGET, *SEPARATE) == BENCHMARKS
    assert sum(BUDGET.values()) <= 1800


def test_every_case_has_seven_rounds() -> None:
    """No benchmark of ``make bench`` reduces the number of rounds."""
    package = Path(__file__).parents[2] / "benchmarks"
    fewer = {name for name in BENCHMARKS if "min(setting.rounds" in (package / f"{name}.py").read_text("utf-8")}
    assert fewer <= set(SEPARATE)


def _contender(name: str, seconds: list[float], calls: list[str], *, target: float | None = None) -> Contender:
    """Return a contender with these run times. The first one is of the warm-up round, which is not counted."""
    left = iter(seconds)

    def run() -> float:
        calls.append(name)
        return next(left)

    return Contender(name, run, seconds=lambda value: float(value), target=target)


def test_contenders_take_turns_and_are_compared_with_the_first() -> None:
    calls: list[str] = []
    ours = _contender("ours", [9, 1, 2, 4], calls)
    theirs = _contender("theirs", [9, 3, 4, 4], calls, target=2.5)
    first, second = compare(Case("case", [ours, theirs], nbytes=1 << 20), rounds=3)
    assert calls == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (first.median, first.ratio, first.reached) == (2, 1, True)
    assert (second.median, second.ratio, second.reached) == (4, 2, False)
    assert second.spread == pytest.approx((4 - 3.5) / 4)
    assert first.page_cache is None


def test_a_case_that_writes_syncs_before_each_run_and_reports_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("os.sync", lambda: calls.append("sync"))
    case = Case("case", [_contender("ours", [1, 1], calls), _contender("theirs", [1, 1], calls)], writes=True)
    rows = compare(case, rounds=1)
    assert calls == ["sync", "theirs", "sync", "ours", "sync", "ours", "sync", "theirs"]
    for row in rows:
        assert row.page_cache is not None and row.page_cache.cached > 0
        assert "cached" in row.line()


def test_the_line_shows_a_missed_target() -> None:
    row = Row("case", "ours", 0.25, ratio=1.5, spread=0.125, nbytes=10**9, target="at least 2.00", reached=False)
    assert " ".join(row.line().split()) == "case ours 250.00 ms 1.5 12% at least 2.00: MISSED; 4.00 GB/s"
