"""Uploads of large blobs: blocks that one request commits.

See https://learn.microsoft.com/rest/api/storageservices/put-block-list.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping

from ckptcore_obstore.bucket_requests import PUT_ID_KEY, BucketRequests
from ckptcore_obstore.failures import FailureKind, RequestFailed

from ckptcore.protocols import IF_ABSENT, Buffer


class BlockUpload:
    """A `PendingUpload` of blocks. Thread-safe.

    The first block begins it. Azure removes blocks that were not committed after a week.
    """

    def __init__(self, bucket: BucketRequests, key: str) -> None:
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
            self._bucket.run(lambda: self._bucket.plain.send("PUT", self._key, query=query, headers=headers, body=body))
        except RequestFailed as error:
            # An earlier try may have committed the blocks although its response was lost.
            if error.failure.kind not in (FailureKind.NO_UPLOAD, FailureKind.CONDITION):
                raise
            if self._bucket.tag_if_put_by(self._key, self._put_id) is None:
                raise

    def abort(self) -> None:
        """See `PendingUpload`: discard all uncommitted blocks of the key.

        No request does only that. An empty blob is committed, without these blocks, and deleted. If a blob exists at
        the key, nothing happens: the blocks may be those of a writer that is allowed to replace it.
        """
        eraser = BlockUpload(self._bucket, self._key)
        try:
            eraser.complete({}, if_absent=True)
            if (tag := self._bucket.tag_if_put_by(self._key, eraser._put_id)) is not None:
                self._bucket.run(lambda: self._bucket.plain.send("DELETE", self._key, headers={"if-match": tag}))
        except RequestFailed as error:
            if error.failure.kind not in (FailureKind.CONDITION, FailureKind.MISSING):
                raise
