"""Consolidation in jobs: several processes write one directory of safetensors together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import FaultPlan, ThreadJob, with_faults

import ckptcore
from ckptcore import SafetensorsLayout
from ckptcore.errors import CheckpointError, RankFailedError
from ckptcore.hookspecs import hookimpl
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import Coordinator, StorageBackend, StorageOpener, StorageOptions
from tests.saving.test_failures import OneRankEach

ARRAYS, ARRAY_BYTES = 12, 24 << 10


class CountedFiles:
    """A plugin with a storage of files that counts its operations."""

    def __init__(self) -> None:
        self.plan = FaultPlan()

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(installed_plugins().storage("file")(url.replace("counted", "file", 1), options), self.plan)

    @hookimpl
    def ckpt_storages(self) -> dict[str, StorageOpener]:
        return {"counted": self._open}


def context_of(coordinator: Coordinator | None = None, **options: Any) -> ckptcore.Context:
    """Return a Context with memory for pieces of 8 KiB."""
    memory = ckptcore.context.MemoryOptions(load_bytes=24 << 10)
    return ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=coordinator),
        durability="none",
        memory=memory,
        **{"io": ckptcore.context.IOOptions(threads=2), **options},
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A DCP checkpoint of a model with several arrays."""
    state = {
        f"w{number}": np.arange(ARRAY_BYTES // 4, dtype=np.float32).reshape(96, -1) + number for number in range(ARRAYS)
    }
    ckptcore.save(tmp_path / "source", {"model": state, "step": 1}, layout="dcp", context=context_of())
    return tmp_path / "source"


def consolidated(source: Path, destination: Path, size: int, *, files: int = 6) -> list[FaultPlan]:
    """Consolidate with a number of processes. Return the operations of each process on the storage of the source."""

    def job(coordinator: Coordinator) -> FaultPlan:
        storage = CountedFiles()
        # Verification would read whole blocks. Without it, a process reads exactly the bytes that it needs.
        context = context_of(
            coordinator,
            plugins=ckptcore.context.PluginOptions(extra=(storage,)),
            io=ckptcore.context.IOOptions(threads=2, verify=False),
        )
        ckptcore.copy(
            f"counted://{source}",
            destination,
            layout=ckptcore.SafetensorsLayout(max_file_bytes=ARRAYS * ARRAY_BYTES // files),
            subtree="model",
            context=context,
        )
        return storage.plan

    return list(ThreadJob(size, timeout_seconds=30).run(job))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith("checkpoint.")}


def element_bytes(plan: FaultPlan) -> int:
    """Return the number of bytes of elements that were read. Roots and tables are read with ``get`` and not counted."""
    return sum(operation.nbytes for operation in plan.operations if operation.name == "get_into")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_several_processes_write_the_same_files_and_read_bytes_once(size: int, source: Path, tmp_path: Path) -> None:
    (alone,) = consolidated(source, tmp_path / "alone", 1)
    plans = consolidated(source, tmp_path / "together", size)
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")
    assert len(files_of(tmp_path / "alone")) == 7
    assert ckptcore.verify(tmp_path / "together").ok
    amounts = [element_bytes(plan) for plan in plans]
    assert element_bytes(alone) == sum(amounts) == ARRAYS * ARRAY_BYTES
    fair = -(-6 // size) * 2 * ARRAY_BYTES
    assert max(amounts) == fair and min(amounts) == (0 if size > 6 else 6 // size * 2 * ARRAY_BYTES)


def run_ranks(work: Callable[[Coordinator], None], size: int = 3) -> list[type[BaseException] | None]:
    """Run the ranks of a job, and return their errors."""

    def job(coordinator: Coordinator) -> type[BaseException] | None:
        try:
            work(coordinator)
        except CheckpointError as error:
            return type(error)
        return None

    return list(ThreadJob(size, timeout_seconds=30).run(job))


def test_an_error_on_one_process_fails_all(source: Path, tmp_path: Path) -> None:
    (data,) = source.glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    errors = run_ranks(
        lambda rank: ckptcore.copy(
            source,
            tmp_path / "hf",
            layout=ckptcore.SafetensorsLayout(max_file_bytes=2 * ARRAY_BYTES),
            subtree="model",
            context=context_of(rank),
        )
    )
    assert sum(kind is not RankFailedError for kind in errors) >= 1 and None not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_processes_with_different_arguments_are_refused(source: Path, tmp_path: Path) -> None:
    def work(rank: Coordinator) -> None:
        amount = (1 + rank.rank) * ARRAY_BYTES
        ckptcore.copy(
            source,
            tmp_path / "hf",
            layout=ckptcore.SafetensorsLayout(max_file_bytes=amount),
            subtree=(),
            context=context_of(rank),
        )

    assert run_ranks(work) == [CheckpointError, RankFailedError, RankFailedError]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_only_the_leader_needs_the_extra_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def work(rank: Coordinator) -> None:
        files = [tmp_path / ("config.json" if rank.rank == 0 else "elsewhere.json")]
        ckptcore.copy(source, tmp_path / "hf", subtree=(), files=files, context=context_of(rank))

    assert run_ranks(work) == [None] * 3
    assert (tmp_path / "hf" / "config.json").read_text() == "{}"
    assert ckptcore.load(tmp_path / "hf")["step"] == 1


@pytest.mark.parametrize("max_file_bytes", [1, 30, 1 << 30])
def test_files_of_one_save_may_come_from_several_processes(max_file_bytes: int, tmp_path: Path) -> None:
    """In pipeline parallelism, processes have different arrays. One process writes a file, or several write slices."""
    state = {name: np.full(4, float(number % 2)) for number, name in enumerate("abcd")}
    layout = ckptcore.SafetensorsLayout(max_file_bytes=max_file_bytes)

    def work(rank: Coordinator) -> None:
        context = context_of(rank, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: OneRankEach()}))
        ckptcore.save(tmp_path / "c", state, layout=layout, context=context)

    errors = run_ranks(work, 2)
    assert errors == [None, None]
    files = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert ckptcore.verify(tmp_path / "c").ok and len(files) == (2 if max_file_bytes == 1 << 30 else 4)
    assert all(name.startswith("shard-") for name in files) == (max_file_bytes == 1 << 30)
    loaded = ckptcore.load(tmp_path / "c")
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())


