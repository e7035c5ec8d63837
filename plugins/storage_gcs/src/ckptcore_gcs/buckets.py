"""A GCS bucket: the operations that differ from other object stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.copied_uploads import CopiedUpload
from ckptcore_obstore.uploads import PendingUpload, Upload

from ckptcore.protocols import PutCondition
from ckptcore_gcs.json_requests import MAX_BATCH_SIZE, JsonRequests
from ckptcore_gcs.service import GcsService
from ckptcore_gcs.uploads import CompositeUpload


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

        In the XML API, uploads in parts take no precondition ("Preconditions are not supported in the requests",
        https://cloud.google.com/storage/docs/multipart-uploads#considerations), so new objects are copied.
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
