"""Containers of Azure Blob Storage: their URLs, and the operations that differ from other object stores."""

from __future__ import annotations

import base64
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from ckptcore_obstore.bucket_requests import PUT_ID_KEY, BucketRequests, PlainRequests, Response
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.storage import ObjectStoreDirectory, OpenBuckets
from ckptcore_obstore.uploads import TEMPORARY_INFIX, CopiedUpload, ListPage, PendingUpload, parse_response, text_of

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import IF_ABSENT, Buffer, PutCondition, StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_azure.service import AzureService
from ckptcore_azure.settings import Settings, settings_of


class BlockUpload:
    """A `PendingUpload` of blocks, which one request commits. Thread-safe.

    The upload begins with its first block. Azure removes uncommitted blocks after a week. See
    https://learn.microsoft.com/rest/api/storageservices/put-block-list.
    """

    def __init__(self, bucket: BucketRequests, key: str) -> None:
        """Initialise without sending a request."""
        self._bucket = bucket
        self._key = key
        self._put_id = uuid.uuid4().hex

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a block, counted from 1. Return its name.

        The name contains the id of this upload, so that blocks of different uploads to one key
        cannot be mixed up.
        """
        # The number has a fixed width, because all block ids of a blob must have the same length:
        # https://learn.microsoft.com/rest/api/storageservices/put-block
        name = base64.b64encode(f"{self._put_id}-{number:05}".encode()).decode()
        query = {"comp": "block", "blockid": name}
        self._bucket.run(lambda: self._bucket.plain.send("PUT", self._key, query=query, body=data))
        return name

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """See `PendingUpload`."""
        names = "".join([f"<Uncommitted>{name}</Uncommitted>" for _, name in sorted(tags.items())])
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{names}</BlockList>'.encode()
        service = self._bucket.service
        headers = {"content-type": "application/xml", service.metadata_prefix + PUT_ID_KEY: self._put_id}
        if if_absent:
            headers |= service.condition_headers(IF_ABSENT)
        query = {"comp": "blocklist"}
        try:
            self._bucket.run(lambda: self._bucket.plain.send("PUT", self._key, query=query, headers=headers, body=body))
        except RequestFailed as error:
            # Check if an earlier try committed the blocks, but its response was lost.
            if error.failure.kind not in (FailureKind.NO_UPLOAD, FailureKind.CONDITION):
                raise
            if self._bucket.tag_if_put_by(self._key, self._put_id) is None:
                raise

    def abort(self) -> None:
        """Discard all uncommitted blocks of the key. See `PendingUpload`.

        Azure has no request to discard blocks. Instead, this commits an empty blob without these
        blocks, and deletes it. If a blob exists at the key, nothing is discarded, because the
        blocks may belong to a writer that may replace the blob.
        """
        eraser = BlockUpload(self._bucket, self._key)
        try:
            eraser.complete({}, if_absent=True)
            if (tag := self._bucket.tag_if_put_by(self._key, eraser._put_id)) is not None:
                self._bucket.run(lambda: self._bucket.plain.send("DELETE", self._key, headers={"if-match": tag}))
        except RequestFailed as error:
            if error.failure.kind not in (FailureKind.CONDITION, FailureKind.MISSING):
                raise


_VERSION: Final = "2023-11-03"
"""Version of the protocol: https://learn.microsoft.com/rest/api/storageservices/versioning-for-the-azure-storage-services"""


class AzureRequests(PlainRequests):
    """Single requests to one container, without retries. Thread-safe."""

    def __init__(self, service: AzureService) -> None:
        """Initialise without sending a request."""
        super().__init__(service)
        self._azure = service

    def send_to(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
    ) -> Response:
        """Send one request.

        The length of the body is set as a header, because it is part of the signature. See
        `PlainRequests`.
        """
        given = {**(headers or {}), "x-ms-version": _VERSION}
        if len(body) or method in ("PUT", "POST"):
            given["content-length"] = str(len(body))
        parameters = {**(query or {}), **self._azure.signature()}
        return super().send_to(method, url, query=parameters, headers=given, body=body)


