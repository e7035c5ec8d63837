"""MLflow: logged models that refer to checkpoints, or contain them.

`log_checkpoint` creates a `LoggedModel` with the location and the digest of a checkpoint as tags. It copies arrays only
with ``upload=True``. `checkpoint_location` checks the digest and returns the location.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.entities import LoggedModel

from ckptcore import Context
from ckptcore_integrations.references import Reference, uploadable_copy

__all__ = ["checkpoint_location", "log_checkpoint"]

_PREFIX = "ckptcore."
_NAME = "checkpoint"


def log_checkpoint(
    location: str | os.PathLike[str],
    name: str | None = None,
    *,
    tags: Mapping[str, str] | None = None,
    upload: bool = False,
    context: Context | None = None,
    **options: Any,
) -> LoggedModel:
    """Log a committed checkpoint as a model of the active run.

    The model has the tags ``ckptcore.location``, ``ckptcore.digest``, ``ckptcore.save_id`` and ``ckptcore.nbytes``. To
    log metrics of the model, use ``mlflow.log_metric(..., model_id=model.model_id)``.

    Args:
        location: a path or URL. A path is recorded as an absolute path: other hosts must see it there.
        name: the name of the model.
        tags: other tags.
        upload: True to upload a verified copy of all files.
        context: options, such as those of storages. They are not recorded.
        options: other arguments of `mlflow.create_external_model`: ``source_run_id``, ``params``, ``model_type``,
            ``experiment_id``.

    Raises:
        CheckpointError: there is no checkpoint, or other software wrote it. With `upload`, also raised if the
            checkpoint is damaged, or refers to arrays in other checkpoints.
        ValueError: the URL has a secret, or a tag begins with ``ckptcore.``.
    """
    own = [tag for tag in tags or () if tag.startswith(_PREFIX)]
    if own:
        raise ValueError(f"tag {own[0]!r}: tags that begin with {_PREFIX!r} are written by this function; rename it")
    reference = Reference.to(location, context, upload=upload)
    described = {f"{_PREFIX}{field}": text for field, text in reference._asdict().items()}
    options |= {"name": name, "tags": {**(tags or {}), **described}}
    if not upload:
        return mlflow.create_external_model(**options)
    with uploadable_copy(reference, context) as copied:
        model = mlflow.initialize_logged_model(**options)
        try:
            mlflow.MlflowClient().log_model_artifacts(model.model_id, copied, _NAME)
        except BaseException:
            mlflow.finalize_logged_model(model.model_id, "FAILED")
            raise
        return mlflow.finalize_logged_model(model.model_id, "READY")


def checkpoint_location(
    model: LoggedModel | str, dst_path: str | os.PathLike[str] | None = None, *, context: Context | None = None
) -> str:
    """Return the location of the checkpoint of a model, after checking that it still has the recorded digest.

    An uploaded checkpoint is downloaded first, unless the artifacts of MLflow are in a local directory.

    Args:
        model: a model of `log_checkpoint`, or its id.
        dst_path: the directory to download to; see `mlflow.artifacts.download_artifacts`.
        context: options of the load.

    Returns:
        A path or URL for `ckptcore.load`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at the recorded location, or a different one.
        CorruptCheckpointError: the model has no valid record, or the checkpoint is damaged.
        ValueError: `dst_path` is passed, and the model has only a reference.
    """
    model_id = model.model_id if isinstance(model, LoggedModel) else model
    logged = mlflow.get_logged_model(model_id)
    reference = Reference.from_record({tag.removeprefix(_PREFIX): text for tag, text in logged.tags.items()})
    if reference.has_bytes:
        target = None if dst_path is None else os.fspath(dst_path)
        downloaded = mlflow.artifacts.download_artifacts(artifact_uri=f"models:/{model_id}", dst_path=target)
        return reference.check(os.path.join(downloaded, _NAME), context)
    if dst_path is not None:
        raise ValueError(f"dst_path: nothing is downloaded, because the model refers to {reference.location}")
    return reference.check(reference.location, context)
