"""Conformance tests for observers that hear when phases begin, such as watchdogs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore.events import BeginObserver, Recording

_THREADS = 8
_PHASES = 50


class BeginObserverTests:
    """Tests of `ckptcore.events.BeginObserver`, for implementations to inherit.

    Implement `observer` and `running`. An observer that raises is logged, and hears of the rest all the same: these
    tests fail if it is logged.
    """

    def observer(self) -> BeginObserver:
        """Return a new observer."""
        raise NotImplementedError

    def running(self, observer: BeginObserver) -> Sequence[str]:
        """Return the names of the phases that run, as the observer sees it: in any order, each as often as it runs."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def expect_no_failure(self, caplog: pytest.LogCaptureFixture) -> None:
        """Clear the log, which `_expect` looks at."""
        self._log = caplog

    def _expect(self, observer: BeginObserver, *phases: str) -> None:
        assert not [record for record in self._log.records if "observer" in record.getMessage()]
        assert sorted(self.running(observer)) == sorted(phases)

    def test_nothing_runs_after_a_save_and_a_load(self, tmp_path: Path) -> None:
        """Also after a save that failed."""
        observer = self.observer()
        assert isinstance(observer, BeginObserver)
        context = ckptcore.Context(observers=(observer,))
        ckptcore.save(tmp_path / "saved", {"w": np.ones(1000)}, context=context)
        ckptcore.load(tmp_path / "saved", context=context)
        with pytest.raises(ckptcore.CheckpointError):
            ckptcore.save(tmp_path / "saved", {"w": np.ones(1000)}, context=context)
        self._expect(observer)

    def test_phases_of_an_operation_run_at_once_and_end_in_any_order(self) -> None:
        """Phases of one name may run at once, too."""
        observer = self.observer()
        recording = Recording("save", "place", (observer,), step=3)
        first, second, third = (recording.phase(name) for name in ("write", "write", "commit"))
        for phase in (first, second, third):
            phase.__enter__()
        self._expect(observer, "save", "write", "write", "commit")
        first.__exit__(None, None, None)
        self._expect(observer, "save", "write", "commit")
        third.__exit__(ValueError, ValueError("failed"), None)
        self._expect(observer, "save", "write")
        recording.finish()
        self._expect(observer, "write")  # phases can end after their operation
        second.__exit__(None, None, None)
        self._expect(observer)

    def test_a_load_in_boxes_runs_while_the_boxes_are_read(self, tmp_path: Path) -> None:
        """And not before: a generator that is never iterated over ends nothing."""
        observer = self.observer()
        ckptcore.save(tmp_path / "saved", {"w": np.ones(1000)})
        with ckptcore.open(tmp_path / "saved", context=ckptcore.Context(observers=(observer,))) as checkpoint:
            checkpoint.iter_boxes()
            boxes = checkpoint.iter_boxes()
            self._expect(observer)
            next(boxes)
            self._expect(observer, "load")
            boxes.close()
            self._expect(observer)

    def test_operations_of_the_same_kind_are_told_apart(self) -> None:
        """By their ids, also if they are at one place."""
        observer = self.observer()
        saves = [Recording("save", "place", (observer,)) for _ in range(3)]
        saves[1].finish()
        self._expect(observer, "save", "save")
        for save in saves:
            save.finish()
        self._expect(observer)

    def test_threads_begin_and_end_phases_at_once(self) -> None:
        """Of their own operations, and of one that they share."""
        observer = self.observer()
        shared = Recording("load", "place", (observer,))

        def work(number: int) -> None:
            own = Recording("save", f"place {number}", (observer,), rank=number)
            for _ in range(_PHASES):
                with own.phase("write"), shared.phase("read"):
                    pass
            own.finish()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._expect(observer, "load")
        shared.finish()
        self._expect(observer)
