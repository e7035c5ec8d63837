"""Uploads of large objects as compositions of small ones, with a condition on the final object."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.uploads import TEMPORARY_INFIX

from ckptcore.protocols import IF_ABSENT, Buffer
from ckptcore_gcs.json_requests import MAX_COMPONENTS, JsonRequests


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
        self._bucket.delete_temporary(sorted(self._pieces), is_done=True)

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
        name = f"{self._key}{TEMPORARY_INFIX}{self._put_id}-{suffix}"
        self._pieces.add(name)
        return name
