"""Uploads of large blobs: blocks that one request commits.

See https://learn.microsoft.com/rest/api/storageservices/put-block-list.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping

from ckptcore_obstore.bucket_requests import PUT_ID_KEY
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import FailureKind, RequestFailed

from ckptcore.protocols import IF_ABSENT, Buffer

__all__ = ["BlockUpload", "discard_blocks"]


class BlockUpload:
    """A `PendingUpload` of blocks. Thread-safe.

    The first block begins it. Azure removes blocks that were not committed after a week.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        """Initialise without sending a request."""
        self._bucket = bucket
        self._key = key
        self._put_id = uuid.uuid4().hex

    def put_part(self, number: int, data: Buffer) -> str:
        """Upload a block, counted from 1. Return its name.

        The name contains the id of this upload, so that blocks of two uploads to one key never mix.
        """
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
            self._bucket.run(
                lambda: self._bucket.plain.send("PUT", self._key, query=query, headers=headers, body=body)
            )
        except RequestFailed as error:
            # An earlier try may have committed the blocks although its response was lost.
            if error.failure.kind not in (FailureKind.NO_UPLOAD, FailureKind.CONDITION):
                raise
            if self._bucket.tag_if_put_by(self._key, self._put_id) is None:
                raise

    def abort(self) -> None:
        """See `PendingUpload`."""
        discard_blocks(self._bucket, self._key)


def discard_blocks(bucket: Bucket, key: str) -> None:
    """Discard the uncommitted blocks of a key, so that their upload cannot be completed.

    No request does only that. An empty blob replaces the blocks, and is deleted. If a blob exists at the key, nothing
    happens: its blocks cannot be told from those of a replacement that is allowed.
    """
    try:
        tag = bucket.put(key, b"", IF_ABSENT)
        bucket.run(lambda: bucket.plain.send("DELETE", key, headers={"if-match": tag}))
    except RequestFailed as error:
        if error.failure.kind not in (FailureKind.CONDITION, FailureKind.MISSING):
            raise
