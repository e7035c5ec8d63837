"""Budgets of documents. When a number in a checkpoint or request doubles, work and memory grow at most 2.3 times."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed
from ckptcore_view.documents import BadRequestError, CancelledError, Request, document_of
from ckptcore_view.documents.array import _chunks
from ckptcore_view.documents.elements import parse_index
from ckptcore_view.notebook import to_html
from ckptcore_view.report import write_report
from ckptcore_view.shardings import sharding_of
from ckptcore_view.viewed import Viewed
from safetensors.numpy import save_file

import ckptcore
from ckptcore.context import default_context
from ckptcore.model import ArrayRecord, ArraySpec, Box, Chunk

_GROWTH: Final = 2.3
_CALLS: Final = 2_000
"""Function calls that every document needs, even for a tiny checkpoint."""

_BYTES: Final = 256 << 10


def calls_of(call: Callable[[], object]) -> int:
    """Return the number of function calls, including functions in C."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def bytes_of(call: Callable[[], object]) -> int:
    """Return the peak memory of a call."""
    gc.collect()
    tracemalloc.start(1)
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_linear(make: Callable[[int], Callable[[], object]], sizes: tuple[int, int, int]) -> None:
    """Fail if function calls or memory grow faster than the size. `make` returns the function to measure for a size."""
    attempts = [make(size) for size in sizes]
    for attempt in attempts:
        attempt()  # fill caches, whose cost does not depend on the size
    for measure, least in ((calls_of, _CALLS), (bytes_of, _BYTES)):
        costs = [max(measure(attempt), least) for attempt in attempts]
        assert costs[1] <= _GROWTH * costs[0] and costs[2] <= _GROWTH * costs[1], (measure.__name__, costs)


# --- numbers in notes and requests, without a checkpoint


def _shards(notes: Any, shape: tuple[int, ...] = (4,), cuts: Any = None) -> Callable[[], object]:
    record = ArrayRecord(ArraySpec(shape, "float32"), cuts=cuts, notes=notes)
    return lambda: sharding_of(record)


def _named(mesh: Mapping[str, int], spec: Any) -> Any:
    return {"sharding": {"type": "NamedSharding", "mesh": mesh, "spec": spec}}


