"""Several ranks that save one tree. All ranks succeed, or all raise an error with the failed rank and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout
from ckptcore_testing import ThreadJob
from ckptcore_testing.faults import FailAt, FaultPlan
from ckptcore_testing.locations import faulty_context, through

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import BackgroundSaveError, CheckpointExistsError, RankFailedError
from ckptcore.model import JSON, Box, HostArray, LeafRecord, Pending, Receipt, TreeMetadata
from ckptcore.protocols import Coordinator, Snapshot, WriteStore
from ckptcore.runtime import Runtime, runtime_of
from tests.crashes.states import make_state, version_at

_OLD, _NEW, _NEXT = 1, 2, 3


class _Broken(RuntimeError):
    """A failure of one rank."""


class _BrokenLeaves(HostArrayHandler):
    """A handler that fails in one method."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _may_fail(self, method: str) -> None:
        if method == self._method:
            raise _Broken(f"{method} is broken")

    def describe(self, leaf: Any) -> LeafRecord:
        self._may_fail("describe")
        return super().describe(leaf)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        self._may_fail("view_on_host")
        return super().view_on_host(leaf, boxes)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: Any) -> Sequence[Pending[HostArray]]:
        self._may_fail("copy_to_host")
        return super().copy_to_host(leaf, boxes, memory)


class _BrokenLayout(SafetensorsLayout):
    """A layout that fails in one method."""

    def __init__(self, method: str) -> None:
        super().__init__()
        object.__setattr__(self, "_method", method)

    def _may_fail(self, method: str) -> None:
        if method == getattr(self, "_method", None):
            raise _Broken(f"{method} is broken")

    def check(self, tree: TreeMetadata, size: int) -> None:
        self._may_fail("check")
        super().check(tree, size)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        self._may_fail("write")
        return super().write(snapshot, store)

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        self._may_fail("finish")
        return super().finish(tree, receipts, store)


