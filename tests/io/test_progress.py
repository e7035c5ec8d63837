"""Progress: counted bytes, and bars of rich or tqdm."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError
from ckptcore.progress import ByteProgress, Progress, show_bar, show_progress


class Reports(list[tuple[int, int]]):
    """A function for ``progress=`` that records its calls."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def end_at(self, total: int) -> None:
        """Assert that the count never decreases, never exceeds the total, and reaches it only with the last call."""
        assert self[-1] == (total, total)
        assert all(done <= of for done, of in self)
        assert [done for done, _ in self] == sorted(done for done, _ in self)
        assert all(done < of for done, of in self[:-1])


class Screen(io.StringIO):
    """A fake stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


class NotebookOutput(io.StringIO):
    """A fake stderr of ipykernel, which is no terminal."""

    __module__ = "ipykernel.iostream"


def test_the_larger_count_is_reported_and_the_total_last() -> None:
    reports = Reports()
    progress = ByteProgress(reports)
    progress.plan(100)
    progress.move(10)
    progress.complete(5)
    progress.complete(25)
    progress.move(15)  # 25 moved, 30 complete: no call
    progress.move(500)
    assert progress.value == (99, 100)
    progress.end()
    assert reports == [(0, 100), (10, 100), (30, 100), (99, 100), (100, 100)]
    assert progress.value == Progress(done=100, total=100)


def test_an_operation_without_bytes_reports_once() -> None:
    reports = Reports()
    progress = ByteProgress(reports)
    progress.plan(0)
    progress.complete(0)
    progress.end()
    assert reports == [(0, 0)]


def test_an_operation_that_ends_without_a_plan_reports_once() -> None:
    reports = Reports()
    ByteProgress(reports).end()
    assert reports == [(0, 0)]


def test_a_second_attempt_adds_to_the_total() -> None:
    reports = Reports()
    progress = ByteProgress(reports)
    progress.plan(100)
    progress.complete(60)
    progress.plan(80)
    progress.complete(80)
    progress.end()
    assert reports == [(0, 100), (60, 100), (60, 140), (139, 140), (140, 140)]


def test_expected_bytes_belong_to_the_total() -> None:
    reports = Reports()
    progress = ByteProgress(reports)
    progress.later = 50
    progress.plan(0)
    progress.later -= 30
    progress.plan(10)  # 30 were expected
    progress.complete(10)
    progress.later -= 20
    progress.plan(20)
    progress.complete(20)
    progress.end()
    assert reports == [(0, 50), (0, 30), (10, 30), (29, 30), (30, 30)]


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make imports of the given packages fail."""
    for package in packages:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("missing", [(), ("tqdm",), ("rich",)])
@pytest.mark.parametrize("stderr", [Screen, NotebookOutput])
def test_a_bar_ends_at_100_percent(
    missing: tuple[str, ...], stderr: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without(monkeypatch, *missing)
    screen = stderr()
    monkeypatch.setattr(sys, "stderr", screen)
    ckptcore.save(tmp_path / "c", {"w": np.zeros(1000)}, progress=True)
    assert "saving" in screen.getvalue()
    assert "100%" in screen.getvalue()
    assert ("\x1b[" in screen.getvalue()) == ("rich" not in missing)


@pytest.mark.parametrize("missing", ["tqdm", "rich"])
def test_a_bar_for_no_bytes_ends(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, missing)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    ckptcore.save(tmp_path / "c", {"step": 3}, progress=True)
    assert "saving" in screen.getvalue()


def test_without_rich_and_tqdm_a_bar_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, "rich", "tqdm")
    with pytest.raises(MissingDistributionError, match="pip install rich"):
        ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, progress=True)
    assert not (tmp_path / "c").exists()
    ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, progress=Reports())


@pytest.mark.parametrize("missing", [(), ("rich",)])
@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_no_bar_is_shown_without_a_terminal(
    missing: tuple[str, ...], stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without(monkeypatch, *missing)
    monkeypatch.setattr(sys, "stderr", stderr)
    ckptcore.save(tmp_path / "c", {"w": np.zeros(1000)}, progress=True)
    assert stderr is None or stderr.getvalue() == ""


def test_only_rank_0_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with show_progress(True, "loading", rank=1) as report:
        assert report is not None
        report(1, 2)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("missing", [(), ("rich",)])
def test_a_bar_can_be_removed_at_the_end(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *missing)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with show_bar("verifying", leave=False) as report:
        report(2, 2)
    assert "verifying" in screen.getvalue()
    assert screen.getvalue().rstrip("\n").endswith(("\x1b[2K", "\r"))


def test_a_bar_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with pytest.raises(ValueError, match="stopped"), show_progress(True, "loading", rank=0) as report:
        assert report is not None
        report(1, 2)
        raise ValueError("stopped")
    assert sys.stderr is screen
    assert "50%" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is visible again


def test_invalid_values_of_progress_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="progress='yes': expected True, False, or a function"):
        ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, progress="yes")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.system
def test_libraries_of_bars_are_imported_only_if_used(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, ckptcore\n"
        f"ckptcore.save({str(tmp_path / 'c')!r}, {{'w': numpy.zeros(3)}}, progress=lambda done, total: None)\n"
        "assert not {'rich', 'tqdm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
