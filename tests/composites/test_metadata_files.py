"""Metadata files, which layouts add for other software before a checkpoint is committed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import CrashAt, FailAt, FaultPlan, SimulatedCrash, ThreadJob
from ckptcore_testing.locations import faulty_context, through

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, PluginError, StorageError
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.model import HostArray
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import CheckpointInfo, Coordinator, StorageOptions, WriteStore
from tests.composites.foreign_format import MARK, ShelfLayout, ShelfPlugin
from tests.composites.objects import Counter, Files

ARRAYS: dict[str, HostArray] = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.arange(4.0)}


class RecordingLayout(ShelfLayout):
    """A layout that records its arguments, and can fail."""

    def __init__(self, *keys: str, error: Exception | None = None) -> None:
        self.keys = keys
        self.error = error
        self.about: list[CheckpointInfo] = []
        self.names: list[str] = []

    def write(self, snapshot: Any, store: WriteStore) -> Any:
        """Record the name."""
        self.names.append(snapshot.plan.name)
        return super().write(snapshot, store)

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the metadata files that the test requests."""
        self.about.append(info)
        for key in self.keys:
            store.put(key, b"mark")
        if self.error is not None:
            raise self.error
        super().write_metadata_files(info, store)


def keys(place: str) -> list[str]:
    """Return the keys of all objects below a location."""
    scheme = "memory" if "://" in place else "file"
    return sorted(installed_plugins().storage(scheme)(place, StorageOptions()).list())


def mark(place: str) -> Any:
    scheme = "memory" if "://" in place else "file"
    return json.loads(installed_plugins().storage(scheme)(place, StorageOptions()).get(MARK))


def test_metadata_files_of_a_tree_are_its_objects(place: str, context: ckptcore.Context) -> None:
    layout = RecordingLayout()
    ckptcore.save(place + "/c", ARRAYS, layout=layout, metadata={"run": 1}, context=context)
    metadata = ckptcore.metadata(place + "/c", context=context)
    assert layout.about == [CheckpointInfo(str(metadata.created), {"run": 1}, {}, {})] and layout.names == [""]
    assert {f"{key}" for key in keys(place + "/c")} == {*metadata.objects, "checkpoint.json"}
    assert MARK in metadata.objects and "tree/index.shelf" in metadata.objects
    assert ckptcore.verify(place + "/c", context=context).ok


def test_damage_to_a_metadata_file_is_found(tmp_path: Path, context: ckptcore.Context) -> None:
    ckptcore.save(tmp_path / "c", ARRAYS, layout="shelf", context=context)
    (tmp_path / "c" / MARK).write_bytes(b"?" * (tmp_path / "c" / MARK).stat().st_size)
    assert [problem.key for problem in ckptcore.verify(tmp_path / "c", context=context).problems] == [MARK]
    assert ckptcore.load(tmp_path / "c", context=context)["bias"].tolist() == [0, 1, 2, 3]
    (tmp_path / "c" / MARK).unlink()
    assert not has_expected_sizes(tmp_path / "c", context)


def test_several_checkpointables_have_one_set_of_metadata_files(place: str, context: ckptcore.Context) -> None:
    layout = RecordingLayout()
    state = {"params": ARRAYS, "ema": ARRAYS, "data": Counter(3), "words": Files({"a": b"b"})}
    ckptcore.save_checkpointables(place + "/c", state, layout=layout, metadata={"run": 1}, context=context)
    created = ckptcore.metadata(place + "/c", context=context).created
    members = {"params": "tree", "ema": "tree", "data": "tree", "words": "files"}
    assert [about._asdict() for about in layout.about] == [
        {"created": created, "custom": {"run": 1}, "metrics": {}, "members": members}
    ]
    assert layout.names == ["params", "ema", "data"]
    assert {key for key in keys(place + "/c") if "/" not in key} == {MARK, "checkpoint.json"}
    assert list(mark(place + "/c")["members"]) == ["params", "ema", "data", "words"]
    loaded = ckptcore.load_checkpointables(place + "/c", context=context)
    assert list(loaded) == list(members) and loaded["words"] == {"a": b"b"} and loaded["data"]["position"] == 3
    assert ckptcore.verify(place + "/c", context=context).ok and has_expected_sizes(place + "/c", context)


