"""Labels of versions: the run, the number, the training step, and digests with which engines compare weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.commit.location import AnyLocation, resolve_location
from ckptcore.commit.root import CommittedRoot
from ckptcore.commit.stored_root import parse_root, root_bytes
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, UncommittedCheckpointError
from ckptcore.model.tree import JSON
from ckptcore.runtime import runtime_of

_KEY: Final = "version"
"""The key of the labels in the metadata of a checkpoint."""


@dataclass(frozen=True, slots=True)
class VersionLabels:
    """The labels of a version.

    Attributes:
        run: the name of the run that published it.
        number: its number.
        step: the training step of its weights; None if unknown.
        digest: the SHA-256 of its root, in hex digits. The root has the checksums of all files.
        tensors: by name, the SHA-256 of the elements of each array: little endian, in row-major order, in hex digits.
            Names are those in files: the keys of the path, joined by dots. Empty unless the version was published with
            digests.
    """

    run: str
    number: int
    step: int | None
    digest: str
    tensors: Mapping[str, str] = field(default_factory=dict)


def labels(version: AnyLocation, *, context: Context | None = None) -> VersionLabels:
    """Return the labels of a version. Reads its root only.

    Args:
        version: the path or URL of the version.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: there is no version.
        CorruptCheckpointError: its root is damaged, or it is a checkpoint that is no version.
    """
    location = resolve_location(version, runtime_of(context or default_context()).storages)
    data = root_bytes(location.store)
    if data is None:
        raise CheckpointNotFoundError(f"{location.display} has no version: check the location")
    root = parse_root(location.store, data, location.display)
    if not isinstance(root, CommittedRoot):
        raise UncommittedCheckpointError(f"{location.display} is being published, or was interrupted. Read another one")
    stored = labels_in(root.custom)
    if stored is None:
        raise CorruptCheckpointError(
            f"{location.display} is a checkpoint without the labels of a version: publish it with a Publisher"
        )
    run, number, step, tensors = stored
    return VersionLabels(run, number, step, hashlib.sha256(data).hexdigest(), tensors)


def labels_in(custom: Mapping[str, JSON]) -> tuple[str, int, int | None, Mapping[str, str]] | None:
    """Return the run, the number, the step and the digests of arrays in metadata; None if they are not of a version."""
    stored: Any = custom.get(_KEY)
    if not isinstance(stored, dict):
        return None
    run, number, step = (stored.get(name) for name in ("run", "number", "step"))
    tensors: Any = stored.get("sha256", {})
    if not isinstance(run, str) or type(number) is not int or not (step is None or type(step) is int):
        return None
    if not isinstance(tensors, dict) or not all(isinstance(digest, str) for digest in tensors.values()):
        return None
    return run, number, step, tensors


def metadata_of(run: str, number: int, step: int | None, tensors: Mapping[str, str]) -> Mapping[str, JSON]:
    """Return the metadata of a version, with which `labels` finds its labels."""
    stored: dict[str, JSON] = {"run": run, "number": number, "step": step}
    if tensors:
        stored["sha256"] = dict(sorted(tensors.items()))
    return {_KEY: stored}
