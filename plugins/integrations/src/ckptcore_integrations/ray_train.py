"""Ray Train: workers save a checkpoint together into the storage of the run, and report its location.

`save_and_report` replaces the local directory, the upload and ``ray.train.report`` of each worker. Ray Train owns the
checkpoints: it deletes old ones, and gives workers the newest one after a failure.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Mapping
from typing import Any

import ray.train
from pyarrow.fs import FileSystem, FileType, FSSpecHandler, PyFileSystem
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

import ckptcore
from ckptcore import Context
from ckptcore.protocols import Layout
from ckptcore_integrations.own_options import own_options

__all__ = ["checkpoint_location", "resume", "save_and_report"]

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
_SCHEMES_OF_FSSPEC = {
    "file": "", "local": "", "s3": "s3://", "s3a": "s3://", "gs": "gs://", "gcs": "gs://", "memory": "fsspec+memory://",
}  # fmt: skip
_AZURE = ".dfs.core.windows.net"
"""Suffix of host names of Azure. Other hosts, such as emulators, are an option of the Context."""


@own_options()
def save_and_report(
    step: int,
    checkpointables: Mapping[str, Any],
    metrics: Mapping[str, Any],
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> None:
    """Save a step in the storage of the run, and report it to Ray Train. Every worker calls this.

    The step is reported once it is committed. A committed step that was not reported is replaced. A reported step is
    not replaced, because Ray Train will delete it by name. So a run that goes back to an earlier step saves that step
    again as ``checkpoint_000010_2``.

    Args:
        step: number of the step, which names the directory: ``checkpoint_000010``.
        checkpointables: objects by name, as for `ckptcore.save_checkpointables`.
        metrics: numbers by name, for Ray Train. Ray Train stores the metrics of worker 0 with the checkpoint.
        layout: the on-disk format of arrays.
        context: options, such as those of the storage.

    Raises:
        ValueError: the file system of the run has no URL of ckptcore.
        CheckpointError: the save failed; every worker raises it, and nothing is reported.
    """
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(f"checkpoint_{step:06d}")
    if ray.train.get_context().get_world_rank() == 0 and _exists(storage.storage_filesystem, path):
        path = _not_reported(path)
    checkpoint = Checkpoint(broadcast_from_rank_zero(path), storage.storage_filesystem)
    ckptcore.save_checkpointables(
        checkpoint_location(checkpoint),
        checkpointables,
        layout=layout,
        overwrite="non-atomic",  # nothing refers to a checkpoint that was not reported
        metadata={"step": step},
        context=context,
    )
    ray.train.report(dict(metrics), checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _exists(filesystem: FileSystem, path: str) -> bool:
    return bool(filesystem.get_file_info(path).type != FileType.NotFound)


def _not_reported(path: str) -> str:
    """Return a path without a reported checkpoint. Wait until Ray Train has processed earlier reports."""
    known = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    reported = {directory.checkpoint.path for directory in known}
    others = (f"{path}_{number}" for number in itertools.count(2))
    return next(other for other in itertools.chain([path], others) if other not in reported)


@own_options()
def resume(
    into: Mapping[str, Any], *, layout: str | Layout = "safetensors", context: Context | None = None
) -> int | None:
    """Load the checkpoint that Ray Train gives this worker, in place. Every worker calls this before it trains.

    First checks that the objects can be saved. See `ckptcore.check_checkpointables`.

    Args:
        into: objects by name, as for `ckptcore.load_checkpointables`.
        layout: the layout of `save_and_report`. A load finds the layout of the checkpoint itself.
        context: options, such as those of the storage.

    Returns:
        The step; None if the run has no checkpoint yet.

    Raises:
        UnsupportedLeafError: lists what cannot be saved or restored.
        RankFailedError: another worker has such objects.
        PartialLoadError: an object has a state for each worker, and a different number of workers saved it. All other
            objects were loaded.
    """
    ckptcore.check_checkpointables(into, layout=layout, context=context)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    location = checkpoint_location(checkpoint)
    ckptcore.load_checkpointables(location, into=into, context=context)
    step = ckptcore.metadata(location, context=context).custom["step"]
    assert isinstance(step, int)
    return step


def checkpoint_location(checkpoint: Checkpoint) -> str:
    """Return the path or URL of a checkpoint of Ray Train, for the functions of ckptcore.

    The file system is one of pyarrow (local, S3, GCS, Azure), a subtree of one, or one of fsspec. Its options, such as
    keys or an endpoint, are not part of a URL: give them to the Context.

    Raises:
        ValueError: its file system has no URL.
    """
    return _location(checkpoint.filesystem, checkpoint.path)


def _location(filesystem: FileSystem, path: str) -> str:
    kind = filesystem.type_name
    if kind == "subtree":
        return _location(filesystem.base_fs, posixpath.join(filesystem.base_path, path.lstrip("/")))
    if isinstance(filesystem, PyFileSystem) and isinstance(filesystem.handler, FSSpecHandler):
        return _location_of_fsspec(filesystem.handler.fs, path)
    if kind == "abfs":
        return _location_of_azure(filesystem, path)
    if kind not in _SCHEMES:
        raise ValueError(
            f"{path} is on a file system {kind!r}, which has no URL that ckptcore opens: expected one of "
            f"{', '.join(_SCHEMES)}, abfs (Azure), a subtree of one, or one of fsspec. Set "
            "RunConfig(storage_path=...) to a path or such a URL"
        )
    return _SCHEMES[kind] + path


def _location_of_fsspec(filesystem: Any, path: str) -> str:
    protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else list(filesystem.protocol)
    if "dir" in protocols:
        return _location_of_fsspec(filesystem.fs, posixpath.join(filesystem.path, path.lstrip("/")))
    for protocol in protocols:
        if protocol in _SCHEMES_OF_FSSPEC:
            return _SCHEMES_OF_FSSPEC[protocol] + path
    return f"{protocols[0]}://{path.lstrip('/')}"


def _location_of_azure(filesystem: FileSystem, path: str) -> str:
    """Return a URL with the account. The account is only accessible by pickling the file system of pyarrow."""
    _, (options,) = filesystem.__reduce__()
    container, _, below = path.partition("/")
    host = f"{options['account_name']}{options['dfs_storage_authority']}"
    return f"abfs://{container}@{host}/{below}" if host.endswith(_AZURE) else f"abfs://{path}"