NOTES: Final[Mapping[str, Callable[[int], Callable[[], object]]]] = {
    "devices": lambda n: _shards(_named({"x": n}, ["x"]), (1 << 20,)),
    "devices of a mesh of two axes": lambda n: _shards(_named({"x": n // 8, "y": 8}, [["x", "y"]]), (1 << 20,)),
    "an axis that is named often": lambda n: _shards(_named({"x": 1024}, [["x"] * n])),
    "axes": lambda n: _shards(
        _named({f"a{number}": 1 for number in range(n)}, [[f"a{number}" for number in range(n)]])
    ),
    "large axes": lambda n: _shards(_named({f"a{number}": 4096 for number in range(n)}, ["a0"])),
    "entries of the spec": lambda n: _shards(_named({"x": 2}, [None] * n)),
    "device ids": lambda n: _shards({"sharding": {**_named({"x": 2}, ["x"])["sharding"], "devices": list(range(n))}}),
    "placements": lambda n: _shards({"dtensor": {"mesh": [1] * n, "placements": [{"kind": "Shard", "dim": 0}] * n}}),
    "ranks of a mesh": lambda n: _shards({"dtensor": {"mesh": [n], "placements": [{"kind": "Shard", "dim": 0}]}}),
    "cuts": lambda n: _shards({}, (1 << 20,), (tuple(range(1, n)),)),
    "a device of many characters": lambda n: _shards({"sharding": {"type": "SingleDeviceSharding", "device": "x" * n}}),
}


@pytest.mark.parametrize("notes", NOTES)
def test_shardings(notes: str) -> None:
    assert_linear(NOTES[notes], (1024, 2048, 4096))


def test_an_axis_that_is_named_many_times_is_refused() -> None:
    """The viewer once worked for minutes on such a root of 13 kB."""
    assert sharding_of(ArrayRecord(ArraySpec((4,), "int8"), notes=_named({"x": 4096}, [["x"] * 3000]))) is None
    assert calls_of(_shards(_named({"x": 4096}, [["x"] * 3000]))) < 20_000


INDICES: Final[Mapping[str, Callable[[int], str]]] = {
    "spaces": lambda n: f"[1{' ' * n}x]",
    "spaces and colons": lambda n: f"[{' ' * n}:{' ' * n}:{' ' * n}x]",
    "tabs in a row": lambda n: "\t \t" * n + "x",
    "digits": lambda n: f"[{'1' * n}]",
    "colons": lambda n: ":" * n,
    "commas": lambda n: "," * n,
    "parts": lambda n: ",".join(["0"] * n),
    "dots": lambda n: ",".join(["..."] * n),
    "brackets": lambda n: "[" * n,
}


@pytest.mark.parametrize("form", INDICES)
def test_indices(form: str) -> None:
    """A regular expression counts as one call, so the parser must refuse long texts and use simple expressions."""

    def parse(text: str) -> None:
        try:
            parse_index(text)
        except BadRequestError as error:
            assert len(str(error)) < 500

    assert_linear(lambda n: lambda: parse(INDICES[form](n)), (10_000, 20_000, 40_000))
    with pytest.raises(BadRequestError):
        parse_index(INDICES[form](1_300) + " " * 4_096)


# --- chunks


class _Grid:
    """An index of chunks with one element each. Counts the chunks that it made."""

    def __init__(self, count: int) -> None:
        self.made = 0
        self._count = count

    def boxes(self, leaf: int, box: Box) -> Any:
        for number in range(self._count):
            self.made += 1
            yield Chunk("c", number, Box((number,), (number + 1,)), True, True, leaf)


def _chunk_document(grid: _Grid, request: Request) -> Any:
    checkpoint = SimpleNamespace(derived=None, index=grid, store=None)
    return _chunks(cast(Any, checkpoint), 0, ArrayRecord(ArraySpec((1 << 40,), "int8")), request)


def test_chunks() -> None:
    assert_linear(lambda n: lambda: _chunk_document(_Grid(n), Request()), (4096, 8192, 16384))
    for count, shown, is_all in ((1 << 16, 1 << 16, True), ((1 << 16) + 1, 1 << 16, False), (1 << 40, 1 << 16, False)):
        grid = _Grid(count)
        document = _chunk_document(grid, Request())
        assert (document["count"], document["is_all"]) == (shown, is_all)
        assert grid.made <= (1 << 16) + 1


def test_listing_chunks_stops_when_the_client_disconnects() -> None:
    grid = _Grid(1 << 40)
    with pytest.raises(CancelledError):
        _chunk_document(grid, Request({}, lambda: grid.made >= 5_000))
    assert grid.made == 5_000


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("run", {}),
        ("tree", {"at": "1"}),
        ("array", {"at": "1", "leaf": "0"}),
        ("statistics", {"at": "1", "leaf": "0"}),
        ("elements", {"at": "1", "leaf": "0"}),
        ("differences", {"at": "1", "other": "2"}),
        ("difference", {"at": "1", "other": "2", "leaf": "0"}),
        ("checkpoint", {"at": "1"}),
    ],
)
def test_no_document_is_made_after_client_disconnects(name: str, parameters: dict[str, str], tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"w": np.ones(4)})
        checkpointer.save(2, {"w": np.zeros(4), "b": 1})
    viewed = Viewed(str(tmp_path / "run"), default_context())
    with pytest.raises(CancelledError):
        document_of(viewed, name, Request(parameters, lambda: True))


# --- numbers in roots


def forged(directory: Path, change: Callable[[Any], None]) -> Path:
    """Save a checkpoint, and change its root. Return the location."""
    ckptcore.save(directory, {"w": np.arange(4.0)})
    root: Any = json.loads((directory / "checkpoint.json").read_bytes())
    change(root)
    (directory / "checkpoint.json").write_bytes(sealed(root))
    return directory


def _set(*path: Any) -> Callable[[Any], Callable[[Any], None]]:
    def to(value: Any) -> Callable[[Any], None]:
        def change(root: Any) -> None:
            for name in path[:-1]:
                root = root[name]
            root[path[-1]] = value

        return change

    return to


