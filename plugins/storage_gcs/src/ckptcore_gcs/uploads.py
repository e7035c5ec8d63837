"""Uploads of large objects, with a condition on the final object.

In the XML API, uploads in parts take no precondition ("Preconditions are not supported in the
requests", https://cloud.google.com/storage/docs/multipart-uploads#considerations). A new object is
therefore uploaded under a temporary name and then copied inside the service, with a condition. The
copy moves no data.
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
from ckptcore_gcs.json_requests import MAX_COMPONENTS, JsonRequests

__all__ = ["CompositeUpload", "NewObjectUpload", "upload_id_of"]

_INFIX: Final = ".ckptcore-upload-"
_TEMPORARY: Final = re.compile(r"\.ckptcore-upload-([0-9a-f]{32})[^/]*$")


def upload_id_of(key: str) -> str | None:
    """Return the upload id in the key of a temporary object, or None for any other key."""
    found = _TEMPORARY.search(key)
    return None if found is None else found[1]


class NewObjectUpload:
    """A conditional upload by the XML API. Thread-safe.

    Parts become a temporary object, which is then copied.
    """

    def __init__(self, bucket: Bucket, json: JsonRequests, key: str) -> None:
        """Begin the upload."""
        self._bucket = bucket
        self._json = json
        self._key = key
        self._put_id = uuid.uuid4().hex
        self._temporary = f"{key}{_INFIX}{self._put_id}"
        self._upload = Upload.begin(bucket, self._temporary)
        self._is_whole = False

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1. Return its tag."""
        return self._upload.put_part(number, data)

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Create the object.

        If the object exists, it stays, the failure has kind CONDITION, and this can be called
        again.
        """
        if not self._is_whole:
            self._upload.complete(tags, if_absent=False)
            self._is_whole = True
        self._json.copy(self._temporary, self._key, IF_ABSENT if if_absent else None, self._put_id)
        self._bucket.delete([self._temporary])

    def abort(self) -> None:
        """Abort the upload and delete the temporary object."""
        if not self._is_whole:
            self._upload.abort()
        self._bucket.delete([self._temporary])


class CompositeUpload:
    """An object composed of temporary objects by the JSON API. Thread-safe.

    A composition takes a condition and at most 32 sources, so larger numbers are composed in
    several levels. Some emulators ignore the condition, so the upload also checks that the object
    is absent.
    """

    def __init__(self, bucket: Bucket, json: JsonRequests, key: str) -> None:
        """Initialise without sending a request."""
        self._bucket = bucket
        self._json = json
        self._key = key
        self._put_id = uuid.uuid4().hex
        self._pieces: set[str] = set()

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1. Return the name of its temporary object, which `complete` takes as its tag."""
        name = self._named(f"0-{number:05d}")
        self._bucket.put(name, data if isinstance(data, bytes) else memoryview(data), None)
        return name

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Compose the object of its parts, and delete them.

        See `ckptcore_obstore.uploads.PendingUpload.complete`.
        """
        if if_absent and self._is_there():
            raise RequestFailed(Failure(FailureKind.CONDITION, None, "", "the object exists"))
        pieces: Sequence[str] = [name for _, name in sorted(tags.items())]
        level = 0
        while len(pieces) > MAX_COMPONENTS:
            level += 1
            composed = []
            for number, start in enumerate(range(0, len(pieces), MAX_COMPONENTS), 1):
                name = self._named(f"{level}-{number:05d}")
                self._json.compose(name, pieces[start : start + MAX_COMPONENTS], None, self._put_id)
                composed.append(name)
            pieces = composed
        self._json.compose(self._key, pieces, IF_ABSENT if if_absent else None, self._put_id)
        self._bucket.delete(sorted(self._pieces))

    def abort(self) -> None:
        """Delete the temporary objects."""
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
        name = f"{self._key}{_INFIX}{self._put_id}-{suffix}"
        self._pieces.add(name)
        return name
