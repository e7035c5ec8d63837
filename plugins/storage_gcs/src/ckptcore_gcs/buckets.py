"""Buckets of GCS: their URLs, and the operations that differ from other object stores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.storage import ObjectStoreDirectory, OpenBuckets
from ckptcore_obstore.uploads import TEMPORARY_INFIX, CopiedUpload, PendingUpload, Upload

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import IF_ABSENT, Buffer, PutCondition, StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_gcs.json_requests import MAX_BATCH_SIZE, MAX_COMPONENTS, JsonRequests
from ckptcore_gcs.service import GcsService
from ckptcore_gcs.settings import Settings, settings_of


class CompositeUpload:
    """An object composed of temporary objects by the JSON API. Thread-safe.

    A composition has at most 32 sources, so more sources are composed in several levels. It accepts
    a condition. Some emulators ignore the condition, so the upload also checks that the object is
    absent.
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
        """Compose the object of its parts, and delete the temporary objects.

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
                # No condition: the name contains the id of this upload, so no other process writes
                # it.
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


class GcsBucket(Bucket):
    """A bucket of GCS. Thread-safe. Methods raise `RequestFailed` if a request fails."""

    has_temporary = True

    def __init__(self, service: GcsService) -> None:
        """Initialise without sending a request."""
        super().__init__(service)
        self._gcs = service
        self.json = JsonRequests(self, service.settings)

    def _put(self, key: str, data: bytes | memoryview, condition: PutCondition | None, put_id: str) -> str:
        if self._gcs.settings.uploads == "parts":
            return super()._put(key, data, condition, put_id)
        return self.json.put(key, data, condition, put_id)

    def begin_upload(self, key: str, *, if_absent: bool) -> PendingUpload:
        """Begin an upload in parts, with the method of the option ``uploads``.

        In the XML API, uploads in parts accept no precondition ("Preconditions are not supported in
        the requests", https://cloud.google.com/storage/docs/multipart-uploads#considerations), so a
        new object is uploaded under another name, and then copied.
        """
        if self._gcs.settings.uploads == "composite":
            return CompositeUpload(self, self.json, key)
        if if_absent:
            return CopiedUpload(self, key, partial(Upload.begin, self), self.json.copy)
        return super().begin_upload(key, if_absent=False)

    def delete(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Delete objects in batches. A missing object is not an error.

        `check` is called before each try.
        """
        for start in range(0, len(keys), MAX_BATCH_SIZE):
            self.json.delete(keys[start : start + MAX_BATCH_SIZE], check)


_SCHEMES: Final = ("gs", "gcs")


class GcsBuckets:
    """Cache of the buckets that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._buckets = OpenBuckets[Settings, GcsBucket]()

    def open(self, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``gs://BUCKET`` or ``gs://BUCKET/DIRECTORY``. Creates nothing and makes no request.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        scheme, separator, path = url.partition("://")
        if not separator or scheme.lower() not in _SCHEMES:
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: expected a URL such as gs://bucket/directory"
            )
        name, _, directory = path.partition("/")
        if not name or not name.isascii() or not all(char.isalnum() or char in ".-_" for char in name):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid bucket name; expected a URL such as gs://bucket/directory"
            )
        settings = settings_of(name, options.config)
        bucket = self._buckets.get(settings, lambda: GcsBucket(GcsService(settings)))
        return ObjectStoreDirectory(bucket, directory.rstrip("/"))
