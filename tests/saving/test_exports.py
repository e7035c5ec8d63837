"""Exports: additional checkpoints that a save writes from the copy of its arrays, also in other layouts."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import Export, WithExports
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.errors import (
    CheckpointExistsError,
    InvalidLocationError,
    NameCollisionError,
    RankFailedError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.events import Event
from ckptcore.model import Box, HostArray, Pending, Ready
from ckptcore.protocols import HostMemory
from ckptcore.runtime import runtime_of
from tests.composites.objects import Files


def _save_in_background(location: object, state: Any, **options: Any) -> None:
    ckptcore.save_async(location, state, **options).result()  # type: ignore[arg-type]  # `options` has no types


def _save_in_bounded_memory(location: object, state: Any, **options: Any) -> None:
    handlers = options.pop("context").plugins.handlers if "context" in options else {}
    context = ckptcore.Context(
        memory=ckptcore.context.MemoryOptions(save_bytes=1 << 17),
        plugins=ckptcore.context.PluginOptions(handlers=handlers),
    )
    ckptcore.save_async(location, state, context=context, **options).result()  # type: ignore[arg-type]  # `options` has no types


SAVES = [ckptcore.save, _save_in_background, _save_in_bounded_memory]


def _state(value: float = 1) -> dict[str, Any]:
    layers = [{"w": np.full((4, 6), value + number, np.float32)} for number in range(3)]
    return {"model": {"layers": layers, "step": 7}, "optimizer": {"m": np.full(50_000, value)}, "rate": 0.5}


class Counting(HostArrayHandler):
    """A handler that counts how often each box is copied or viewed."""

    def __init__(self) -> None:
        self.taken: Counter[tuple[int, Box]] = Counter()

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        self.taken.update((id(leaf), box) for box in boxes)
        return super().copy_to_host(leaf, boxes, memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        self.taken.update((id(leaf), box) for box in boxes)
        return super().view_on_host(leaf, boxes)


@pytest.mark.parametrize("save", SAVES)
def test_a_save_also_writes_subtrees_to_other_locations(save: Callable[..., None], tmp_path: Path) -> None:
    state = _state()
    exports = [Export(location=tmp_path / "weights", subtree="model"), Export(location=tmp_path / "all", subtree=())]
    save(tmp_path / "c", state, metadata={"run": "a"}, strategy=WithExports(exports))
    assert same_value(ckptcore.load(tmp_path / "c"), state) and same_value(ckptcore.load(tmp_path / "all"), state)
    assert same_value(ckptcore.load(tmp_path / "weights"), state["model"])
    assert ckptcore.metadata(tmp_path / "weights").custom == {"run": "a"}
    for name in ("c", "weights", "all"):
        assert ckptcore.verify(tmp_path / name).ok
    head = (tmp_path / "weights" / "model.safetensors").read_bytes()
    names = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    assert set(names) == {"__metadata__", "layers.0.w", "layers.1.w", "layers.2.w"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "c", "weights"]


@pytest.mark.parametrize(
    ("save", "times"), [(ckptcore.save, 1), (_save_in_background, 1), (_save_in_bounded_memory, 2)]
)
def test_arrays_are_taken_from_the_device_once(save: Callable[..., None], times: int, tmp_path: Path) -> None:
    counting = Counting()
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: counting}))
    state = _state()
    exports = [
        Export(location=tmp_path / "weights", subtree="model"),
        Export(location=tmp_path / "w", subtree="model/layers"),
    ]
    save(tmp_path / "c", state, strategy=WithExports(exports), context=context)
    taken = {key: count for (key, _), count in counting.taken.items()}
    assert taken[id(state["optimizer"]["m"])] == 1
    assert {taken[id(layer["w"])] for layer in state["model"]["layers"]} == {times if times == 1 else 3}


def test_changes_after_the_call_are_not_exported(tmp_path: Path) -> None:
    state = _state()
    handle = ckptcore.save_async(
        tmp_path / "c", state, strategy=WithExports([Export(location=tmp_path / "e", subtree="optimizer")])
    )
    state["optimizer"]["m"][:] = 99
    handle.result()
    assert same_value(ckptcore.load(tmp_path / "e"), _state()["optimizer"])


def test_arrays_that_are_shared_in_a_subtree_are_shared_in_its_export(tmp_path: Path) -> None:
    shared = np.arange(1000.0)
    state = {"a": {"first": shared}, "b": {"x": np.ones(3), "second": shared, "third": shared}}
    exports = [Export(location=tmp_path / "b", subtree=("b",)), Export(location=tmp_path / "leaf", subtree="b/second")]
    ckptcore.save_async(tmp_path / "c", state, strategy=WithExports(exports)).result()
    assert same_value(ckptcore.load(tmp_path / "b"), state["b"]) and same_value(
        ckptcore.load(tmp_path / "leaf"), shared
    )
    assert (tmp_path / "b" / "model.safetensors").stat().st_size < 2 * shared.nbytes
    for name in ("c", "b", "leaf"):
        assert ckptcore.verify(tmp_path / name).ok


def test_subtrees_are_named_by_keys_or_text(tmp_path: Path) -> None:
    state = {"1": {"a/b": np.ones(2)}, "layers": [np.zeros(1), {2: np.full(3, 2.0)}]}
    subtrees = {
        "keys": (("1", "a/b"), np.ones(2)),
        "text": ("layers/1/2", np.full(3, 2.0)),
        "numbers": (("layers", 1, 2), np.full(3, 2.0)),
    }
    exports = [Export(location=tmp_path / name, subtree=path) for name, (path, _) in subtrees.items()]
    ckptcore.save(tmp_path / "c", state, strategy=WithExports(exports))
    for name, (_, expected) in subtrees.items():
        assert same_value(ckptcore.load(tmp_path / name), expected)


@pytest.mark.parametrize("subtree", ["modle", ("model", 3), "model/step/x", ("model", "layers", "0", "w", "x")])
@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_a_missing_subtree_is_refused_before_anything_is_written(begin: Any, subtree: Any, tmp_path: Path) -> None:
    with pytest.raises(TreeMismatchError, match=r"exports\[0\].*does not exist in the tree.*Nothing was written"):
        begin(tmp_path / "c", _state(), strategy=WithExports([Export(location=tmp_path / "e", subtree=subtree)]))
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_a_layout_cannot_store_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Refusing(ckptcore.SafetensorsLayout):
        def check(self, tree: Any, size: int) -> None:
            raise NameCollisionError("these would collide. Nothing was written")

    with pytest.raises(NameCollisionError):
        ckptcore.save(
            tmp_path / "c",
            _state(),
            strategy=WithExports([Export(location=tmp_path / "e", subtree=(), layout=Refusing())]),
        )
    with pytest.raises(TypeError, match=r"exports\[0\] is 'weights'"):
        ckptcore.save(tmp_path / "c", _state(), strategy=WithExports(["weights"]))  # type: ignore[list-item]  # wrong on purpose
    assert list(tmp_path.iterdir()) == []


def test_each_checkpoint_needs_its_own_location(tmp_path: Path) -> None:
    state = _state()
    for exports in (
        [Export(location=tmp_path / "x" / ".." / "c", subtree=())],
        [Export(location=tmp_path / "e", subtree=()), Export(location=tmp_path / "e", subtree=())],
        [Export(location=tmp_path, subtree=())],
    ):
        with pytest.raises(InvalidLocationError, match="Nothing was written"):
            ckptcore.save(tmp_path / "c", state, strategy=WithExports(exports))
    assert list(tmp_path.iterdir()) == []
    inside = [Export(location=tmp_path / "c" / "weights", subtree="model")]
    for value in (1, 2):
        ckptcore.save(tmp_path / "c", _state(value), overwrite=True, strategy=WithExports(inside))
        assert same_value(ckptcore.load(tmp_path / "c" / "weights"), _state(value)["model"])
        assert same_value(ckptcore.load(tmp_path / "c"), _state(value))
    ckptcore.delete(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["optimizer", "optimizer/weights"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_export_replaces_nothing_that_its_save_has_just_written(overwrite: bool, inside: str, tmp_path: Path) -> None:
    parts = {"model": {"w": np.ones(3)}, "optimizer": {"m": np.zeros(3)}}
    exports = [Export(location=tmp_path / "c" / inside, subtree="model")]
    with pytest.raises(InvalidLocationError, match="cannot use the directory of 'optimizer'.*Nothing was written"):
        ckptcore.save_checkpointables(tmp_path / "c", parts, strategy=WithExports(exports), overwrite=overwrite)
    assert list(tmp_path.iterdir()) == []
    exports = [Export(location=tmp_path / "c" / "weights", subtree="model")]
    ckptcore.save_checkpointables(tmp_path / "c", parts, strategy=WithExports(exports), overwrite=overwrite)
    assert set(ckptcore.load_checkpointables(tmp_path / "c")) == {"model", "optimizer"}


@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_existing_checkpoints_are_replaced_only_with_overwrite(begin: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "e", {"mine": 1})
    exports = [Export(location=tmp_path / "e", subtree="model")]
    with pytest.raises(CheckpointExistsError):
        begin(tmp_path / "c", _state(), strategy=WithExports(exports))
    assert ckptcore.load(tmp_path / "e") == {"mine": 1} and not (tmp_path / "c").exists()
    ckptcore.save(tmp_path / "c", _state(), strategy=WithExports(exports), overwrite=True)
    assert same_value(ckptcore.load(tmp_path / "e"), _state()["model"])


class FailingWrites(ckptcore.SafetensorsLayout):
    """A layout that fails after it has taken an array."""

    def write(self, snapshot: Any, store: Any) -> Any:
        snapshot.take(0)
        raise OSError("the disk is on fire")


@pytest.mark.parametrize("save", SAVES)
def test_an_export_that_fails_leaves_the_save_and_the_others(save: Callable[..., None], tmp_path: Path) -> None:
    exports = [
        Export(location=tmp_path / "bad", layout=FailingWrites(), subtree="model"),
        Export(location=tmp_path / "good", subtree="model"),
        Export(location=tmp_path / "worse", subtree=(), layout=FailingWrites()),
    ]
    with pytest.raises(OSError, match="on fire") as caught:
        save(tmp_path / "c", _state(), strategy=WithExports(exports))
    notes = "\n".join(caught.value.__notes__)
    assert (
        f"{tmp_path / 'c'} is committed; its export to {tmp_path / 'bad'} is not" in notes
        and "and then: OSError" in notes
    )
    assert same_value(ckptcore.load(tmp_path / "c"), _state()) and same_value(
        ckptcore.load(tmp_path / "good"), _state()["model"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "good"]
    save(tmp_path / "c", _state(2), strategy=WithExports(exports[1:2]), overwrite=True)
    assert same_value(ckptcore.load(tmp_path / "good"), _state(2)["model"])


@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_fails_exports_nothing(save: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="on fire"):
        save(
            tmp_path / "c",
            _state(),
            layout=FailingWrites(),
            strategy=WithExports([Export(location=tmp_path / "e", subtree=())]),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [None, 1 << 17])
@pytest.mark.parametrize("layout", ["safetensors", FailingWrites()], ids=["well", "failing"])
def test_a_save_with_exports_releases_the_state_and_all_memory(limit: int | None, layout: Any, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit))
    gc.disable()
    try:
        array = np.ones(100_000)
        known = weakref.ref(array)
        exports = [Export(location=tmp_path / "e", layout=layout), Export(location=tmp_path / "f", subtree="w")]
        handle = ckptcore.save_async(tmp_path / "c", {"w": array}, strategy=WithExports(exports), context=context)
        del array
        handle.exception()
        assert known() is None
        held = runtime_of(context).staging.held_bytes
        runtime_of(context).staging.release_unused()
        assert held and runtime_of(context).staging.held_bytes == 0
    finally:
        gc.enable()


def test_memory_is_released_after_the_last_writer_of_an_array(tmp_path: Path) -> None:
    """Memory that no export needs is released before the export."""
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(keep_staging=False))
    seen: list[int] = []

    class Looking(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            runtime_of(context).staging.release_unused()
            seen.append(runtime_of(context).staging.held_bytes)
            return super().write(snapshot, store)

    state = {"model": np.ones(1 << 20), "optimizer": np.ones(4 << 20)}
    exports = [Export(location=tmp_path / "e", layout=Looking(), subtree="model")]
    ckptcore.save_async(
        tmp_path / "c", state, layout=Looking(), strategy=WithExports(exports), context=context
    ).result()
    assert seen == [40 << 20, 8 << 20] and runtime_of(context).staging.held_bytes == 0


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_failed_export_releases_its_memory_before_the_next_begins(limit: int | None, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit, keep_staging=False))
    seen: list[int] = []

    class Failing(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            snapshot.take(0)
            raise OSError("on fire")

    class Looking(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            for item in range(len(snapshot.plan.items)):
                snapshot.take(item)
                snapshot.release(item)
            runtime_of(context).staging.release_unused()
            seen.append(runtime_of(context).staging.held_bytes)
            raise OSError("looked")

    state = {"a": {"x": np.ones(1 << 20), "y": np.ones(1 << 20)}, "b": {"z": np.ones(1 << 20)}}
    exports = [
        Export(location=tmp_path / "e", layout=Failing(), subtree="a"),
        Export(location=tmp_path / "f", layout=Looking(), subtree="b"),
    ]
    with pytest.raises(OSError, match="on fire"):
        ckptcore.save_async(tmp_path / "c", state, strategy=WithExports(exports), context=context).result()
    assert seen == [0] and runtime_of(context).staging.held_bytes == 0


def test_a_failed_export_releases_its_views_before_the_next_begins(tmp_path: Path) -> None:
    arrays: list[weakref.ref[HostArray]] = []
    alive: list[int] = []

    class DeviceHandler(HostArrayHandler):
        """A handler like that of arrays on a device: a view is a copy of the elements on the host."""

        def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
            views = [Ready(np.array(leaf[box.slices])) for box in boxes]
            arrays.extend(weakref.ref(view.value) for view in views)
            return views

    class Failing(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            snapshot.take(0)  # also transfers the second array, ahead of its use
            raise OSError("on fire")

    class Looking(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            alive.append(sum(array() is not None for array in arrays))
            return super().write(snapshot, store)

    state = {"a": {"x": np.ones(9), "y": np.ones(9)}, "b": np.ones(9)}
    exports = [
        Export(location=tmp_path / "e", layout=Failing(), subtree="a"),
        Export(location=tmp_path / "f", layout=Looking(), subtree="b"),
    ]
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: DeviceHandler()}))
    with pytest.raises(OSError, match="on fire"):
        ckptcore.save(tmp_path / "c", state, strategy=WithExports(exports), context=context)
    assert len(arrays) >= 3 and alive == [1]


def test_each_export_emits_events_of_its_own_save(tmp_path: Path) -> None:
    events: list[Event] = []
    context = ckptcore.Context(observers=(events.append,))
    ckptcore.save_async(
        tmp_path / "c", _state(), strategy=WithExports([Export(location=tmp_path / "e", subtree=())]), context=context
    ).result()
    whole = [event.location for event in events if event.phase == "save"]
    assert whole == [str(tmp_path / "c"), str(tmp_path / "e")]
    assert {event.phase for event in events if event.location == str(tmp_path / "e")} == {
        "save",
        "claim",
        "write",
        "commit",
    }


def test_progress_counts_exports(tmp_path: Path) -> None:
    handle = ckptcore.save_async(
        tmp_path / "c", _state(), strategy=WithExports([Export(location=tmp_path / "e", subtree="optimizer")])
    )
    handle.result()
    assert handle.progress.done == handle.progress.total >= 800_000


def test_one_of_several_checkpointables_is_exported(tmp_path: Path) -> None:
    values = {"model": _state()["model"], "files": Files({"a": b"1"}), "each": ckptcore.PerProcess({"r": np.ones(2)})}
    exports = [
        Export(location=tmp_path / "m", subtree="model"),
        Export(location=tmp_path / "w", subtree=("model", "layers", 0)),
    ]
    ckptcore.save_checkpointables(tmp_path / "c", values, strategy=WithExports(exports))
    assert same_value(ckptcore.load(tmp_path / "m"), values["model"])
    assert same_value(ckptcore.load(tmp_path / "w"), _state()["model"]["layers"][0])
    with pytest.raises(TreeMismatchError, match="Expected one of 'model', 'files', 'each'"):
        ckptcore.save_checkpointables(
            tmp_path / "d", values, strategy=WithExports([Export(location=tmp_path / "e", subtree=())])
        )
    with pytest.raises(UnsupportedLeafError, match="'files' cannot be exported, because it writes its own files"):
        ckptcore.save_checkpointables(
            tmp_path / "d", values, strategy=WithExports([Export(location=tmp_path / "e", subtree="files")])
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m", "w"]


@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_several_processes_export_together(begin: Any, tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        handle = begin(
            tmp_path / "c",
            _state(),
            strategy=WithExports(
                [Export(location=tmp_path / "e", subtree="model"), Export(location=tmp_path / "f", subtree=())]
            ),
            context=context,
        )
        if handle is not None:
            handle.result()

    run_ranks(3, job, timeout_seconds=30)
    assert same_value(ckptcore.load(tmp_path / "e"), _state()["model"]) and same_value(
        ckptcore.load(tmp_path / "f"), _state()
    )


def test_an_export_that_fails_on_one_rank_fails_on_all_and_the_others_succeed(tmp_path: Path) -> None:
    together = threading.Barrier(2)

    class OnlyHere(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            if snapshot.plan.rank == 1:
                raise OSError("only here")
            return super().write(snapshot, store)

    def job(rank: int, context: ckptcore.Context) -> BaseException | None:
        exports = [
            Export(location=tmp_path / "e", layout=OnlyHere(), subtree=()),
            Export(location=tmp_path / "f", subtree="model"),
        ]
        handle = ckptcore.save_async(tmp_path / "c", _state(), strategy=WithExports(exports), context=context)
        together.wait()
        return handle.exception()

    first, second = run_ranks(2, job, timeout_seconds=30)
    assert isinstance(first, RankFailedError) and "only here" in str(first) and isinstance(second, OSError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "f"]


def test_ranks_that_export_different_parts_are_refused(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> str:
        subtree = "model" if rank else "optimizer"
        try:
            ckptcore.save(
                tmp_path / "c",
                _state(),
                strategy=WithExports([Export(location=tmp_path / "e", subtree=subtree)]),
                context=context,
            )
        except ckptcore.CheckpointError as error:
            return str(error)
        return ""

    assert all("exports" in told for told in run_ranks(2, job, timeout_seconds=30))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rank_does_not_block_the_others(tmp_path: Path) -> None:
    """The interrupted rank takes no part in the exports after the current one."""

    class Interrupted(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            if snapshot.plan.rank:
                raise KeyboardInterrupt
            return super().write(snapshot, store)

    def job(rank: int, context: ckptcore.Context) -> str:
        exports = [
            Export(location=tmp_path / name, subtree=(), layout=layout)
            for name, layout in (("a", Interrupted()), ("b", "safetensors"), ("d", "safetensors"))
        ]
        try:
            ckptcore.save(tmp_path / "c", _state(), strategy=WithExports(exports), context=context)
        except (RankFailedError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error} {error.__notes__}"
        return "saved"

    told = run_ranks(2, job, timeout_seconds=10)
    assert "RankFailedError: the stage 'write' failed on rank 1: KeyboardInterrupt" in told[0]
    assert "CoordinationTimeoutError" not in told[0] and told[0].count("RankFailedError") == 3
    assert told[1].startswith("KeyboardInterrupt")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
