"""Roots with invalid values in fields that no array needs. No operation refuses such a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed
from ckptcore_tools.cli.application import application
from ckptcore_view.documents import Request, document_of
from ckptcore_view.notebook import to_html
from ckptcore_view.report import write_report
from ckptcore_view.viewed import Viewed
from click.testing import CliRunner

import ckptcore
from ckptcore.context import default_context
from ckptcore.events import readable_events
from ckptcore.policies import BestN, LatestDuration

ODD: Final[list[Any]] = [None, True, -1, 1 << 80, 1e308, "odd \x1b[2J", [], {}, [[]], {"odd": [1]}]


def _odd(root: Any) -> Mapping[str, Callable[[Any], None]]:
    """Return, by path, functions that set an optional value of a root."""

    def at(*path: Any) -> Callable[[Any], None]:
        def put(value: Any) -> None:
            holder = root
            for name in path[:-1]:
                holder = holder[name]
            holder[path[-1]] = value

        return put

    timeline = [("timeline", name) for name in root["timeline"]]
    rows = [("timeline", name, 0) for name in ("phase", "rank", "offset", "duration", "nbytes", "error")]
    writer = [("writer",), ("writer", "ckptcore"), ("created",), ("order",)]
    numbers = [("metrics",), ("metrics", "loss"), ("progress",), ("progress", "epoch"), ("timeline",)]
    tree = [("tables", "tree", "extras", "0"), ("tables", "tree", "extras", "0", "cuts")]
    notes = [("tables", "tree", "notes", 0, "sharding"), ("tables", "tree", "notes", 0, "dtensor")]
    mesh = [("tables", "tree", "notes", 0, "sharding", name) for name in ("type", "mesh", "spec", "devices")]
    places = [*timeline, *rows, *writer, *numbers, *notes, *mesh, tree[1]]
    return {".".join(map(str, place)): at(*place) for place in places}


_SHARDING: Final = {"type": "NamedSharding", "mesh": {"x": 2}, "spec": ["x"], "devices": [0, 1]}


class _Run:
    """A run of one step whose root a test can forge."""

    def __init__(self, directory: Path) -> None:
        self.location = directory / "run"
        self.state = {"w": np.arange(4.0), "step": 3}
        with ckptcore.Checkpointer(self.location) as checkpointer:
            checkpointer.save(1, self.state, metrics={"loss": 0.5}, epoch=2)
        self.step = self.location / "1"
        self.root: Any = json.loads((self.step / "checkpoint.json").read_bytes())
        assert self.root["progress"]
        del self.root["checksum"]
        tree = self.root["tables"]["tree"]
        tree["extras"] = {"0": {"cuts": [[2]]}}
        tree["notes"], tree["note"] = [{"sharding": _SHARDING}], [0]

    def forge(self, root: Any) -> None:
        """Write a root with a correct checksum."""
        (self.step / "checkpoint.json").write_bytes(sealed(root))

    def assert_readable(self) -> None:
        """Fail if an operation refuses the checkpoint."""
        assert ckptcore.load(self.step)["w"].tolist() == [0, 1, 2, 3]
        for framework in ("numpy", "jax", "torch"):
            assert np.asarray(ckptcore.load(self.step, framework=framework)["w"]).tolist() == [0, 1, 2, 3]
        with ckptcore.open(self.step) as checkpoint:
            assert checkpoint["w"][0] == 0
            to_html(checkpoint)
        assert ckptcore.metadata(self.step).tree.paths
        assert ckptcore.verify(self.step).ok
        with ckptcore.CheckpointReader(self.location) as reader:
            assert list(reader.steps) == [1]
            assert reader.load()["step"] == 3
        for arguments in (
            ["inspect", self.step],
            ["inspect", self.step, "--timeline"],
            ["verify", self.step],
            ["steps", self.location],
            ["ls", self.location],
            ["diff", self.step, self.step],
            ["gc", self.location, "--policy", "latest_n=1", "--dry-run"],
        ):
            for form in ([], ["--json"]):
                result = CliRunner().invoke(application, [*map(str, arguments), *form])
                assert result.exit_code == 0, (arguments, result.output)
                assert "\x1b" not in result.output
        viewed = Viewed(str(self.location), default_context())
        for name, parameters in (
            ("run", {"policy": "latest_n=1"}),
            ("checkpoint", {"at": "1"}),
            ("tree", {"at": "1"}),
            ("array", {"at": "1", "leaf": "0"}),
            ("statistics", {"at": "1", "leaf": "0"}),
            ("elements", {"at": "1", "leaf": "0"}),
            ("differences", {"at": "1", "other": "1"}),
        ):
            json.dumps(document_of(viewed, name, Request(parameters)), allow_nan=False)


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    """Return a run of one step."""
    return _Run(tmp_path)


PLACES: Final = [
    "timeline.phase",
    "timeline.phase.0",
    "metrics.loss",
    "created",
    "writer",
    "tables.tree.notes.0.sharding",
]


@pytest.mark.slow
def test_an_invalid_value_in_each_optional_field_is_ignored(run: _Run) -> None:
    for number, place in enumerate(_odd(run.root)):
        root = copy.deepcopy(run.root)
        _odd(root)[place](ODD[number % len(ODD)])
        run.forge(root)
        run.assert_readable()


@pytest.mark.parametrize("place", PLACES)
def test_each_invalid_value_of_an_optional_field_is_ignored(place: str, run: _Run) -> None:
    for value in ODD:
        root = copy.deepcopy(run.root)
        _odd(root)[place](value)
        run.forge(root)
        assert ckptcore.load(run.step)["step"] == 3
        ckptcore.metadata(run.step)
        viewed = Viewed(str(run.step), default_context())
        for name in ("checkpoint", "array"):
            json.dumps(document_of(viewed, name, Request({"at": "", "leaf": "0"})), allow_nan=False)


def test_a_report_ignores_invalid_optional_values(run: _Run, tmp_path: Path) -> None:
    root = copy.deepcopy(run.root)
    root["timeline"]["phase"][0] = "Odd!"
    root["metrics"] = {"loss": [1], "accuracy": 0.5}
    run.forge(root)
    write_report(tmp_path / "report.html", run.location)
    assert ckptcore.metadata(run.step).metrics == {"accuracy": 0.5}


def test_valid_events_of_a_timeline_are_shown_next_to_invalid_ones(run: _Run) -> None:
    root = copy.deepcopy(run.root)
    expected = len(root["timeline"]["phase"]) - 2
    root["timeline"]["phase"][0] = "Odd!"
    root["timeline"]["duration"][1] = -1
    run.forge(root)
    assert len(ckptcore.metadata(run.step).timeline) == expected
    assert readable_events({**root["timeline"], "operation": "of the future"}) == ()
    assert len(readable_events({**root["timeline"], "phase": root["timeline"]["phase"][:3]})) == 1


class _LongText(str):
    """A text that fails if its representation is made, because it may be long and in every row."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise AssertionError("the representation of a long text was made")


