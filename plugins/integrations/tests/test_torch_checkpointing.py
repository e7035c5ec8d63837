"""The classes of torch_checkpointing on the storages of ckptcore."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_gcs_server import StrictGcs
from ckptcore_integrations.torch_checkpointing import CkptcoreStorage, CkptcoreStorageConfig
from ckptcore_testing.gcs_servers import gcs_server
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.base_storage import ReadArgs

import ckptcore
from ckptcore.errors import CorruptCheckpointError
from tests.jobs.torch_scripts import run_script

HERE = Path(__file__).parent
STATE: dict[str, Any] = {"model": {"w": torch.arange(6000.0).reshape(60, 100)}, "step": 3}


@pytest.fixture(params=["local", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, CkptcoreStorageConfig]]:
    """A directory for checkpoints, and the storage."""
    if request.param == "local":
        yield str(tmp_path / "run"), CkptcoreStorageConfig()
        return
    with StrictGcs(["bucket"]) as server:
        context = ckptcore.Context(storage={"gs": {"endpoint": server.url, "anonymous": True}})
        yield "gs://bucket/run", CkptcoreStorageConfig(context)


def manager_of(config: CkptcoreStorageConfig, save: Any = None) -> CheckpointManager:
    """Return a manager of torch_checkpointing whose saves block until the data is written."""
    save = save or SyncCheckpointSaverConfig()
    return CheckpointManager(CheckpointManager.Config(save=save, storage_config=config))


def target() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(60, 100)}, "step": 0}


def write(storage: CkptcoreStorage, path: str, data: bytes = b"bytes") -> None:
    storage.mkdir(Path(path).parent)
    storage.write(Path(path), data)


def test_a_manager_saves_loads_and_refuses_to_replace(place: tuple[str, CkptcoreStorageConfig]) -> None:
    directory, config = place
    manager = manager_of(config)
    manager.save(f"{directory}/step_1", STATE)
    loaded = target()
    assert manager.load(f"{directory}/step_1", into=loaded)["step"] == 3
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    storage = config.create_storage()
    assert storage.ls(Path(directory)) == ["step_1"]
    assert sorted(storage.ls(Path(directory, "step_1"))) == ["model_0.pt", "step_0.pt"]
    assert storage.glob(f"{directory}/step_*") == [f"{directory}/step_1"]
    with pytest.raises(FileExistsError, match="it exists already"):
        manager.save(f"{directory}/step_1", {"step": 4})
    assert manager.load(f"{directory}/step_1", into={"step": 0})["step"] == 3
    storage.rmdir(Path(directory, "step_1"))
    assert not storage.exists(Path(directory, "step_1"))
    manager.close()


@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_a_process_that_writes_in_the_background(place: tuple[str, CkptcoreStorageConfig]) -> None:
    directory, config = place
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
    manager = manager_of(config, AsyncCheckpointSaverConfig(staging_config=staging))
    written = manager.save(f"{directory}/step_1", STATE)
    assert written is not None
    written.result(timeout=300)
    assert manager.load(f"{directory}/step_1", into=target())["step"] == 3
    manager.close()


def test_a_step_exists_only_after_the_rename(place: tuple[str, CkptcoreStorageConfig]) -> None:
    """A killed job leaves its temporary directory. The next job writes the same step, and commits it."""
    directory, config = place
    storage = config.create_storage()
    write(storage, f"{directory}/tmp_step_1/model_0.pt", b"of a killed job")
    assert not storage.exists(Path(directory, "step_1"))
    assert not storage.exists(Path(directory, "step_1", "model_0.pt"))
    assert storage.ls(Path(directory)) == ["tmp_step_1"]
    assert storage.ls(Path(directory, "tmp_step_1")) == ["model_0.pt"]
    assert storage.read(Path(directory, "tmp_step_1", "model_0.pt")) == b"of a killed job"
    write(storage, f"{directory}/tmp_step_1/model_0.pt", b"of the next one")
    write(storage, f"{directory}/tmp_step_1/rank_1/data.json", b"{}")
    storage.rename(Path(directory, "tmp_step_1"), Path(directory, "step_1"), is_directory=True)
    assert storage.read(Path(directory, "step_1", "model_0.pt")) == b"of the next one"
    assert storage.getsize(Path(directory, "step_1", "rank_1", "data.json")) == 2
    assert storage.isdir(Path(directory, "step_1", "rank_1"))
    assert not storage.isdir(Path(directory, "step_1", "model_0.pt"))
    assert not storage.exists(Path(directory, "tmp_step_1"))
    assert storage.ls(Path(directory)) == ["step_1"]


def test_files_are_read_by_ranges(place: tuple[str, CkptcoreStorageConfig]) -> None:
    directory, config = place
    storage = config.create_storage()
    data = os.urandom(100_000)
    write(storage, f"{directory}/tmp_step_1/data", data)
    storage.rename(Path(directory, "tmp_step_1"), Path(directory, "step_1"), is_directory=True)
    with storage.stream_read(Path(directory, "step_1", "data"), ReadArgs(pre_read_full_file=False)) as stream:
        assert stream.seek(-10, io.SEEK_END) == len(data) - 10
        assert stream.read() == data[-10:]
        assert stream.seek(5) == 5
        assert stream.read(7) == data[5:12]
    with pytest.raises(FileNotFoundError):
        storage.stream_read(Path(directory, "step_1", "missing"))


def test_a_file_exists_once_it_is_closed_without_an_error(place: tuple[str, CkptcoreStorageConfig]) -> None:
    directory, config = place
    storage = config.create_storage()
    storage.mkdir(Path(directory))
    stream = storage.stream_write(Path(directory, "half"))
    stream.write(b"x" * (9 << 20))
    with pytest.raises(RuntimeError, match="stopped"), stream:
        raise RuntimeError("stopped")
    assert not storage.exists(Path(directory, "half"))
    forgotten = storage.stream_write(Path(directory, "forgotten"))
    forgotten.write(b"x")
    del forgotten
    assert not storage.exists(Path(directory, "forgotten"))


def test_a_moved_file_replaces_a_file_but_not_a_directory(place: tuple[str, CkptcoreStorageConfig]) -> None:
    directory, config = place
    storage = config.create_storage()
    for name in ("a", "b", "directory/c"):
        write(storage, f"{directory}/{name}", name.encode())
    storage.rename(Path(directory, "a"), Path(directory, "b"))
    assert storage.read(Path(directory, "b")) == b"a"
    with pytest.raises(FileExistsError):
        storage.rename(Path(directory, "b"), Path(directory, "directory"))
    storage.delete(Path(directory, "b"))
    assert storage.ls(Path(directory)) == ["directory"]


@pytest.fixture
def bucket() -> Iterator[tuple[StrictGcs, CkptcoreStorage]]:
    """An object store with the file ``run/tmp_step_1/model_0.pt``."""
    with StrictGcs(["bucket"]) as server:
        config = CkptcoreStorageConfig(ckptcore.Context(storage={"gs": {"endpoint": server.url, "anonymous": True}}))
        storage = pickle.loads(pickle.dumps(config)).create_storage()
        write(storage, "gs://bucket/run/tmp_step_1/model_0.pt")
        yield server, storage


TEMPORARY, FINAL = Path("gs://bucket/run/tmp_step_1"), Path("gs://bucket/run/step_1")


def other_job(storage: CkptcoreStorage) -> CkptcoreStorage:
    """Return the storage of another job, such as a restarted job whose first instance is still running."""
    return CkptcoreStorageConfig(storage._context).create_storage()


def test_a_late_job_changes_no_committed_checkpoint(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    _, storage = bucket
    late = other_job(storage).stream_write(TEMPORARY / "model_0.pt")
    late.write(b"late")
    storage.rename(TEMPORARY, FINAL, is_directory=True)
    late.close()
    assert storage.read(FINAL / "model_0.pt") == b"bytes"
    for refused in (
        lambda: storage.stream_write(TEMPORARY / "x"),
        lambda: storage.mkdir(TEMPORARY),
        lambda: storage.write(FINAL / "model_0.pt", b"other"),
        lambda: storage.write(FINAL / "COMPLETE", b""),
        lambda: other_job(storage).exists(TEMPORARY),  # otherwise the other job would end without an error
    ):
        with pytest.raises(FileExistsError, match="it exists already"):
            refused()
    assert not storage.exists(TEMPORARY)
    with pytest.raises(PermissionError, match="rmdir"):
        storage.delete(FINAL / "model_0.pt")
    with pytest.raises(FileNotFoundError):
        storage.rmdir(TEMPORARY)
    assert storage.read(FINAL / "model_0.pt") == b"bytes"


def test_a_checkpoint_has_the_files_of_one_job(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    """Processes of a larger, killed job still write while the next job saves the same step."""
    _, killed = bucket
    write(killed, f"{TEMPORARY}/model_1.pt", b"of the killed job")
    storage = other_job(killed)
    for name in ("model_0.pt", "model_1.pt"):
        write(storage, f"{TEMPORARY}/{name}", b"new")
    write(killed, f"{TEMPORARY}/model_1.pt", b"late")
    write(killed, f"{TEMPORARY}/model_2.pt", b"late")
    storage.rename(TEMPORARY, FINAL, is_directory=True)
    assert storage.ls(FINAL) == ["model_0.pt", "model_1.pt"]
    assert [storage.read(FINAL / name) for name in storage.ls(FINAL)] == [b"new", b"new"]


def test_a_save_that_another_job_committed_first_is_an_error(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    _, other = bucket
    config = CkptcoreStorageConfig(other._context)
    manager = manager_of(config)

    def commit_first(arguments: Any) -> None:
        if not other.exists(FINAL):
            other.rename(TEMPORARY, FINAL, is_directory=True)

    saver: Any = manager._saver
    saver._writer._args.pre_finalize_callback = commit_first
    with pytest.raises(FileExistsError, match="it exists already"):
        manager.save(str(FINAL).replace("gs:/", "gs://"), {"step": 4})
    manager.close()


def test_directories_whose_names_begin_like_temporary_ones(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    _, storage = bucket
    run = Path("gs://bucket/tmp_experiments/run")
    for file in ("model_0.pt", "tmp_index.json"):
        write(storage, f"{run}/tmp_step_1/{file}")
    storage.rename(run / "tmp_step_1", run / "step_1", is_directory=True)
    assert storage.exists(run / "step_1") and storage.ls(run / "step_1") == ["model_0.pt", "tmp_index.json"]
    assert storage.read(run / "step_1" / "model_0.pt") == b"bytes"
    write(storage, f"{TEMPORARY}/tmp_part/model_1.pt")
    with pytest.raises(OSError, match="whose name begins with 'tmp_'"):
        storage.rename(TEMPORARY, FINAL, is_directory=True)
    with pytest.raises(OSError, match="directories below its checkpoint"):
        storage.stream_write(TEMPORARY / "a/b/c/d/e")


def test_a_damaged_list_is_named(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    _, storage = bucket
    storage.rename(TEMPORARY, FINAL, is_directory=True)
    store = storage._open("gs://bucket/run/step_1", to_write=True)
    listed = json.loads(store.get("files.ckptcore.json"))
    wrong: list[dict[str, Any]] = [{"version": 2}, {"files": {"../x": 5}}, {"files": {"x": -1}}, {"job": "../.."}]
    for data in (b"", b"[]", *[json.dumps({**listed, **change}).encode() for change in wrong]):
        store.put("files.ckptcore.json", data)
        with pytest.raises(CorruptCheckpointError, match=r"step_1/files.ckptcore.json"):
            storage.exists(FINAL)


def test_renames_that_object_stores_lack_are_refused(bucket: tuple[StrictGcs, CkptcoreStorage]) -> None:
    _, storage = bucket
    write(storage, "gs://bucket/run/other/file")
    for source, destination in ((TEMPORARY, FINAL.parent / "step_2"), (FINAL.parent / "other", FINAL)):
        with pytest.raises(OSError, match="cannot rename"):
            storage.rename(source, destination, is_directory=True)
    with pytest.raises(OSError, match="different storages"):
        storage.rename(TEMPORARY, Path("/tmp/step_1"))


@pytest.mark.system
def test_two_ranks_save_and_load(tmp_path: Path) -> None:
    with gcs_server(tmp_path) as server:
        bucket = server.create_bucket()
        for task in ("save", "load"):
            job = HERE / "torch_checkpointing_job.py", task, f"gs://{bucket}/run/step_7"
            done = run_script(2, *job, str(server.options["endpoint"]))
            assert done.returncode == 0, done.stderr[-6000:]
            assert done.stdout.count(f"{task} of a rank is done") == 2