def list_blobs(
    bucket: BucketRequests, prefix: str, delimiter: str = "", *, uncommitted: bool = False
) -> Iterator[ListPage]:
    """List the blobs whose keys have a prefix, one page at a time.

    See https://learn.microsoft.com/rest/api/storageservices/list-blobs.

    Args:
        bucket: the container.
        prefix: beginning of the keys.
        delimiter: character at which common prefixes end; empty to list all keys.
        uncommitted: include keys that have only uncommitted blocks.

    Raises:
        RequestFailed: if a request fails.
    """
    query = {"restype": "container", "comp": "list", "prefix": prefix}
    if delimiter:
        query["delimiter"] = delimiter
    if uncommitted:
        query["include"] = "uncommittedblobs"
    while True:
        response = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_response(response.body)
        # Accounts with a hierarchical namespace also list directories.
        blobs = [
            item
            for item in root.iterfind(".//{*}Blob")
            if item.findtext("{*}Properties/{*}ResourceType") != "directory"
        ]
        sizes = [blob.findtext("{*}Properties/{*}Content-Length") or "" for blob in blobs]
        yield ListPage(
            tuple([_name(blob) for blob in blobs]),
            tuple([int(text) if text.isdecimal() else 0 for text in sizes]),
            tuple([_name(prefix) for prefix in root.iterfind(".//{*}BlobPrefix")]),
        )
        marker = text_of(root, "NextMarker")
        if not marker:
            return
        query = {**query, "marker": marker}


def _name(element: ElementTree.Element) -> str:
    """Return the name in an element. Azure escapes names that XML cannot represent."""
    name_element = element.find("{*}Name")
    name = "" if name_element is None else name_element.text or ""
    return unquote(name) if name_element is not None and name_element.get("Encoded") == "true" else name


_MAX_BATCH_SIZE: Final = 256
"""Maximum number of blobs in a batch. See https://learn.microsoft.com/rest/api/storageservices/blob-batch."""

_MAX_PARTS: Final = 254
_MAX_LENGTH: Final = 1024 - len(TEMPORARY_INFIX) - 32
"""Limits of a key: number of parts between slashes, and length without the suffix that `CopiedUpload` adds."""

_COPY_STATUS: Final = "x-ms-copy-status"
_FIRST_COPY_SECONDS: Final = 0.05
_MAX_COPY_SECONDS: Final = 2.0
_ALL_COPY_SECONDS: Final = 3600.0
"""Seconds between two checks of a running copy, at first and at most, and the maximum for all checks together.

A copy inside one account is usually complete when its request returns.
"""


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

        A put of another process to the same key would discard the blocks. Therefore, with `if_absent`,
        the blob is uploaded under another name, and then copied.
        """
        return CopiedUpload(self, key, partial(BlockUpload, self), self._copy) if if_absent else BlockUpload(self, key)

    def _copy(self, source: str, key: str, condition: PutCondition | None, put_id: str) -> None:
        """Copy a blob inside the service, and wait until the copy is complete. The source is kept."""
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
            # Check if an earlier try succeeded, but its response was lost.
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
        """Delete the blob of a copy that failed or timed out. Keep it if another put wrote it."""
        with suppress(RequestFailed):  # the failure of the copy is more informative
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
        """Return the uncommitted uploads to keys with a prefix, and the keys of temporary blobs.

        If the service cannot list uncommitted blobs, as in accounts with a hierarchical namespace,
        return only the keys of temporary blobs.
        """
        sizes: dict[str, int] | None = None
        with self.warning_of_uploads():
            sizes = self._sizes(list_blobs(self, prefix, uncommitted=True))
        if sizes is None:
            return (), [key for key in self._sizes(self.list_pages(prefix)) if self.is_temporary(key)]
        # An uncommitted blob has no size, and a HEAD request for it fails.
        uploads = [key for key, size in sizes.items() if not size and self.head(key) is None]
        temporary = [key for key in sizes if self.is_temporary(key) and key not in uploads]
        return [BlockUpload(self, key) for key in uploads], temporary

    def _sizes(self, pages: Iterator[ListPage]) -> dict[str, int]:
        return {key: size for page in pages for key, size in zip(page.keys, page.sizes, strict=True)}

    def broken_rule(self, key: str) -> str | None:
        """See https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata.

        The service drops dots at the end of parts and replaces backslashes. Without this check,
        different keys would become equal.
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
        """Delete blobs in batches.

        With a shared access signature, delete each blob with its own request, on several threads. A missing blob is not
        an error.

        `check` is called before each try. With a signature, several threads call it.
        """
        if self._azure.has_signature and len(keys) > 1:
            # The service may refuse a batch even if the signature allows each single deletion, and
            # Azurite fails.
            def delete(key: str) -> None:
                self.run(partial(self._delete_plain, key), check)

            workers = min(len(keys), self._azure.tuning.concurrency)
            with ThreadPoolExecutor(workers, "ckptcore-azure-delete") as threads:
                try:
                    deleted: Iterator[None] = threads.map(delete, keys)
                except RuntimeError:  # executors refuse work once the main thread has ended
                    deleted = map(delete, keys)
                for _ in deleted:
                    pass
            return
        for start in range(0, len(keys), _MAX_BATCH_SIZE):
            super().delete(keys[start : start + _MAX_BATCH_SIZE], check)

    def _delete(self, keys: list[str]) -> None:
        import obstore

        if len(keys) > 1:
            # obstore raises only the first failure of a batch. If a blob was missing, other
            # deletions may have failed too, so delete all blobs one by one.
            with suppress(FileNotFoundError):
                obstore.delete(self._obstore(), keys)
                return
        for key in keys:
            self._delete_plain(key)


