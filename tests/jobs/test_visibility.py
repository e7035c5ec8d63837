"""Processes that do not share a directory. Saves detect them before any array is written, and name hosts and paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.errors import CheckpointExistsError, NotSharedError, RankFailedError
from ckptcore.job import visibility
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_one_directory
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of
from tests.ownership.fake_clock import FakeClock

SIZE = 3


class Mounted(os.PathLike[str]):
    """A path with the same text on all ranks, but with another directory on each rank."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)

    def __str__(self) -> str:
        return "/shared/run"


@pytest.fixture(autouse=True)
def _without_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "SYSTEM_CLOCK", FakeClock())


def outcomes(work: Callable[[Coordinator], Any]) -> Sequence[Any]:
    """Return the error or the result of each rank."""

    def of_rank(coordinator: Coordinator) -> Any:
        try:
            return work(coordinator)
        except Exception as error:  # noqa: BLE001  # compared by the test
            return error

    return ThreadJob(SIZE, timeout_seconds=30).run(of_rank)


def directory_of(tmp_path: Path, rank: int, *, apart: Sequence[int]) -> Path:
    """Create and return the directory that a rank sees. Each rank in `apart` has its own directory."""
    directory = tmp_path / (f"disk {rank}" if rank in apart else "shared")
    directory.mkdir(exist_ok=True)
    return directory


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("apart", [[1], [1, 2], [0]])
@pytest.mark.parametrize("begin", ["save", "save_async"])
def test_a_save_without_shared_files_writes_no_array(begin: str, apart: list[int], tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> None:
        location = Mounted(directory_of(tmp_path, coordinator.rank, apart=apart) / "step")
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        if begin == "save":
            ckptcore.save(location, {"w": np.ones(4)}, context=context)
        else:
            ckptcore.save_async(location, {"w": np.ones(4)}, context=context).result()

    errors = outcomes(work)
    blind = [1, 2] if apart == [0] else apart
    for rank, error in enumerate(errors):
        assert isinstance(error, NotSharedError if rank in blind else RankFailedError), error
        path = directory_of(tmp_path, blind[0], apart=apart)
        assert f"{path}/step: host {os.uname().nodename} cannot see the files that rank 0" in str(
            errors[0]
        ) or apart == [0]
    assert not files(tmp_path)


def test_every_rank_reports_all_ranks_without_access(tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> None:
        location = Mounted(directory_of(tmp_path, coordinator.rank, apart=[1, 2]) / "step")
        ckptcore.save(
            location,
            {"w": np.ones(4)},
            context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator)),
        )

    leader, first, second = outcomes(work)
    assert "rank 1: NotSharedError" in str(leader) and "rank 2: NotSharedError" in str(leader)
    assert "file system that all hosts mount" in str(leader)
    for error, own, other in ((first, 1, 2), (second, 2, 1)):
        assert str(tmp_path / f"disk {own}" / "step") in str(error)
        assert any(f"rank {other}: NotSharedError" in note for note in error.__notes__)


def test_object_stores_are_checked_too(tmp_path: Path) -> None:
    class Place(Mounted):
        def __fspath__(self) -> str:
            return f"memory://{tmp_path.name}-{self._path}/step"

    def work(coordinator: Coordinator) -> None:
        location = Place(Path(f"disk{coordinator.rank // 2}"))
        ckptcore.save(
            location,
            {"w": np.ones(4)},
            context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator)),
        )

    errors = outcomes(work)
    assert [type(error) for error in errors] == [RankFailedError, RankFailedError, NotSharedError]
    assert f"memory://{tmp_path.name}-disk1/step: host" in str(errors[0])


def test_a_leftover_claim_does_not_prove_visibility(tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> None:
        directory = directory_of(tmp_path, coordinator.rank, apart=[2])
        if coordinator.rank == 2:  # this host has its own disk, with a checkpoint of an earlier job
            ckptcore.save(directory / "step", {"w": np.zeros(4)}, context=ckptcore.Context())
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        ckptcore.save(Mounted(directory / "step"), {"w": np.ones(4)}, overwrite=True, context=context)

    assert [type(error) for error in outcomes(work)] == [RankFailedError, RankFailedError, NotSharedError]
    assert not np.any(ckptcore.load(tmp_path / "disk 2" / "step")["w"])


def test_a_directory_of_steps_is_checked_before_it_is_created(tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> None:
        directory = directory_of(tmp_path, coordinator.rank, apart=[2])
        store = open_directory(directory, runtime_of(ckptcore.Context()).storages)
        with expect_one_directory(Agreement(coordinator, "key"), lambda: [(store, str(directory))]):
            pass

    errors = outcomes(work)
    assert [type(error) for error in errors] == [RankFailedError, RankFailedError, NotSharedError]
    assert f"{tmp_path}/disk 2: host" in str(errors[0])
    assert files(tmp_path) == []


def test_a_checkpointer_compares_the_path_given_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of links and mounts, the same directory may have another real path on each host."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    keys: list[str] = []

    class Noting:
        """A coordinator that records the keys of its exchanges."""

        def __init__(self, coordinator: Coordinator) -> None:
            self._coordinator = coordinator
            self.rank, self.size = coordinator.rank, coordinator.size

        def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
            keys.append(key)
            return self._coordinator.gather(key, payload)

        def broadcast(self, key: str, payload: bytes | None) -> bytes:
            keys.append(key)
            return self._coordinator.broadcast(key, payload)

    def work(coordinator: Coordinator) -> None:
        with ckptcore.Checkpointer(
            "run", context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=Noting(coordinator)))
        ) as run:
            run.save(1, {"w": np.ones(4)})

    assert outcomes(work) == [None] * SIZE
    assert len(keys) > SIZE and all(key.startswith("run/") for key in keys)


def test_files_that_appear_late_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a network file system may cache for a while that a file does not exist."""
    looked: list[int] = []
    sees = visibility.sees_claim

    def late(*arguments: Any) -> bool:
        looked.append(1)
        return len(looked) > 5 and sees(*arguments)

    monkeypatch.setattr("ckptcore.job.visibility.sees_claim", late)

    def work(coordinator: Coordinator) -> None:
        ckptcore.save(
            tmp_path / "step",
            {"w": np.ones(4)},
            context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator)),
        )

    assert outcomes(work) == [None] * SIZE
    assert ckptcore.verify(tmp_path / "step").ok


def test_an_error_of_the_leader_ends_the_visibility_check(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "theirs").write_text("")

    def work(coordinator: Coordinator) -> None:
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        ckptcore.save(tmp_path / "step", {"w": np.ones(4)}, context=context)

    errors = outcomes(work)
    assert [type(error) for error in errors] == [CheckpointExistsError, RankFailedError, RankFailedError]
    assert not any(isinstance(error.__context__, NotSharedError) for error in errors)


def test_probes_of_leaders_that_were_killed_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".ckptcore").mkdir()
    (tmp_path / ".ckptcore" / "probe-0011223344556677").write_bytes(b"")

    def work(coordinator: Coordinator) -> None:
        ckptcore.Checkpointer(
            tmp_path, context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        ).close()

    assert outcomes(work) == [None] * SIZE
    assert not [name for name in files(tmp_path) if "probe" in name]
