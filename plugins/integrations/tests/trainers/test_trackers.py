"""References, uploads and digests with W&B and MLflow. W&B runs offline, and MLflow uses a local directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlflow
import numpy as np
import pytest
import wandb
from ckptcore_integrations import mlflow as with_mlflow
from ckptcore_integrations import wandb as with_wandb

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

WEIGHTS = {"w": np.arange(1 << 20, dtype=np.float32)}
SMALL_BYTES = 64 << 10
"""A limit for the bytes that a tracker writes for a reference. The weights are much larger."""


@pytest.fixture(autouse=True)
def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the trackers write all of their files to one directory."""
    tracker = tmp_path / "tracker"
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tracker))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracker.mkdir()
    mlflow.set_tracking_uri((tracker / "mlruns").as_uri())
    yield
    mlflow.end_run()
    mlflow.set_tracking_uri(None)
    wandb.teardown()


def written(tmp_path: Path) -> int:
    """Return the number of bytes in the directory of the trackers."""
    return sum(path.stat().st_size for path in (tmp_path / "tracker").rglob("*") if path.is_file())


def save(path: Path | str, **options: Any) -> str:
    """Save the weights, and return the location."""
    ckptcore.save(path, WEIGHTS, **options)
    return os.fspath(path)


def log(tracker: ModuleType, location: str, **options: Any) -> Any:
    """Log a checkpoint with a tracker."""
    if tracker is with_mlflow:
        with mlflow.start_run():
            return with_mlflow.log_checkpoint(location, "weights", **options)
    artifact = with_wandb.checkpoint_artifact(location, "weights", **options)
    with wandb.init(project="digits") as run:
        run.log_artifact(artifact, aliases=["best"])
    return artifact


def recorded(logged: Any) -> dict[str, str]:
    """Return the entries that a tracker recorded."""
    if isinstance(logged, wandb.Artifact):
        entries: dict[str, str] = logged.metadata["ckptcore"]
        return entries
    tags = mlflow.get_logged_model(logged.model_id).tags
    return {tag.removeprefix("ckptcore."): text for tag, text in tags.items() if tag.startswith("ckptcore.")}


both = pytest.mark.parametrize("tracker", [with_wandb, with_mlflow], ids=["wandb", "mlflow"])


@both
@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_a_reference_copies_no_array(tmp_path: Path, tracker: ModuleType, layout: str) -> None:
    location = save(tmp_path / "run" / "1", layout=layout)
    before = written(tmp_path)
    logged = log(tracker, location)
    assert 0 < written(tmp_path) - before < SMALL_BYTES
    metadata = ckptcore.metadata(location)
    assert recorded(logged) == {
        "location": location,
        "digest": metadata.digest,
        "save_id": metadata.save_id,
        "nbytes": str(4 << 20),
        "uploaded": "no",
    }
    assert tracker.checkpoint_location(logged) == location
    assert np.array_equal(ckptcore.load(location)["w"], WEIGHTS["w"])


@both
def test_a_checkpoint_that_was_replaced_is_refused(tmp_path: Path, tracker: ModuleType) -> None:
    location = save(tmp_path / "1")
    logged = log(tracker, location)
    ckptcore.copy(location, tmp_path / "backup")
    ckptcore.save(location, {"w": WEIGHTS["w"] + 1}, overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match=r"changed. ckptcore.copy\(backup, location, overwrite=True\)"):
        tracker.checkpoint_location(logged)
    ckptcore.copy(tmp_path / "backup", location, overwrite=True)
    assert np.array_equal(ckptcore.load(tracker.checkpoint_location(logged))["w"], WEIGHTS["w"])
    ckptcore.delete(location)
    with pytest.raises(CheckpointNotFoundError):
        tracker.checkpoint_location(logged)


@both
def test_several_objects_on_another_storage(tracker: ModuleType) -> None:
    location = f"memory://trackers/{tracker.__name__}"
    ckptcore.save_checkpointables(location, {"model": WEIGHTS, "other": {"n": 1}})
    logged = log(tracker, location)
    assert tracker.checkpoint_location(logged) == location
    ckptcore.delete(f"{location}/other")
    with pytest.raises(CheckpointNotFoundError, match="it was replaced or changed"):
        tracker.checkpoint_location(logged)