def test_processes_with_different_file_names_are_refused(source: Path, tmp_path: Path) -> None:
    def work(rank: Coordinator) -> None:
        stem = "model" if rank.rank == 0 else "weights"
        ckptcore.copy(
            source,
            tmp_path / "hf",
            layout=ckptcore.SafetensorsLayout(max_file_bytes=ARRAY_BYTES, stem=stem),
            subtree=(),
            context=context_of(rank),
        )

    assert run_ranks(work) == [CheckpointError, RankFailedError, RankFailedError]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("other", [SafetensorsLayout(1, "weights"), SafetensorsLayout(64), SafetensorsLayout()])
def test_a_save_with_different_options_is_complete_or_fails(other: SafetensorsLayout, tmp_path: Path) -> None:
    """If the options differ only in the size of files, the leader finds all arrays. Other file names are an error."""
    state = {name: np.full(4, float(number % 2)) for number, name in enumerate("abcd")}

    def work(rank: Coordinator) -> None:
        layout = other if rank.rank else SafetensorsLayout(1)
        context = context_of(rank, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: OneRankEach()}))
        ckptcore.save(tmp_path / "c", state, layout=layout, context=context)

    if other.stem != "model":
        assert None not in run_ranks(work, 2)
        assert list(tmp_path.iterdir()) == []
        return
    assert run_ranks(work, 2) == [None, None]
    loaded = ckptcore.load(tmp_path / "c")
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
