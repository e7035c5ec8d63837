"""References to checkpoints, as experiment trackers record them, with a check that the checkpoint is still the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckptcore.redaction import redacted_location
from ckptcore.temporary import temporary_directory
from ckptcore.training import expanded_location

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


class Reference(NamedTuple):
    """A checkpoint, described by text that a tracker stores.

    Attributes:
        location: an absolute path, or a URL. If the bytes were uploaded, the location that they were read from.
        digest: see `ckptcore.results.CheckpointMetadata`.
        save_id: the id of its save.
        nbytes: bytes of all arrays, as digits.
        uploaded: ``"yes"`` if the tracker has the bytes, else ``"no"``.
    """

    location: str
    digest: str
    save_id: str
    nbytes: str
    uploaded: str

    @classmethod
    def to(cls, location: str | os.PathLike[str], context: Context | None, *, upload: bool) -> Self:
        """Read the digest of a checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, or other software wrote it.
            ValueError: the URL has a secret.
        """
        text = expanded_location(location)
        if not _URL.match(text):
            text = os.path.abspath(text)
        elif redacted_location(text) != text:
            raise ValueError(
                f"{redacted_location(text)} has a secret, which the tracker would store: leave it out, and pass "
                "context=Context(storage={scheme: options})"
            )
        metadata = ckptcore.metadata(text, context=context)
        if metadata.digest is None or metadata.save_id is None:
            raise CheckpointError(
                f"{text} was written by other software, and has no digest to record. Make a checkpoint of it with "
                "ckptcore.copy(source, destination, layout=...)"
            )
        return cls(text, metadata.digest, metadata.save_id, str(metadata.nbytes), "yes" if upload else "no")

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Return the reference that a tracker recorded.

        Raises:
            CorruptCheckpointError: the record is missing or invalid.
        """
        fields = [record.get(name) for name in cls._fields] if isinstance(record, Mapping) else [None]
        if not all(isinstance(value, str) for value in fields):
            raise CorruptCheckpointError("the tracker has no valid record of a checkpoint there: log it again")
        return cls(*fields)

    @property
    def uri(self) -> str:
        """The location as a URL."""
        return self.location if _URL.match(self.location) else Path(self.location).as_uri()

    @property
    def has_bytes(self) -> bool:
        """True if the tracker has the bytes."""
        return self.uploaded == "yes"

    def check(self, location: str, context: Context | None) -> str:
        """Return the location if the recorded checkpoint is still there. Reads no array.

        Raises:
            CheckpointNotFoundError: the location has a checkpoint of another save.
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        metadata = ckptcore.metadata(location, context=context)
        if metadata.digest != self.digest:
            raise CheckpointNotFoundError(
                f"{location} has the save {metadata.save_id} with digest {metadata.digest}, and not the recorded save "
                f"{self.save_id} with digest {self.digest}: it was replaced or changed. ckptcore.copy(backup, "
                "location, overwrite=True) brings the recorded save back from a copy, and deletes the present one"
            )
        return location


@contextmanager
def uploadable_copy(reference: Reference, context: Context | None) -> Iterator[str]:
    """Copy a checkpoint to a local directory, with every byte verified. Removes the copy at the end.

    Raises:
        CheckpointError: the checkpoint is damaged or was replaced, or it is an update.
    """
    with temporary_directory(f"of {reference.location}") as directory:
        copied = os.path.join(directory, "checkpoint")
        ckptcore.copy(reference.location, copied, context=context)
        if ckptcore.metadata(copied, context=context).digest != reference.digest:
            reference.check(reference.location, context)
            raise CheckpointError(
                f"{reference.location} cannot be uploaded: it is an update with arrays in other checkpoints. Make a "
                "complete checkpoint with ckptcore.copy(source, destination), and upload that"
            )
        yield copied