_CONTAINER: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9](-?[a-z0-9])*|\$web")
"""Valid names of containers.

See https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata.
"""

_HOST: Final = re.compile(r"[a-z0-9]{3,24}(\.[a-z0-9-]+)+")
_CLOUDS: Final = (
    "core.windows.net",
    "core.chinacloudapi.cn",
    "core.usgovcloudapi.net",
    "storage.azure.net",
    "fabric.microsoft.com",
)
_SERVICE: Final = re.compile(rf"[a-z0-9]{{3,24}}(\.z[0-9]{{1,2}})?\.(dfs|blob)\.({'|'.join(map(re.escape, _CLOUDS))})")
"""Hosts that a URL may name. Requests carry credentials, so a location must not send them to any other host.

See https://learn.microsoft.com/azure/storage/common/storage-account-overview#storage-account-endpoints.
"""

_EXAMPLES: Final = "az://container/directory or abfss://container@account.dfs.core.windows.net/directory"
_SIGNATURE: Final = re.compile(r"[?&]sig=", re.IGNORECASE)


class AzureContainers:
    """Cache of the containers that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._containers = OpenBuckets[Settings, AzureContainer]()

    def open(self, scheme: str, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``az://CONTAINER/DIRECTORY`` or ``abfss://CONTAINER@HOST/DIRECTORY``. Makes no request.

        Args:
            scheme: ``abfs``, ``abfss``, ``az`` or ``azure``. All have the same meaning.
            url: the URL.
            options: options of the scheme.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        begins = f"{scheme}://"
        if url[: len(begins)].lower() != begins:
            raise InvalidLocationError(f"cannot open {redacted_location(url)!r}: expected a URL such as {_EXAMPLES}")
        address, _, directory = url[len(begins) :].partition("/")
        name, at, host = address.partition("@")
        if not _CONTAINER.fullmatch(name) or (at and not _HOST.fullmatch(host)):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid container or account; "
                f"expected a URL such as {_EXAMPLES}"
            )
        if _SIGNATURE.search(url):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: the URL contains a shared access signature; set it with the "
                f"option 'sas_token' or AZURE_STORAGE_SAS_TOKEN"
            )
        if at and not _SERVICE.fullmatch(host) and not options.config.get("endpoint"):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: {host!r} is no host of Azure, such as "
                f"account.dfs.core.windows.net, and credentials may be sent to it; if that is right, set the option "
                f"'endpoint' to its URL"
            )
        settings = settings_of(name, options.config, scheme=scheme, host=host)
        container = self._containers.get(settings, lambda: AzureContainer(AzureService(settings)))
        return ObjectStoreDirectory(container, directory.rstrip("/"))
