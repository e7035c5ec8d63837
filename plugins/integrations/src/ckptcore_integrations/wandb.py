"""Weights & Biases: artifacts that refer to checkpoints, or contain them.

`checkpoint_artifact` creates an artifact with the location and the digest of a checkpoint. It copies arrays only with
``upload=True``. `checkpoint_location` checks the digest and returns the location.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from wandb import Artifact

from ckptcore import Context
from ckptcore_integrations.references import Reference, uploadable_copy

__all__ = ["checkpoint_artifact", "checkpoint_location"]

_KEY = "ckptcore"
_RECORD = "ckptcore.json"
_NAME = "checkpoint"


def checkpoint_artifact(
    location: str | os.PathLike[str],
    name: str,
    *,
    type: str = "model",
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    upload: bool = False,
    context: Context | None = None,
) -> Artifact:
    """Create an artifact of a committed checkpoint. Pass it to ``run.log_artifact``.

    The artifact refers to the checkpoint by its URI. The entry ``ckptcore`` of its metadata, and its file
    ``ckptcore.json``, have the location, the digest, the save id and the size in bytes. So each save is a new version
    of the artifact, even at the same location.

    Args:
        location: a path or URL. A path is recorded as an absolute path: other hosts must see it there.
        name, type, description: see `wandb.Artifact`.
        metadata: other metadata of the artifact.
        upload: True to put a verified copy of all files into the artifact instead of a reference.
        context: options, such as those of storages. They are not recorded.

    Raises:
        CheckpointError: there is no checkpoint, or other software wrote it. With `upload`, also raised if the
            checkpoint is damaged, or refers to arrays in other checkpoints.
        ValueError: the URL has a secret, or the metadata has an entry ``ckptcore``.
    """
    if metadata is not None and _KEY in metadata:
        raise ValueError(f"metadata has an entry {_KEY!r}, which this function writes: choose another name")
    reference = Reference.to(location, context, upload=upload)
    record = reference._asdict()
    artifact = Artifact(name, type, description, {**(metadata or {}), _KEY: record})
    with artifact.new_file(_RECORD) as file:
        json.dump(record, file)
    if upload:
        with uploadable_copy(reference, context) as copied:
            artifact.add_dir(copied, _NAME)
    else:
        artifact.add_reference(reference.uri, _NAME, checksum=False)
    return artifact


def checkpoint_location(
    artifact: Artifact, root: str | os.PathLike[str] | None = None, *, context: Context | None = None
) -> str:
    """Return the location of the checkpoint of an artifact, after checking that it still has the recorded digest.

    An artifact that contains the files is downloaded first.

    Args:
        artifact: an artifact of `checkpoint_artifact`, for example from ``run.use_artifact("name:latest")``.
        root: the directory to download to; see `wandb.Artifact.download`.
        context: options of the load.

    Returns:
        A path or URL for `ckptcore.load`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at the recorded location, or a different one.
        CorruptCheckpointError: the artifact has no valid record, or the checkpoint is damaged.
        ValueError: `root` is passed, and the artifact has only a reference.
    """
    reference = Reference.from_record(artifact.metadata.get(_KEY))
    if reference.has_bytes:
        downloaded = artifact.download(None if root is None else os.fspath(root), path_prefix=_NAME)
        return reference.check(os.path.join(downloaded, _NAME), context)
    if root is not None:
        raise ValueError(f"root: nothing is downloaded, because the artifact refers to {reference.location}")
    return reference.check(reference.location, context)