def _notes(notes: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        root["tables"]["tree"].update(notes=[notes], note=[0])

    return change


def _nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


def _timeline(events: int) -> Any:
    column = list(range(events))
    return {
        "operation": "save", "step": None, "save_id": None, "began": 0, "phase": ["write"] * events, "rank": column,
        "offset": column, "duration": column, "nbytes": column, "error": ["x" * 20] * events,
    }  # fmt: skip


ROOTS: Final[Mapping[str, tuple[Callable[[int], Callable[[Any], None]], int]]] = {
    "metrics": (lambda n: _set("metrics")({f"m{number}": 0.5 for number in range(n)}), 500),
    "metadata": (lambda n: _set("tables", "custom")({f"m{number}": "x" for number in range(n)}), 500),
    "writer": (lambda n: _set("writer")({f"m{number}": "x" for number in range(n)}), 500),
    "events": (lambda n: _set("timeline")(_timeline(n)), 500),
    "odd events": (lambda n: _set("timeline")({**_timeline(n), "phase": ["Odd"] * n}), 500),
    "notes": (lambda n: _notes({f"n{number}": number for number in range(n)}), 500),
    "depth of a note": (lambda n: _notes({"sharding": _nested(n)}), 50),
    "repeated axes": (lambda n: _notes(_named({"x": 4096}, [["x"] * n])), 500),
    "axes of a mesh": (lambda n: _notes(_named({f"a{number}": 1 for number in range(n)}, [])), 500),
    "cuts": (lambda n: _set("tables", "tree", "extras")({"0": {"cuts": [list(range(n))]}}), 500),
}


def _documents(location: Path) -> Callable[[], object]:
    def make() -> None:
        viewed = Viewed(str(location), default_context())
        for name, parameters in (
            ("view", {}),
            ("checkpoint", {"at": ""}),
            ("tree", {"at": ""}),
            ("array", {"at": "", "leaf": "0"}),
            ("elements", {"at": "", "leaf": "0"}),
            ("differences", {"at": "", "other": ""}),
        ):
            json.dumps(document_of(viewed, name, Request(parameters)), allow_nan=False)
        to_html(ckptcore.metadata(location))

    return make


@pytest.mark.parametrize("number", ROOTS)
def test_numbers_of_a_root(number: str, tmp_path: Path) -> None:
    change, least = ROOTS[number]
    assert_linear(
        lambda n: _documents(forged(tmp_path / str(n), change(n))),
        (least, 2 * least, 4 * least),
    )


# --- numbers of trees and runs


def _deep(depth: int) -> Any:
    tree: Any = {"w": np.ones(2)}
    for number in range(depth):
        tree = {"a": tree, "b": number}
    return tree


STATES: Final[Mapping[str, tuple[Callable[[int], Any], int]]] = {
    "arrays": (lambda n: {f"w{number}": np.ones(1) for number in range(n)}, 200),
    "values": (lambda n: {"w": np.ones(1), **{f"v{number}": number for number in range(n)}}, 200),
    "characters of a value": (lambda n: {"w": np.ones(1), "text": "x" * n}, 20_000),
    "characters of a name": (lambda n: {"w": np.ones(1), "x" * n: 1}, 20_000),
    "dots of a name": (lambda n: {"w": np.ones(1), "a." * n + "b": 1}, 500),
    "groups": (lambda n: {"w": np.ones(1), **{f"a.b{number}.c": 1 for number in range(n)}}, 200),
    "ties": (lambda n: dict.fromkeys([f"w{number}" for number in range(n)], np.ones(1)), 200),
    "axes": (lambda n: {"w": np.ones((1,) * n)}, 16 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 8),
    "depth": (_deep, 40),
}


@pytest.mark.parametrize("number", STATES)
def test_numbers_of_a_tree(number: str, tmp_path: Path) -> None:
    state, least = STATES[number]

    def make(size: int) -> Callable[[], object]:
        ckptcore.save(tmp_path / str(size), state(size))
        return _documents(tmp_path / str(size))

    assert_linear(make, (least, 2 * least, 4 * least))


def test_steps(tmp_path: Path) -> None:
    def make(steps: int) -> Callable[[], object]:
        with ckptcore.Checkpointer(tmp_path / str(steps)) as checkpointer:
            for step in range(steps):
                checkpointer.save(step, {"w": np.ones(1)})
        viewed = Viewed(str(tmp_path / str(steps)), default_context())
        return lambda: document_of(viewed, "run", Request({"last": "999999999999", "policy": "latest_n=1"}))

    assert_linear(make, (5, 10, 20))


def test_rows_of_a_log(tmp_path: Path) -> None:
    def make(rows: int) -> Callable[[], object]:
        step = tmp_path / str(rows) / "checkpoint-1"
        step.mkdir(parents=True)
        save_file({"w": np.ones(1)}, step / "model.safetensors")
        history = [{"step": row, "loss": 1.0, f"m{row}": 1.0} for row in range(rows)]
        (step / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        return lambda: document_of(Viewed(str(step.parent), default_context()), "run", Request())

    assert_linear(make, (2_000, 4_000, 8_000))


@pytest.mark.slow
def test_a_report(tmp_path: Path) -> None:
    def make(arrays: int) -> Callable[[], object]:
        ckptcore.save(tmp_path / str(arrays), {f"w{number}": np.ones(1) for number in range(arrays)})
        return lambda: write_report(tmp_path / "report.html", tmp_path / str(arrays))

    assert_linear(make, (10, 20, 40))