class _BrokenDatabase(OcdbtLayout):
    """A layout that fails after a process has written all its objects."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        super().write(snapshot, store)
        raise _Broken("write is broken")


class _BrokenRoot(OcdbtLayout):
    """A layout that fails after all objects were written."""

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        super().finish(tree, receipts, store)
        raise _Broken("finish is broken")


def _job(size: int) -> ThreadJob:
    return ThreadJob(size, timeout_seconds=20)


def _save(location: str, coordinator: Coordinator, background: bool, **options: Any) -> None:
    state = options.pop("state", None) or make_state(_NEW)
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=coordinator),
        io=ckptcore.context.IOOptions(threads=1),
        durability="none",
        plugins=ckptcore.context.PluginOptions(handlers=options.pop("handlers", {})),
    )
    if background:
        ckptcore.save_async(location, state, context=context, **options).result()
    else:
        ckptcore.save(location, state, context=context, **options)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_all_ranks_succeed(scheme: str, size: int, background: bool, tmp_path: Path) -> None:
    location = f"{scheme}://{tmp_path if scheme == 'file' else tmp_path.name}/step_1"
    job = _job(size)
    job.run(lambda coordinator: _save(location, coordinator, background))
    assert version_at(location) == _NEW
    assert job.run(lambda coordinator: version_at(location)) == [_NEW] * size


_EVERYWHERE: Final = ["leaves.describe", "layout.check", "layout.write"]
_FAILURES: Final = [
    *[(where, rank, background) for where in _EVERYWHERE for rank in (0, 1, 2) for background in (False, True)],
    # Only rank 0 copies, because it owns the arrays that all ranks hold. Only rank 0 calls `finish`.
    ("leaves.view_on_host", 0, False),
    ("leaves.copy_to_host", 0, True),
    ("layout.finish", 0, False),
    ("layout.finish", 0, True),
]


@pytest.mark.parametrize(("where", "broken", "background"), _FAILURES)
def test_an_error_on_one_rank_fails_all(where: str, broken: int, background: bool, tmp_path: Path) -> None:
    location = str(tmp_path / "run" / "step_1")
    ckptcore.save(location, make_state(_OLD))
    what, method = where.split(".")

    def save(coordinator: Coordinator) -> str:
        options: dict[str, Any] = {"overwrite": True}
        if coordinator.rank == broken and what == "leaves":
            options["handlers"] = {np.ndarray: _BrokenLeaves(method)}
        elif coordinator.rank == broken:
            options["layout"] = _BrokenLayout(method)
        try:
            _save(location, coordinator, background, **options)
        except _Broken:
            return "its own"
        except RankFailedError as error:
            return str(error)
        return "saved"

    outcomes = _job(3).run(save)
    assert outcomes[broken] == "its own"
    for rank, told in enumerate(outcomes):
        if rank != broken:
            assert f"rank {broken}" in told and f"{method} is broken" in told
    assert version_at(location) == _OLD
    ckptcore.save(location, make_state(_NEXT), overwrite=True)
    assert [path.name for path in Path(location).parent.iterdir()] == ["step_1"], "leftovers"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("broken", "layout"), [(0, _BrokenDatabase), (1, _BrokenDatabase), (2, _BrokenDatabase), (0, _BrokenRoot)]
)
def test_a_database_that_fails_on_one_rank_fails_on_all(
    broken: int, layout: type[OcdbtLayout], compression: str | None, background: bool, tmp_path: Path
) -> None:
    location = str(tmp_path / "run" / "step_1")
    ckptcore.save(location, make_state(_OLD), layout="ocdbt")

    def save(coordinator: Coordinator) -> type[Exception] | None:
        made = (layout if coordinator.rank == broken else OcdbtLayout)(compression=compression)
        try:
            _save(location, coordinator, background, layout=made, overwrite=True)
        except (_Broken, RankFailedError) as error:
            return type(error)
        return None

    assert _job(3).run(save) == [_Broken if rank == broken else RankFailedError for rank in range(3)]
    assert version_at(location) == _OLD
    ckptcore.save(location, make_state(_NEXT), layout="ocdbt", overwrite=True)
    assert [path.name for path in Path(location).parent.iterdir()] == ["step_1"], "leftovers"


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_storage_that_fails_at_any_operation_of_the_leader(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The keys of exchanges contain the location, but here the leader uses another URL for the same location.
    monkeypatch.setattr(Runtime, "exchange_key", lambda self, location: "save")
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"

    def save(location: str, coordinator: Coordinator, plan: FaultPlan) -> str:
        led = faulty_context(location, plan)
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            io=ckptcore.context.IOOptions(threads=1),
            durability="none",
            plugins=ckptcore.context.PluginOptions(extra=led.plugins.extra if coordinator.rank == 0 else ()),
        )
        there = through(location) if coordinator.rank == 0 else location
        try:
            ckptcore.save(there, make_state(_NEW), context=context)
        except Exception as error:  # noqa: BLE001  # compared with the error of the other rank
            return f"{type(error).__name__}: {error}"
        return "saved"

    whole = FaultPlan()
    assert _job(2).run(lambda coordinator: save(f"{above}/whole", coordinator, whole)) == ["saved"] * 2
    failed = 0
    for operation in whole.operations:
        location = f"{above}/{operation.number}"
        plan = FaultPlan(FailAt(operation.number, OSError("the test lets it fail")))
        first, second = _job(2).run(lambda coordinator: save(location, coordinator, plan))  # noqa: B023  # runs in this iteration
        if first == "saved":
            assert second == "saved" and version_at(location) == _NEW, f"{operation} failed"
        else:
            failed += 1
            assert "the test lets it fail" in first and "rank 0" in second and first in second, f"{operation} failed"
            assert version_at(location) is None, f"{operation} failed"
    assert failed > 5


@pytest.mark.parametrize("size", [2, 3])
def test_an_existing_checkpoint_is_refused_on_all_ranks(size: int, tmp_path: Path) -> None:
    location = str(tmp_path / "step_1")
    ckptcore.save(location, make_state(_OLD))

    def save(coordinator: Coordinator) -> type[Exception]:
        with pytest.raises((CheckpointExistsError, RankFailedError), match="already") as caught:
            _save(location, coordinator, False)
        return caught.type

    assert _job(size).run(save) == [CheckpointExistsError] + [RankFailedError] * (size - 1)
    assert version_at(location) == _OLD


def test_ranks_with_different_trees_are_refused(tmp_path: Path) -> None:
    location = str(tmp_path / "step_1")

    def save(coordinator: Coordinator) -> str:
        state = {"x": np.zeros(3 + (coordinator.rank == 1), np.float32)}
        with pytest.raises(ckptcore.CheckpointError) as caught:
            _save(location, coordinator, False, state=state)
        return str(caught.value)

    for told in _job(3).run(save):
        assert "different trees" in told and "float32[4] on rank 1" in told
    assert version_at(location) is None


def test_a_storage_error_on_some_ranks_fails_all(tmp_path: Path) -> None:
    """The next save fails on both ranks, and the save after it succeeds."""

    def save(coordinator: Coordinator) -> list[str]:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            io=ckptcore.context.IOOptions(threads=1),
            durability="none",
        )
        handle = ckptcore.save_async(
            tmp_path / "first", make_state(_OLD), layout=_BrokenLayout("write"), context=context
        )
        if coordinator.rank == 0:
            handle.exception()
        outcomes = []
        for name in ("second", "third"):
            runtime_of(context).saves.wait()
            try:
                ckptcore.save(tmp_path / name, make_state(_NEW), context=context)
            except (BackgroundSaveError, RankFailedError) as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("saved")
        return outcomes

    assert _job(2).run(save) == [["RankFailedError", "saved"], ["BackgroundSaveError", "saved"]]
    assert version_at(str(tmp_path / "third")) == _NEW