def test_the_layout_gets_the_metrics_of_a_step(tmp_path: Path, context: ckptcore.Context) -> None:
    with ckptcore.Checkpointer(tmp_path / "run", layout="shelf", context=context) as checkpointer:
        checkpointer.save(1, ARRAYS, metrics={"loss": 0.5})
        checkpointer.save_checkpointables(2, {"params": ARRAYS}, metrics={"loss": float("nan")})
    assert mark(str(tmp_path / "run" / "1"))["metrics"] == {"loss": "0.5"}
    assert mark(str(tmp_path / "run" / "2"))["metrics"] == {"loss": "nan"}


def test_the_requested_layout_writes_its_metadata_files_without_a_tree(place: str, context: ckptcore.Context) -> None:
    layout = RecordingLayout()
    ckptcore.save_checkpointables(place + "/c", {"words": Files({"a": b"b"})}, layout=layout, context=context)
    (about,) = layout.about
    assert about.members == {"words": "files"} and MARK in keys(place + "/c")


def test_the_layout_gets_the_directories_of_process_states(tmp_path: Path) -> None:
    location = f"memory://{tmp_path.name}/step"
    layout = RecordingLayout()

    def save(coordinator: Coordinator) -> None:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            plugins=ckptcore.context.PluginOptions(extra=(ShelfPlugin(),)),
        )
        values = {"params": ARRAYS, "data": Counter(coordinator.rank), "words": Files({"a": b"b"})}
        ckptcore.save_checkpointables(location, values, layout=layout, context=context)

    ThreadJob(2).run(save)
    (about,) = layout.about
    assert about.members == {
        "params": "tree", "data.rank_0": "tree", "data.rank_1": "tree", "words.rank_0": "files", "words.rank_1": "files"
    }  # fmt: skip
    assert sorted(layout.names) == ["data", "data", "params", "params"]


def test_the_other_software_reads_the_checkpoint(tmp_path: Path, context: ckptcore.Context) -> None:
    """Without our roots, the checkpoint is one of the other software."""
    ckptcore.save(tmp_path / "one", ARRAYS, layout="shelf", metadata={"run": 1}, context=context)
    ckptcore.save_checkpointables(tmp_path / "c", {"params": ARRAYS, "ema": ARRAYS}, layout="shelf", context=context)
    for root in list(tmp_path.rglob("checkpoint.*")):
        root.unlink()
    assert ckptcore.load(tmp_path / "one", context=context)["bias"].tolist() == [0, 1, 2, 3]
    assert ckptcore.metadata(tmp_path / "one", context=context).custom == {"run": 1}
    assert list(ckptcore.load_checkpointables(tmp_path / "one", context=context)) == ["tree"]
    loaded = ckptcore.load_checkpointables(tmp_path / "c", context=context)
    assert list(loaded) == ["ema", "params"] and loaded["ema"]["bias"].tolist() == [0, 1, 2, 3]


# --- metadata files do not affect saves


def test_metadata_files_are_deleted_replaced_and_converted(place: str, context: ckptcore.Context) -> None:
    location = place + "/c"
    state = {"params": ARRAYS, "data": Counter(3)}
    ckptcore.save_checkpointables(location, state, layout="shelf", context=context)
    ckptcore.delete(location + "/data", context=context)
    assert list(ckptcore.load_checkpointables(location, context=context)) == ["params"]
    assert ckptcore.verify(location, context=context).deleted == ("data",)
    ckptcore.copy(location, place + "/plain", layout="safetensors", context=context)
    assert [key for key in keys(place + "/plain") if "/" not in key] == ["checkpoint.json"]
    ckptcore.copy(place + "/plain", place + "/again", layout="shelf", context=context)
    assert list(mark(place + "/again")["members"]) == ["params"]
    ckptcore.save(location, ARRAYS, overwrite="non-atomic", context=context)
    assert sorted(keys(location)) == ["checkpoint.json", "model.safetensors"]
    ckptcore.save(location, ARRAYS, layout="shelf", overwrite="non-atomic", context=context)
    ckptcore.delete(location, context=context)
    assert keys(location) == []


def test_a_checkpoint_without_a_root_is_replaced_only_on_request(tmp_path: Path, context: ckptcore.Context) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"params": ARRAYS}, layout="shelf", context=context)
    (tmp_path / "c" / "checkpoint.json").unlink()
    with pytest.raises(ckptcore.errors.CheckpointExistsError, match="overwrite=True"):
        ckptcore.save(tmp_path / "c", ARRAYS, context=context)
    ckptcore.save(tmp_path / "c", ARRAYS, overwrite=True, context=context)
    assert ckptcore.load(tmp_path / "c", context=context)["bias"].tolist() == [0, 1, 2, 3]


