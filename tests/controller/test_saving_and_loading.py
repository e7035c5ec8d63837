"""A controller saves and loads arrays of its workers. It receives no elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_transforms import Cast, Fuse, Scale, Transform, Transpose

import ckptcore
from ckptcore.errors import TransformError
from ckptcore.events import Event
from ckptcore.model import ArraySpec, Box
from tests.controller.arrays import COLUMNS, ROWS, SPEC, WHOLE, digests_of, make_rows, make_whole
from tests.controller.elements import counted
from tests.controller.remote_arrays import RemoteArray
from tests.controller.worker_processes import WorkerProcesses

LAYOUTS = ("safetensors", "ocdbt", "zarr3", "dcp")
MOST_BYTES = 16_384
"""More than any message needs, and less than a fifteenth of an array."""


def state_of(workers: WorkerProcesses) -> dict[str, Any]:
    return {"rows": make_rows(workers), "whole": make_whole(workers), "here": np.arange(5), "step": 3}


def assert_saved(location: Path) -> None:
    """Assert that a program without workers loads the elements of all workers."""
    loaded = ckptcore.load(location)
    expected = counted(SPEC, Box.whole(SPEC.shape))
    np.testing.assert_array_equal(loaded["rows"], expected)
    np.testing.assert_array_equal(loaded["whole"], expected)
    np.testing.assert_array_equal(loaded["here"], np.arange(5))
    assert loaded["step"] == 3


def crossings(workers: WorkerProcesses, work: Callable[[], object]) -> list[str]:
    """Return the requests to workers during a call. Assert that each of them is small."""
    before = len(workers.crossings)
    work()
    made = workers.crossings[before:]
    assert all(crossing.sent + crossing.received < MOST_BYTES for crossing in made), made
    return sorted(f"{crossing.request} {crossing.worker}" for crossing in made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_load_onto_the_requested_workers(
    layout: str, workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    state = state_of(workers)
    asked = crossings(workers, lambda: ckptcore.save(tmp_path / "it", state, layout=layout, context=context))
    assert asked == ["drop 0", "drop 1", "hold 0", "hold 1", "write 0", "write 1"]
    assert_saved(tmp_path / "it")
    assert ckptcore.verify(tmp_path / "it").ok
    of_state: list[Any] = []
    assert crossings(workers, lambda: of_state.append(ckptcore.abstract(state, context=context))) == []
    assert of_state[0]["rows"] == RemoteArray(SPEC, state["rows"].boxes)

    loaded: dict[str, Any] = {}
    abstract = {
        "rows": RemoteArray(SPEC, COLUMNS),
        "whole": RemoteArray(SPEC, ROWS),
        "here": np.zeros(5, int),
        "step": 0,
    }
    asked = crossings(workers, lambda: loaded.update(ckptcore.load(tmp_path / "it", abstract, context=context)))
    assert asked == ["read 0", "read 1"]
    assert workers.digests(loaded["rows"]) == digests_of(COLUMNS)
    assert workers.digests(loaded["whole"]) == digests_of(ROWS)
    np.testing.assert_array_equal(loaded["here"], np.arange(5))


def test_workers_apply_transforms(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    expected = counted(SPEC, Box.whole(SPEC.shape))
    ckptcore.save(tmp_path / "it", {"a": expected[:40], "b": expected[40:].T.copy()}, context=context)
    transforms: list[Transform] = [Transpose("b"), Fuse(["a", "b"], "w", sizes=[40, 24]), Cast("w", "float64")]
    spec = ArraySpec(SPEC.shape, "float64")
    loaded: dict[str, Any] = {}
    abstract = {"w": RemoteArray(spec, COLUMNS)}

    def load() -> None:
        loaded.update(ckptcore.load(tmp_path / "it", abstract, transforms=transforms, context=context))

    assert crossings(workers, load) == ["read 0", "read 1"]
    ckptcore.save(tmp_path / "made", loaded, context=context)
    np.testing.assert_array_equal(ckptcore.load(tmp_path / "made")["w"], expected.astype(np.float64))


@pytest.mark.parametrize("chain", [(), (Transpose("w"), Scale("w", 2.0))])
def test_workers_cast_and_pad_according_to_matching(
    chain: tuple[Transform, ...], workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    stored = (counted(SPEC, Box.whole(SPEC.shape)) % 251).astype(np.float32)
    expected = stored if not chain else stored * 2
    ckptcore.save(tmp_path / "it", {"w": stored.T.copy() if chain else stored}, context=context)
    held = ROWS[0], (Box((32, 0), (72, 1024)),)
    asked = {"w": RemoteArray(ArraySpec((72, 1024), "bfloat16"), held)}
    matching = ckptcore.Matching(cast="narrowing", shapes={"pad"}, pad_value=-1)
    loaded: dict[str, Any] = {}

    def load() -> None:
        arrays = ckptcore.load(tmp_path / "it", asked, transforms=chain, matching=matching, context=context)
        loaded.update(arrays)

    assert crossings(workers, load) == ["read 0", "read 1"]
    ckptcore.save(tmp_path / "made", loaded, context=context)
    padded = np.pad(expected, ((0, 8), (0, 0)), constant_values=-1).astype(ml_dtypes.bfloat16)
    assert ckptcore.load(tmp_path / "made")["w"].tobytes() == padded.tobytes()


def test_a_worker_reports_values_that_a_dtype_cannot_hold(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    stored = counted(SPEC, Box.whole(SPEC.shape)).astype(np.float32) % 60000
    ckptcore.save(tmp_path / "it", {"w": stored}, context=context)
    asked = {"w": RemoteArray(ArraySpec(SPEC.shape, "float16"), ROWS)}
    ckptcore.load(tmp_path / "it", asked, matching=ckptcore.Matching(cast="narrowing"), context=context)
    stored[-1, -1] = 1e6
    ckptcore.save(tmp_path / "it", {"w": stored}, overwrite=True, context=context)
    with pytest.raises(TransformError, match=r"w could not be computed from .*1000000.0 is out of range for float16"):
        ckptcore.load(tmp_path / "it", asked, matching=ckptcore.Matching(cast="narrowing"), context=context)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_after_an_asynchronous_save_are_not_saved(
    layout: str, workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    state = state_of(workers)
    handle = ckptcore.save_async(tmp_path / "it", state, layout=layout, context=context)
    workers.change(state["rows"])
    workers.change(state["whole"])
    state["here"][:] = 0
    handle.result()
    assert_saved(tmp_path / "it")
    assert handle.progress.done == handle.progress.total >= 2 * SPEC.nbytes


def test_shards_are_written_by_the_workers_that_hold_them(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "it", {"rows": make_rows(workers)}, context=context)
    files = sorted(path.name for path in (tmp_path / "it").iterdir())
    assert [name for name in files if "00001-model" in name] == []  # rank 0, the controller, writes no arrays
    assert len([name for name in files if name.endswith(".safetensors")]) == 2


def test_progress_of_workers_is_planned_once(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    totals: set[int] = set()
    state = state_of(workers)
    ckptcore.save(tmp_path / "it", state, context=context, progress=lambda done, total: totals.add(total))
    assert len(totals) == 1 and totals.pop() >= 2 * SPEC.nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_phase_covers_the_writes_of_all_workers(
    layout: str, workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    events: list[Event] = []
    context = replace(context, observers=(events.append,))
    export = ckptcore.Export(location=tmp_path / "export", subtree="rows", layout=layout)
    strategy = ckptcore.WithExports([export])
    ckptcore.save(tmp_path / "it", state_of(workers), layout=layout, context=context, strategy=strategy)
    written = [event.nbytes or 0 for event in events if event.phase == "write"]
    assert len(written) == 2 and written[0] >= 2 * SPEC.nbytes and written[1] >= SPEC.nbytes


def test_workers_share_writes_of_replicas(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "it", {"whole": make_whole(workers)}, layout="ocdbt", context=context)
    root = ckptcore.metadata(tmp_path / "it")
    assert root.layout == "ocdbt"
    sizes = [path.stat().st_size for path in (tmp_path / "it").rglob("d/*")]
    large = [size for size in sizes if size > SPEC.nbytes // 4]
    assert len(large) == 2
    assert abs(large[0] - large[1]) < SPEC.nbytes // 10


def test_tied_arrays_are_stored_once(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    rows = make_rows(workers)
    ckptcore.save(tmp_path / "it", {"a": rows, "b": rows}, context=context)
    stored = sum(path.stat().st_size for path in (tmp_path / "it").glob("*.safetensors"))
    assert SPEC.nbytes <= stored < 2 * SPEC.nbytes
    wanted = RemoteArray(SPEC, ROWS)
    loaded = ckptcore.load(tmp_path / "it", {"a": wanted, "b": wanted}, context=context)
    assert loaded["a"] is loaded["b"]
    assert workers.digests(loaded["a"]) == digests_of(ROWS)


def test_a_target_gets_new_arrays(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    state = state_of(workers)
    ckptcore.save(tmp_path / "it", state, context=context)
    old = dict(state)
    state["here"] = np.zeros(5, int)
    assert ckptcore.load_into(tmp_path / "it", state, context=context) is state
    assert state["rows"] != old["rows"]
    assert workers.digests(state["rows"]) == digests_of(ROWS)


def test_several_checkpointables_are_saved_and_loaded(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    named = {
        "model": {"rows": make_rows(workers)},
        "own": ckptcore.PerProcess({"whole": make_whole(workers)}),
        "here": {"numbers": np.arange(3)},
    }
    ckptcore.save_checkpointables(tmp_path / "it", named, context=context)
    wanted = {
        "model": {"rows": RemoteArray(SPEC, WHOLE)},
        "own": ckptcore.PerProcess({"whole": RemoteArray(SPEC, ROWS)}),
        "here": None,
    }
    loaded = ckptcore.load_checkpointables(tmp_path / "it", wanted, context=context)
    assert workers.digests(loaded["model"]["rows"]) == digests_of(WHOLE)
    assert workers.digests(loaded["own"]["whole"]) == digests_of(ROWS)
    np.testing.assert_array_equal(loaded["here"]["numbers"], np.arange(3))


def test_exports_use_the_same_snapshot(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    state = {"model": state_of(workers), "other": make_rows(workers)}
    export = ckptcore.Export(location=tmp_path / "export", subtree="model", layout="dcp")

    def save() -> None:
        handle = ckptcore.save_async(
            tmp_path / "it", state, layout="ocdbt", strategy=ckptcore.WithExports([export]), context=context
        )
        handle.result()

    asked = crossings(workers, save)
    assert asked == ["drop 0", "drop 1", "hold 0", "hold 1", "write 0", "write 0", "write 1", "write 1"]
    assert_saved(tmp_path / "export")


def test_an_export_of_controller_values_uses_no_worker(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    named = {"model": {"rows": make_rows(workers)}, "here": {"numbers": np.arange(3)}}
    export = ckptcore.Export(location=tmp_path / "export", subtree="here")
    asked = crossings(
        workers,
        lambda: ckptcore.save_checkpointables(
            tmp_path / "it", named, strategy=ckptcore.WithExports([export]), context=context
        ),
    )
    assert asked == ["drop 0", "drop 1", "hold 0", "hold 1", "write 0", "write 1"]
    np.testing.assert_array_equal(ckptcore.load(tmp_path / "export")["numbers"], np.arange(3))


def test_a_memory_limit_divides_the_load(workers: WorkerProcesses, tmp_path: Path, context: ckptcore.Context) -> None:
    state = state_of(workers)
    ckptcore.save(tmp_path / "it", state, context=context)
    bounded = ckptcore.Context(
        job=ckptcore.context.JobOptions(executor=workers),
        plugins=ckptcore.context.PluginOptions(handlers=context.plugins.handlers),
        memory=ckptcore.context.MemoryOptions(load_bytes=SPEC.nbytes),
    )
    asked = crossings(workers, lambda: ckptcore.load(tmp_path / "it", state, context=bounded))
    assert asked == ["read 0", "read 0", "read 1", "read 1"]


def test_a_memory_limit_of_copies_applies_to_the_controller(
    workers: WorkerProcesses, tmp_path: Path, context: ckptcore.Context
) -> None:
    bounded = ckptcore.Context(
        job=ckptcore.context.JobOptions(executor=workers),
        plugins=ckptcore.context.PluginOptions(handlers=context.plugins.handlers),
        memory=ckptcore.context.MemoryOptions(save_bytes=1000),
    )
    ckptcore.save_async(tmp_path / "it", state_of(workers), context=bounded).result()
    assert_saved(tmp_path / "it")


def test_steps_are_saved_and_restored(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    state = state_of(workers)
    with ckptcore.Checkpointer(tmp_path, context=context) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
        checkpointer.wait()
        loaded = checkpointer.load(abstract=state)
    assert workers.digests(loaded["rows"]) == digests_of(ROWS)