class _Timeline(dict[str, Any]):
    """A timeline that counts lookups."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)


def test_invalid_rows_of_a_timeline_need_few_lookups(run: _Run) -> None:
    """A root of 400 kB took 5 seconds, because the long save id was checked again for each row."""
    long = _LongText("x" * 1000)
    odd = {**run.root["timeline"], **{name: [value] * 100 for name, value in (
        ("phase", long), ("rank", 0), ("offset", 0), ("duration", 0), ("nbytes", long), ("error", long),
    )}}  # fmt: skip
    for changed in ({}, {"save_id": long}, {"operation": long}, {"step": long}, {"began": long}):
        timeline = _Timeline({**odd, **changed})
        assert readable_events(timeline) == ()
        assert timeline.looks < 30


def test_no_step_is_deleted_because_of_an_invalid_optional_value(run: _Run) -> None:
    root = copy.deepcopy(run.root)
    root["created"], root["metrics"] = "long ago", {"loss": "low"}
    run.forge(root)
    for first, policy in ((2, BestN(0, "loss", "min")), (4, LatestDuration(0.001))):
        with ckptcore.Checkpointer(run.location, preservation_policy=policy) as checkpointer:
            checkpointer.save(first, run.state)
            checkpointer.save(first + 1, run.state)
    assert run.step.exists()
