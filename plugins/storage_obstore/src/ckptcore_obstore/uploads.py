"""Lists of keys, and uploads in parts, with the protocols of S3. The XML API of GCS also supports them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from ckptcore.protocols import IF_ABSENT, Buffer, PutCondition
from ckptcore_obstore.bucket_requests import PUT_ID_KEY, BucketRequests
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_response

if TYPE_CHECKING:
    from ckptcore_obstore.buckets import Bucket


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a list.

    Attributes:
        keys: full keys of objects.
        sizes: size of each object in bytes; 0 if the service does not state it.
        prefixes: common prefixes up to the delimiter, if there is one.
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    prefixes: tuple[str, ...]


def list_objects(bucket: BucketRequests, prefix: str, delimiter: str = "") -> Iterator[ListPage]:
    """List the objects whose keys have a prefix.

    Keys are requested with escapes (``encoding-type=url``), because XML cannot represent some
    characters.

    Raises:
        RequestFailed: if a request fails, or if the service lacks ListObjectsV2.
    """
    query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        response = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_response(response.body)
        decode = key_decoder_of(root)
        objects = root.findall("{*}Contents")
        yield ListPage(
            tuple([decode(text_of(item, "Key")) for item in objects]),
            tuple([int(text) if (text := text_of(item, "Size")).isdecimal() else 0 for item in objects]),
            tuple([decode(text_of(item, "Prefix")) for item in root.iterfind("{*}CommonPrefixes")]),
        )
        token = text_of(root, "NextContinuationToken")
        if text_of(root, "IsTruncated").lower() != "true":
            return
        if not token:
            # The service supports only the first version of this request. Fail, because an
            # incomplete list would leave objects undeleted.
            raise RequestFailed(
                Failure(
                    FailureKind.UNSUPPORTED,
                    None,
                    "",
                    "the list is truncated, but has no continuation token (list-type=2)",
                )
            )
        query = {**query, "continuation-token": token}


def parse_response(body: bytes) -> ElementTree.Element:
    """Parse the XML of a response.

    Raises:
        RequestFailed: if the body is not XML.
    """
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise RequestFailed(
            Failure(FailureKind.OTHER, None, "", f"the response is not XML ({error}): {body[:100]!r}")
        ) from error


def key_decoder_of(root: ElementTree.Element) -> Callable[[str], str]:
    """Return the decoder of keys in a response.

    If keys are escaped, S3 writes ``+`` for a space and ``%2B`` for ``+``.
    """
    return unquote_plus if text_of(root, "EncodingType") == "url" else str


def text_of(element: ElementTree.Element, name: str) -> str:
    """Return the text of a child element in any namespace. Empty if the child is missing."""
    return element.findtext(f"{{*}}{name}") or ""


MAX_PARTS: Final = 10_000
MIN_PART_BYTES: Final = 5 << 20
"""Limits of S3. The last part may be smaller than the minimum.

