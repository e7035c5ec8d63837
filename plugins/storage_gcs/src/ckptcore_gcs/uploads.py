"""Uploads to Google Cloud Storage: what is there at the end replaces nothing where that is asked for.

The XML API's uploads in parts take no precondition ("Preconditions are not supported in the requests",
https://cloud.google.com/storage/docs/multipart-uploads#considerations). So a new object is uploaded under a temporary name, and
gets its own by a copy inside the service that does take one; no byte is moved for that.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.uploads import Upload

from ckptcore.protocols import IF_ABSENT, Buffer
from ckptcore_gcs.json_requests import MOST_COMPONENTS, JsonRequests

__all__ = ["CompositeUpload", "NewObjectUpload", "temporary_mark"]

_INFIX: Final = ".ckptcore-upload-"
_TEMPORARY: Final = re.compile(r"\.ckptcore-upload-([0-9a-f]{32})[^/]*$")


def temporary_mark(key: str) -> str | None:
    """The mark of the upload that an object is only a piece of; None for any other object."""
    found = _TEMPORARY.search(key)
    return None if found is None else found[1]


class NewObjectUpload:
    """A new object by the XML API: parts become an object with a temporary name, which is then copied. Any thread."""

    def __init__(self, bucket: Bucket, json: JsonRequests, key: str) -> None:
        """Begin it."""
        self._bucket = bucket
        self._json = json
        self._key = key
        self._mark = uuid.uuid4().hex
        self._temporary = f"{key}{_INFIX}{self._mark}"
        self._upload = Upload.begin(bucket, self._temporary)
        self._is_whole = False

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1; returns its tag."""
        return self._upload.put_part(number, data)

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Make the object; one that is there stays, and the failure is of kind CONDITION: then this can be called again."""
        if not self._is_whole:
            self._upload.complete(tags, if_absent=False)
            self._is_whole = True
        self._json.copy(self._temporary, self._key, IF_ABSENT if if_absent else None, self._mark)
        self._bucket.delete([self._temporary])

    def abort(self) -> None:
        """Give it up."""
        if not self._is_whole:
            self._upload.abort()
        self._bucket.delete([self._temporary])


class CompositeUpload:
    """An object that is composed of objects with temporary names, by the JSON API. Any thread.

    A composition takes a condition, and up to 32 objects: more of them are composed in several steps. Emulators that pass over
    the condition are the reason that it also looks right before.
    """

    def __init__(self, bucket: Bucket, json: JsonRequests, key: str) -> None:
        """Begin nothing: the first part is the first request."""
        self._bucket = bucket
        self._json = json
        self._key = key
        self._mark = uuid.uuid4().hex
        self._pieces: set[str] = set()

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1; returns its name."""
        name = self._named(f"0-{number:05d}")
        self._bucket.put(name, data if isinstance(data, bytes) else memoryview(data), None)
        return name

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Make the object of its parts."""
        if if_absent and self._is_there():
            raise RequestFailed(Failure(FailureKind.CONDITION, None, "", "there is an object of the name"))
        pieces: Sequence[str] = [name for _, name in sorted(tags.items())]
        level = 0
        while len(pieces) > MOST_COMPONENTS:
            level += 1
            composed = []
            for number, start in enumerate(range(0, len(pieces), MOST_COMPONENTS), 1):
                name = self._named(f"{level}-{number:05d}")
                self._json.compose(name, pieces[start : start + MOST_COMPONENTS], None, self._mark)
                composed.append(name)
            pieces = composed
        self._json.compose(self._key, pieces, IF_ABSENT if if_absent else None, self._mark)
        self._bucket.delete(sorted(self._pieces))

    def abort(self) -> None:
        """Give it up."""
        self._bucket.delete(sorted(self._pieces))

    def _is_there(self) -> bool:
        try:
            self._bucket.size(self._key)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:
                return False
            raise
        return True

    def _named(self, suffix: str) -> str:
        name = f"{self._key}{_INFIX}{self._mark}-{suffix}"
        self._pieces.add(name)
        return name