def test_steps_have_metadata_files(tmp_path: Path, context: ckptcore.Context) -> None:
    policy = ckptcore.policies.LatestN(2)
    options: dict[str, Any] = {"layout": "shelf", "preservation_policy": policy, "context": context}
    with ckptcore.Checkpointer(tmp_path / "run", **options) as checkpointer:
        for step in range(5):
            checkpointer.save_checkpointables(step, {"params": ARRAYS, "data": Counter(step)})
            checkpointer.wait()
        assert checkpointer.steps == (3, 4)
        assert checkpointer.load_checkpointables()["data"]["position"] == 4
    assert {path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()} == {"3", "4"}


# --- invalid layouts and crashed saves


@pytest.mark.parametrize("key", ["checkpoint.json", "checkpoint.mark", "params/mark", "data/mark"])
def test_metadata_files_in_a_wrong_directory_are_refused(key: str, place: str, context: ckptcore.Context) -> None:
    state = {"params": ARRAYS, "data": Counter(3)}
    with pytest.raises(PluginError, match=key):
        ckptcore.save_checkpointables(place + "/c", state, layout=RecordingLayout(key), context=context)
    assert keys(place) == []


def test_a_metadata_file_with_the_key_of_an_array_object_is_refused(place: str, context: ckptcore.Context) -> None:
    for key in ("tree/index.shelf", "checkpoint.mark", "checkpoint.json"):
        with pytest.raises(PluginError, match=key):
            ckptcore.save(place + "/c", ARRAYS, layout=RecordingLayout(key), context=context)
        assert keys(place) == []


def test_an_error_of_write_metadata_files_fails_the_save(place: str, context: ckptcore.Context) -> None:
    layout = RecordingLayout("half", error=RuntimeError("no marks today"))
    for save in (ckptcore.save, ckptcore.save_checkpointables):
        with pytest.raises(RuntimeError, match="no marks today"):
            save(place + "/c", {"params": ARRAYS}, layout=layout, context=context)
        assert keys(place) == []


def faults(scheme: str, tmp_path: Path) -> Iterator[tuple[str, FaultPlan]]:
    """Yield locations with fault plans: a crash before or during each operation of a save, or an error of it."""
    counting = FaultPlan()
    count = f"{above(scheme, tmp_path)}/count"
    if scheme == "file":
        save_both(count, 1, FaultPlan())
    save_both(count, 2, counting)
    yield f"{count}-after", FaultPlan(CrashAt(len(counting.operations) - 1, "after"))
    for operation in counting.operations:
        where = f"{above(scheme, tmp_path)}/{operation.number}"
        if operation.changes:
            yield f"{where}-before", FaultPlan(CrashAt(operation.number, "before"))
            yield f"{where}-midway", FaultPlan(CrashAt(operation.number, "midway"))
        yield f"{where}-failed", FaultPlan(FailAt(operation.number, StorageError("the test let it fail")))


def above(scheme: str, tmp_path: Path) -> str:
    return f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"


def save_both(location: str, version: int, plan: FaultPlan) -> None:
    state: Mapping[str, Any] = {name: {"version": version, "w": np.full(3, version)} for name in ("a", "b")}
    context = faulty_context(location, plan)
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(*context.plugins.extra, ShelfPlugin())),
        io=ckptcore.context.IOOptions(threads=1),
        durability="none",
    )
    ckptcore.save_checkpointables(through(location), state, layout="shelf", overwrite=True, context=context)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_crashed_save_leaves_old_or_new_checkpoint(scheme: str, tmp_path: Path, context: ckptcore.Context) -> None:
    """On a storage without directories, readers see no checkpoint or the new one, never one of other software."""
    outcomes = set()
    for location, plan in faults(scheme, tmp_path):
        if scheme == "file":
            save_both(location, 1, FaultPlan())
        with suppress(SimulatedCrash, CheckpointError):
            save_both(location, 2, plan)
        try:
            loaded = ckptcore.load_checkpointables(location, context=context)
        except CheckpointNotFoundError:
            assert scheme == "memory"
            outcomes.add(0)
            continue
        (version,) = {loaded[name]["version"] for name in "ab"} | {int(value) for value in loaded["a"]["w"]}
        outcomes.add(version)
        assert ckptcore.metadata(location, context=context).save_id is not None, "theirs, not ours"
        assert ckptcore.verify(location, context=context).ok
    assert outcomes == ({1, 2} if scheme == "file" else {0, 2})