See https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html.
"""


TEMPORARY_INFIX: Final = ".ckptcore-upload-"
"""Part of the key of a temporary object, between the key of the final object and an id."""

_TEMPORARY: Final = re.compile(r"\.ckptcore-upload-([0-9a-f]{32})[^/]*$")


def upload_id_of(key: str) -> str | None:
    """Return the upload id in the key of a temporary object, or None for any other key."""
    match = _TEMPORARY.search(key)
    return None if match is None else match[1]


class PendingUpload(Protocol):
    """An unfinished upload in parts. Thread-safe. Methods raise `RequestFailed` if a request fails."""

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1. Return its tag. A part can be uploaded again."""
        ...

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Create the object from its parts.

        Args:
            tags: tags of all parts, by number.
            if_absent: fail if the object exists. Some services do not check this completely.

        Raises:
            RequestFailed: with the kind CONDITION if the object exists and `if_absent` is True.
        """
        ...

    def abort(self) -> None:
        """Abort the upload and delete its parts. A missing upload is not an error."""
        ...


class Upload:
    """A `PendingUpload` that uses the multipart protocol of S3. Thread-safe."""

    def __init__(self, bucket: BucketRequests, key: str, identifier: str, put_id: str = "") -> None:
        """Refer to an existing upload.

        Args:
            bucket: the bucket.
            key: the key of the object to create.
            identifier: the upload id of the service.
            put_id: the id in the metadata of the object, from `begin`; empty if unknown.
        """
        self._bucket = bucket
        self._key = key
        self._identifier = identifier
        self._put_id = put_id

    @classmethod
    def begin(cls, bucket: BucketRequests, key: str) -> Upload:
        """Begin an upload.

        If the response is lost, an unfinished upload remains. `list_uploads` finds it.
        """
        put_id = uuid.uuid4().hex
        headers = {**bucket.service.upload_headers, bucket.service.metadata_prefix + PUT_ID_KEY: put_id}
        response = bucket.run(lambda: bucket.plain.send("POST", key, query={"uploads": ""}, headers=headers))
        identifier = text_of(parse_response(response.body), "UploadId")
        return cls(bucket, key, identifier, put_id)

    def put_part(self, number: int, data: Buffer) -> str:
        """See `PendingUpload`."""
        query = {"partNumber": str(number), "uploadId": self._identifier}
        response = self._bucket.run(lambda: self._bucket.plain.send("PUT", self._key, query=query, body=data))
        return response.headers.get("etag", "")

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """See `PendingUpload`."""
        parts = "".join(
            [
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
                for number, tag in sorted(tags.items())
            ]
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        headers = {"content-type": "application/xml"}
        if if_absent:
            headers |= self._bucket.service.condition_headers(IF_ABSENT)
            if self._bucket.head(self._key) is not None:  # not all services check the condition of this request
                raise RequestFailed(Failure(FailureKind.CONDITION, None, "", "the object exists"))
        query = {"uploadId": self._identifier}

        def request() -> None:
            response = self._bucket.plain.send("POST", self._key, query=query, headers=headers, body=body)
            # A service may send status 200 before it knows the outcome, so check the body.
            if b"<Error>" in response.body or text_of(parse_response(response.body), "Code"):
                raise RequestFailed(failure_of_response(response.status, response.body, self._bucket.service.refusals))

        try:
            self._bucket.run(request)
        except RequestFailed as error:
            # An earlier try may have completed the upload, but its response was lost. The upload is
            # then missing, and the object exists.
            if error.failure.kind not in (FailureKind.NO_UPLOAD, FailureKind.CONDITION, FailureKind.MISSING):
                raise
            if self._bucket.tag_if_put_by(self._key, self._put_id) is None:
                raise

    def abort(self) -> None:
        """See `PendingUpload`."""
        query = {"uploadId": self._identifier}
        try:
            self._bucket.run(lambda: self._bucket.plain.send("DELETE", self._key, query=query))
        except RequestFailed as error:
            if error.failure.kind not in (FailureKind.NO_UPLOAD, FailureKind.MISSING):
                raise


def list_uploads(bucket: BucketRequests, prefix: str) -> Iterator[Upload]:
    """List the unfinished uploads of all clients to keys with a prefix.

    Raises:
        RequestFailed: if a request fails.
    """
    query = {"uploads": "", "encoding-type": "url", "prefix": prefix}
    while True:
        response = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_response(response.body)
        decode = key_decoder_of(root)
        for item in root.iterfind("{*}Upload"):
            key = decode(text_of(item, "Key"))
            if key.startswith(prefix):
                yield Upload(bucket, key, text_of(item, "UploadId"))
        if text_of(root, "IsTruncated").lower() != "true":
            return
        query = {
            **query,
            "key-marker": decode(text_of(root, "NextKeyMarker")),
            "upload-id-marker": text_of(root, "NextUploadIdMarker"),
        }


Copy: TypeAlias = Callable[[str, str, PutCondition | None, str], None]
"""Function that copies an object inside the service. Arguments: source, new key, condition, and id of this put."""


class CopiedUpload:
    """A conditional `PendingUpload`. Thread-safe.

    Parts become a temporary object. This object is then copied inside the service, without a
    transfer of data. Used for services whose uploads in parts accept no condition, or end when
    another object is put to the key.
    """

    def __init__(self, bucket: Bucket, key: str, begin: Callable[[str], PendingUpload], copy: Copy) -> None:
        """Begin the upload.

        Args:
            bucket, key: bucket and key of the object.
            begin: begins an upload without a condition to a key.
            copy: copies the temporary object.
        """
        self._bucket = bucket
        self._key = key
        self._copy = copy
        self._put_id = uuid.uuid4().hex
        self._temporary = f"{key}{TEMPORARY_INFIX}{self._put_id}"
        self._upload = begin(self._temporary)
        self._is_whole = False

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a part, counted from 1. Return its tag."""
        return self._upload.put_part(number, data)

    def complete(self, tags: Mapping[int, str], *, if_absent: bool) -> None:
        """Create the object.

        With `if_absent`, an existing object is kept, and the failure has the kind CONDITION. The call
        can then be repeated.
        """
        if not self._is_whole:
            self._upload.complete(tags, if_absent=False)
            self._is_whole = True
        try:
            self._copy(self._temporary, self._key, IF_ABSENT if if_absent else None, self._put_id)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:  # the temporary object is missing
                error.failure = replace(error.failure, kind=FailureKind.NO_UPLOAD)
            raise
        self._bucket.delete_temporary([self._temporary], is_done=True)

    def abort(self) -> None:
        """Abort the upload and delete the temporary object."""
        if not self._is_whole:
            self._upload.abort()
        self._bucket.delete([self._temporary])
