"""A container of Azure Blob Storage: the operations that differ from other object stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final
from urllib.parse import quote, urlencode

from ckptcore_obstore.bucket_requests import PUT_ID_KEY
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.copied_uploads import CopiedUpload
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.listing import ListPage
from ckptcore_obstore.uploads import TEMPORARY_INFIX, PendingUpload

from ckptcore.protocols import PutCondition
from ckptcore_azure.listing import list_blobs
from ckptcore_azure.requests import AzureRequests
from ckptcore_azure.service import AzureService
from ckptcore_azure.uploads import BlockUpload

_MAX_BATCH_SIZE: Final = 256
"""https://learn.microsoft.com/rest/api/storageservices/blob-batch"""

_MAX_PARTS: Final = 254
_MAX_LENGTH: Final = 1024 - len(TEMPORARY_INFIX) - 32
"""Limits of a key, the latter without what `CopiedUpload` adds."""

_COPY_STATUS: Final = "x-ms-copy-status"
_FIRST_COPY_SECONDS: Final = 0.05
_MAX_COPY_SECONDS: Final = 2.0
_ALL_COPY_SECONDS: Final = 3600.0
"""Time between two looks at a running copy, and in total. A copy in one account is usually done with its request."""


class AzureContainer(Bucket):
    """A container. Thread-safe. Methods raise `RequestFailed` if a request fails."""

    has_temporary = True

    def __init__(self, service: AzureService) -> None:
        """Initialise without sending a request."""
        super().__init__(service)
        self._azure = service
        self.plain = AzureRequests(service)

    def begin_upload(self, key: str, *, if_absent: bool) -> PendingUpload:
        """Begin an upload of blocks.

        A put of another process to the same key would discard them. New blobs are therefore uploaded under another
        name, and copied.
        """
        return CopiedUpload(self, key, partial(BlockUpload, self), self._copy) if if_absent else BlockUpload(self, key)

    def _copy(self, source: str, key: str, condition: PutCondition | None, put_id: str) -> None:
        """Copy a blob inside the service, and wait until that is done. The source is kept."""
        service = self._azure
        url = f"{service.bucket_url}/{quote(source, safe='/-_.~')}"
        signature = service.signature()
        headers = {"x-ms-copy-source": f"{url}?{urlencode(signature)}" if signature else url}
        headers[service.metadata_prefix + PUT_ID_KEY] = put_id
        if condition is not None:
            headers |= service.condition_headers(condition)
        try:
            status = self.run(lambda: self.plain.send("PUT", key, headers=headers)).headers.get(_COPY_STATUS)
        except RequestFailed as error:
            # An earlier try may have succeeded although its response was lost.
            if error.failure.kind is not FailureKind.CONDITION or self.tag_if_put_by(key, put_id) is None:
                raise
            status = self._copy_status(key)
        wait, started = _FIRST_COPY_SECONDS, time.monotonic()
        while status == "pending" and time.monotonic() - started < _ALL_COPY_SECONDS:
            time.sleep(wait)
            wait = min(2 * wait, _MAX_COPY_SECONDS)
            status = self._copy_status(key)
        if status not in (None, "success"):
            self._discard_copy(key, put_id)
            message = f"the copy of {source} inside the service is {status}"
            raise RequestFailed(Failure(FailureKind.SERVER, None, "", message))

    def _discard_copy(self, key: str, put_id: str) -> None:
        """Delete what a copy that failed, or takes too long, left at its key, unless it is of another put."""
        with suppress(RequestFailed):  # the failure of the copy tells more
            headers = self.run_head(key, lambda: self.plain.send("HEAD", key)).headers
            if headers.get(self.service.metadata_prefix + PUT_ID_KEY) != put_id:
                return
            if headers.get(_COPY_STATUS) == "pending":
                query = {"comp": "copy", "copyid": headers.get("x-ms-copy-id", "")}
                self.run(lambda: self.plain.send("PUT", key, query=query, headers={"x-ms-copy-action": "abort"}))
            if (tag := self.tag_if_put_by(key, put_id)) is not None:
                self.run(lambda: self.plain.send("DELETE", key, headers={"if-match": tag}))

    def _copy_status(self, key: str) -> str | None:
        return self.run_head(key, lambda: self.plain.send("HEAD", key)).headers.get(_COPY_STATUS)

    def list_pages(self, prefix: str, delimiter: str = "") -> Iterator[ListPage]:
        """List the blobs whose keys have a prefix."""
        return list_blobs(self, prefix, delimiter)

    def find_uploads(self, prefix: str) -> tuple[Sequence[PendingUpload], Sequence[str]]:
        """Return the uploads of blocks to keys with a prefix that were not committed, and the keys of temporary blobs.

        If the service lists no uncommitted blobs, as in accounts with a hierarchical namespace, return the latter.
        """
        found: dict[str, int] | None = None
        with self.warning_of_uploads():
            found = self._sizes(list_blobs(self, prefix, uncommitted=True))
        if found is None:
            return (), [key for key in self._sizes(self.list_pages(prefix)) if self.is_temporary(key)]
        # Uncommitted blobs have no size, and a request for one fails.
        uploads = [key for key, size in found.items() if not size and self.head(key) is None]
        temporary = [key for key in found if self.is_temporary(key) and key not in uploads]
        return [BlockUpload(self, key) for key in uploads], temporary

    def _sizes(self, pages: Iterator[ListPage]) -> dict[str, int]:
        return {key: size for page in pages for key, size in zip(page.keys, page.sizes, strict=True)}

    def broken_rule(self, key: str) -> str | None:
        """See https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata.

        The service drops dots at the end of parts and replaces backslashes, so that different keys become one.
        """
        parts = key.split("/")
        if any(part.endswith(".") for part in parts):
            return "Azure drops a dot at the end of a name between slashes"
        if "\\" in key:
            return "Azure turns a backslash into a slash"
        if len(parts) > _MAX_PARTS:
            return f"Azure allows {_MAX_PARTS} names between slashes, found {len(parts)}"
        length = len(key.encode("utf-16-le")) // 2
        if length > _MAX_LENGTH:
            return f"Azure allows {_MAX_LENGTH} characters and the name of an upload, found {length}"
        return None

    def delete(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Delete blobs in batches, or with a shared access signature one by one. A missing blob is not an error.

        `check` is called before each try, with a signature by several threads.
        """
        if self._azure.has_signature and len(keys) > 1:
            # The service may refuse a batch with a signature that allows each deletion, and Azurite fails.
            workers = min(len(keys), self._azure.tuning.concurrency)
            with ThreadPoolExecutor(workers, "ckptcore-azure-delete") as threads:
                for _ in threads.map(lambda key: self.run(partial(self._delete_plain, key), check), keys):
                    pass
            return
        for start in range(0, len(keys), _MAX_BATCH_SIZE):
            super().delete(keys[start : start + _MAX_BATCH_SIZE], check)

    def _delete(self, keys: list[str]) -> None:
        import obstore

        if len(keys) > 1:
            # obstore raises the first failure of a batch. After a missing blob others may have failed.
            with suppress(FileNotFoundError):
                obstore.delete(self._obstore(), keys)
                return
        for key in keys:
            self._delete_plain(key)
