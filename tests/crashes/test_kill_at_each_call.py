"""``kill -9`` before each system call for storage. Afterwards the old or the new checkpoint exists and is complete."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from ckptcore_tools.copies import CopyReport

import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.names import is_hidden_name
from tests.crashes.saver import NEW, OLD, copied_from, exported
from tests.crashes.states import LARGE, SMALL, make_composite, make_state, version_at
from tests.crashes.tracing import KillPoint, Saver, needs_strace

_NEXT: Final = 3
"""The state that is saved after the crash."""

_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))
_SAMPLE: Final = 12


def _nothing(location: Path) -> None:
    """Create no checkpoint, and no directory."""


def _old(location: Path, elements: int = SMALL) -> None:
    ckptcore.save(location, make_state(OLD, elements), context=_FAST)


def _large_old(location: Path) -> None:
    _old(location, LARGE)


def _old_and_export(location: Path) -> None:
    _old(location)
    _old(Path(exported(str(location))))


def _old_and_source(location: Path) -> None:
    _old(location)
    ckptcore.save(copied_from(str(location)), make_state(NEW), context=_FAST)


def _old_and_composite_source(location: Path) -> None:
    _old(location)
    ckptcore.save_checkpointables(copied_from(str(location)), make_composite(NEW), context=_FAST)


def _large_source(location: Path) -> None:
    layout = SafetensorsLayout(max_file_bytes=LARGE)
    ckptcore.save(copied_from(str(location)), make_state(NEW, LARGE), layout=layout, context=_FAST)


def _old_composite(location: Path) -> None:
    ckptcore.save_checkpointables(location, make_composite(OLD), context=_FAST)


def _old_database(location: Path) -> None:
    ckptcore.save(location, make_state(OLD), layout="ocdbt", context=_FAST)


def _old_and_leftovers(location: Path) -> None:
    """Save a checkpoint, and the remains of saves that failed early and late."""
    _old(location)
    for number, save_id in enumerate(("0123456789abcdef", "fedcba9876543210")):
        hidden = location.parent / f".{location.name}.{save_id}.ckptcore"
        hidden.mkdir()
        if number:
            (hidden / "model.safetensors").write_bytes(b"unfinished")


@dataclass(frozen=True)
class Scenario:
    """A task to kill, and the states that may exist afterwards.

    Attributes:
        task: the name of the task in `tests.crashes.saver`.
        prepare: creates the initial state.
        allowed: the allowed states afterwards; None for no checkpoint.
        reached: minimum fraction of the system calls at which the task must have been killed. It is below 1 for tasks
            with threads, because the order of their calls varies.
    """

    task: str
    prepare: Callable[[Path], None]
    allowed: frozenset[int | None] = frozenset({OLD, NEW})
    reached: float = 1.0


SCENARIOS: Final = {
    "first save": Scenario("save-new", _nothing, frozenset({None, NEW})),
    "first save of several files": Scenario("save-several-files", _nothing, frozenset({None, NEW})),
    "first save, large": Scenario("save-large", _nothing, frozenset({None, NEW})),
    "overwrite": Scenario("save", _old),
    "overwrite without durability": Scenario("save-without-durability", _old),
    "overwrite with several files": Scenario("save-several-files", _old),
    "overwrite, large": Scenario("save-large", _large_old),
    "overwrite, large, by several threads": Scenario("save-with-threads", _large_old, reached=0.7),
    "overwrite in the background": Scenario("save-in-background", _old),
    "overwrite in bounded memory": Scenario("save-in-bounded-memory", _old),
    "overwrite with its export, in the background": Scenario("save-with-export", _old_and_export),
    "overwrite, allowed not to be atomic": Scenario("save-non-atomic", _old),
    "overwrite beside other files": Scenario("save-beside-others", _old),
    "overwrite by a database": Scenario("save-ocdbt", _old),
    "overwrite a database by a database": Scenario("save-ocdbt", _old_database),
    "overwrite many files in directories by one": Scenario("save", _old_database),
    "overwrite by a compressed database, by several threads": Scenario("save-ocdbt-compressed", _old, reached=0.7),
    "overwrite by many objects, by several threads": Scenario("save-zarr3", _old, reached=0.7),
    "overwrite a composite by databases": Scenario("save-composite-ocdbt", _old_composite),
    "overwrite where saves died before": Scenario("save", _old_and_leftovers),
    "convert over a checkpoint": Scenario("convert", _old),
    "copy over a checkpoint": Scenario("copy", _old_and_source),
    "copy a composite over a checkpoint": Scenario("copy", _old_and_composite_source),
    "copy, large, by several threads": Scenario(
        "copy-with-threads", _large_source, frozenset({None, NEW}), reached=0.7
    ),
    "delete": Scenario("delete", _old, frozenset({OLD, None})),
    "first save of a composite": Scenario("save-composite", _nothing, frozenset({None, NEW})),
    "overwrite a composite": Scenario("save-composite", _old_composite),
    "overwrite a composite by a tree": Scenario("save", _old_composite),
    "overwrite a tree by a composite, in the background": Scenario("save-composite-in-background", _old, reached=0.7),
    "convert a composite": Scenario("convert-composite", _old_composite),
    "delete a composite": Scenario("delete", _old_composite, frozenset({OLD, None})),
}


def _try(scenario: Scenario, point: KillPoint, warm: Saver, directory: Path) -> bool:
    """Kill the task of a scenario at a point and check the result. Return True if the point was reached."""
    location = directory / "run" / "step_1"
    scenario.prepare(location)
    status = warm.killed(scenario.task, str(location), point)
    assert status in (0, -signal.SIGKILL), f"the task ended with {status}"
    version = version_at(str(location))
    assert version in scenario.allowed, f"found {version}"
    if status == 0:
        assert version in (NEW, None), "a task that ended is not done"
    export = Path(exported(str(location)))
    if export.parent.exists():
        exported_version = version_at(str(export))
        assert exported_version in ((OLD, NEW) if version == NEW else (OLD,)), (
            f"found {exported_version} exported of {version}"
        )
        assert status or exported_version == NEW, "a task that ended has not exported"
    siblings = list(location.parent.iterdir()) if location.parent.exists() else []
    for sibling in siblings:
        assert sibling == location or is_hidden_name(sibling.name), f"{sibling} would be listed"
    ckptcore.save(location, make_state(_NEXT), overwrite=True, context=_FAST)
    assert version_at(str(location)) == _NEXT
    assert [path.name for path in location.parent.iterdir()] == [location.name], "leftovers"
    assert sorted(path.name for path in location.iterdir()) == ["checkpoint.json", "model.safetensors"]
    return status != 0


def _points(scenario: Scenario, warm: Saver, directory: Path) -> list[KillPoint]:
    needs_strace()
    location = directory / "traced" / "run" / "step_1"
    scenario.prepare(location)
    points = list(warm.kill_points(scenario.task, str(location), directory / "trace"))
    assert len(points) > 5, f"hardly any system call was traced: {points}"
    return points


@pytest.mark.parametrize(
    "name",
    [
        "first save",
        "overwrite",
        "overwrite beside other files",
        "first save of a composite",
        "overwrite a composite",
        "overwrite by a database",
    ],
)
def test_a_sample_of_kills(name: str, warm: Saver, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    points = _points(scenario, warm, tmp_path)
    for number, point in enumerate(points[:: max(1, len(points) // _SAMPLE)]):
        assert _try(scenario, point, warm, tmp_path / str(number)), f"{point} was not reached"


def _go_on(scenario: Scenario, point: KillPoint, warm: Saver, directory: Path) -> CopyReport:
    """Kill a copy at a point, check the result, and copy again."""
    location = directory / "run" / "step_1"
    scenario.prepare(location)
    assert warm.killed(scenario.task, str(location), point) in (0, -signal.SIGKILL)
    assert version_at(str(location)) in scenario.allowed
    report = ckptcore.copy(copied_from(str(location)), location)
    assert report.kept_bytes + report.sent_bytes == report.nbytes
    assert version_at(str(location)) == NEW
    assert [path.name for path in location.parent.iterdir()] == [location.name], "leftovers"
    return report


def test_a_killed_copy_is_resumed(warm: Saver, tmp_path: Path) -> None:
    scenario = SCENARIOS["copy, large, by several threads"]
    points = _points(scenario, warm, tmp_path)
    step = max(1, len(points) // _SAMPLE)
    others = [point for number, point in enumerate(points) if number % step]
    partial = 0
    # The progress of the threads at a call differs between runs, so try until a kill was between two objects.
    for number, point in enumerate([*points[::step], *others]):
        if number >= len(points[::step]) and partial:
            break
        report = _go_on(scenario, point, warm, tmp_path / str(number))
        partial += 0 < report.kept_bytes < report.nbytes
    assert partial, "no copy was killed between two objects"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_every_call(
    name: str, full: bool, warm: Saver, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    scenario = SCENARIOS[name]
    points = _points(scenario, warm, tmp_path)[:: 1 if full else 5]
    killed = 0
    for number, point in enumerate(points):
        try:
            killed += _try(scenario, point, warm, tmp_path / str(number))
        except Exception as error:
            error.add_note(f"killed at {point}, {number + 1} of {len(points)}")
            raise
    record_property("kill points", len(points))
    assert killed >= scenario.reached * len(points), f"only {killed} of {len(points)} points were reached"


def test_a_save_that_deletes_first_is_detected(warm: Saver, tmp_path: Path) -> None:
    scenario = Scenario("delete-and-save", _old)
    points = _points(scenario, warm, tmp_path)
    with pytest.raises(AssertionError, match="found None"):
        for number, point in enumerate(points[len(points) // 2 :]):
            _try(scenario, point, warm, tmp_path / str(number))