@both
def test_locations_that_cannot_be_logged_are_refused(tmp_path: Path, tracker: ModuleType) -> None:
    plain = tmp_path / "plain"
    save(plain, layout=ckptcore.SafetensorsLayout(standalone=True))
    (plain / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"written by other software.*ckptcore\.copy"):
        log(tracker, os.fspath(plain))
    ckptcore.copy(plain, tmp_path / "ours", layout="safetensors")
    copied = tracker.checkpoint_location(log(tracker, os.fspath(tmp_path / "ours")))
    assert np.array_equal(ckptcore.load(copied)["w"], WEIGHTS["w"])
    with pytest.raises(CheckpointNotFoundError):
        log(tracker, os.fspath(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"https://me:\*\*\*@host/x has a secret") as raised:
        log(tracker, "https://me:word@host/x")
    assert "word" not in str(raised.value)


def test_reserved_names_of_metadata_and_tags_are_refused(tmp_path: Path) -> None:
    location = save(tmp_path / "1")
    with pytest.raises(ValueError, match="metadata has an entry 'ckptcore', which .*: choose another name"):
        with_wandb.checkpoint_artifact(location, "weights", metadata={"ckptcore": 1})
    artifact = with_wandb.checkpoint_artifact(location, "weights", metadata={"other": 1})
    assert artifact.metadata["other"] == 1
    assert with_wandb.checkpoint_location(artifact) == location
    with pytest.raises(ValueError, match="tag 'ckptcore.digest': tags that begin with 'ckptcore.' .*; rename it"):
        with_mlflow.log_checkpoint(location, tags={"ckptcore.digest": "x"})
    with mlflow.start_run():
        model = with_mlflow.log_checkpoint(location, "weights", tags={"digest": "x"})
    assert mlflow.get_logged_model(model.model_id).tags["digest"] == "x"
    assert with_mlflow.checkpoint_location(model) == location


@both
def test_an_update_is_not_uploaded(tmp_path: Path, tracker: ModuleType) -> None:
    save(tmp_path / "1")
    update = os.fspath(tmp_path / "2")
    ckptcore.save(update, {"n": np.ones(1)}, strategy=ckptcore.Update(base=tmp_path / "1"))
    with pytest.raises(CheckpointError, match=r"it is an update .* ckptcore.copy\(source, destination\), and upload"):
        log(tracker, update, upload=True)
    assert tracker.checkpoint_location(log(tracker, update)) == update
    complete = os.fspath(tmp_path / "complete")
    ckptcore.copy(update, complete)
    assert recorded(log(tracker, complete, upload=True))["uploaded"] == "yes"
    assert list(ckptcore.load(complete)) == list(ckptcore.load(update))


@both
def test_a_replacement_during_the_upload_is_an_error(
    tmp_path: Path, tracker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, copy = save(tmp_path / "1"), ckptcore.copy

    def copy_late(*arguments: Any, **options: Any) -> Any:
        save(location, overwrite=True)
        return copy(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ckptcore, "copy", copy_late)
        with pytest.raises(CheckpointNotFoundError, match="it was replaced or changed"):
            log(tracker, location, upload=True)
    assert recorded(log(tracker, location, upload=True))["uploaded"] == "yes"


@both
def test_damage_is_not_uploaded(tmp_path: Path, tracker: ModuleType) -> None:
    location = save(tmp_path / "1")
    data = tmp_path / "1" / "model.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptCheckpointError):
        log(tracker, location, upload=True)


def test_wandb_references(tmp_path: Path) -> None:
    location = save(tmp_path / "a b" / "1")
    artifact = log(with_wandb, location, description="of digits", metadata={"loss": 0.5})
    assert artifact.type == "model" and artifact.description == "of digits" and artifact.metadata["loss"] == 0.5
    entries = artifact.manifest.entries
    assert sorted(entries) == ["checkpoint/checkpoint.json", "checkpoint/model.safetensors", "ckptcore.json"]
    assert {entry.ref is None for name, entry in entries.items() if name != "ckptcore.json"} == {False}
    assert f"{tmp_path.as_uri()}/a%20b/1" in entries["checkpoint/model.safetensors"].ref
    save(location, overwrite=True)
    other = with_wandb.checkpoint_artifact(location, "weights")
    assert other.digest != artifact.digest  # equal references and sizes must not hide the new version
    with pytest.raises(ValueError, match="root: nothing is downloaded"):
        with_wandb.checkpoint_location(artifact, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="no valid record of a checkpoint there: log it again"):
        with_wandb.checkpoint_location(wandb.Artifact("other", "model"))
    assert with_wandb.checkpoint_location(log(with_wandb, location)) == location


def test_wandb_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = save(tmp_path / "1")
    artifact = log(with_wandb, location, upload=True)
    assert written(tmp_path) >= WEIGHTS["w"].nbytes
    entries = artifact.manifest.entries
    assert sorted(entries) == ["checkpoint/checkpoint.json", "checkpoint/model.safetensors", "ckptcore.json"]
    assert {entry.ref for entry in entries.values()} == {None}
    shutil.rmtree(location)

    def download(artifact: wandb.Artifact, root: str, path_prefix: str) -> str:
        """Copy the staged files, because no server exists for a download."""
        for name, entry in artifact.manifest.entries.items():
            if name.startswith(path_prefix):
                (Path(root) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(entry.local_path, Path(root) / name)
        return root

    monkeypatch.setattr(wandb.Artifact, "download", download)
    downloaded = with_wandb.checkpoint_location(artifact, tmp_path / "down")
    assert downloaded == os.fspath(tmp_path / "down" / "checkpoint")
    assert np.array_equal(ckptcore.load(downloaded)["w"], WEIGHTS["w"])


def test_mlflow_models(tmp_path: Path) -> None:
    location = save(tmp_path / "1")
    with mlflow.start_run() as run:
        model = with_mlflow.log_checkpoint(location, "weights", tags={"stage": "x"}, params={"rate": "1"})
        mlflow.log_metric("loss", 0.25, step=3, model_id=model.model_id)
    logged_model = mlflow.get_logged_model(model.model_id)
    assert (
        logged_model.tags["stage"] == "x"
        and logged_model.params == {"rate": "1"}
        and logged_model.source_run_id == run.info.run_id
    )
    assert [(metric.key, metric.value, metric.step) for metric in logged_model.metrics] == [("loss", 0.25, 3)]
    assert with_mlflow.checkpoint_location(model.model_id) == location
    with pytest.raises(ValueError, match="dst_path: nothing is downloaded"):
        with_mlflow.checkpoint_location(model, tmp_path)
    with mlflow.start_run():
        other = mlflow.create_external_model("other")
    with pytest.raises(CorruptCheckpointError, match="no valid record"):
        with_mlflow.checkpoint_location(other)


def test_mlflow_uploads(tmp_path: Path) -> None:
    location = save(tmp_path / "1")
    model = log(with_mlflow, location, upload=True)
    assert str(model.status) == "READY"
    assert written(tmp_path) >= WEIGHTS["w"].nbytes
    shutil.rmtree(location)
    (tmp_path / "down").mkdir()
    for target in (None, tmp_path / "down"):
        downloaded = with_mlflow.checkpoint_location(model, target)
        assert np.array_equal(ckptcore.load(downloaded)["w"], WEIGHTS["w"])
        assert ckptcore.verify(downloaded).ok
    assert Path(downloaded).is_relative_to(tmp_path / "down")


def test_a_failed_upload_is_marked_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no connection")

    location = save(tmp_path / "1")
    monkeypatch.setattr(mlflow.MlflowClient, "log_model_artifacts", fail)
    with mlflow.start_run() as run, pytest.raises(OSError, match="no connection"):
        with_mlflow.log_checkpoint(location, "weights", upload=True)
    [model] = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    assert str(model.status) == "FAILED"


def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[4] / "docs/how-to/with-wandb-and-mlflow.md"
    module = page_module(page, "trainers")
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, page, module)
