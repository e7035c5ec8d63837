"""Uploads of new objects under a temporary name, which are then copied inside the service, with a condition.

For services whose uploads in parts take no condition, or end when another object is put. The copy moves no data.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from ckptcore.protocols import IF_ABSENT, Buffer, PutCondition
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import FailureKind, RequestFailed
from ckptcore_obstore.uploads import TEMPORARY_INFIX, PendingUpload

Copy: TypeAlias = Callable[[str, str, PutCondition | None, str], None]
"""Copies an object inside the service: the source, the new key, its condition, and the id of this put."""


class CopiedUpload:
    """A conditional `PendingUpload`. Thread-safe.

    Parts become a temporary object, which is then copied.
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

        If the object exists, it stays, the failure has kind CONDITION, and this can be called
        again.
        """
        if not self._is_whole:
            self._upload.complete(tags, if_absent=False)
            self._is_whole = True
        try:
            self._copy(self._temporary, self._key, IF_ABSENT if if_absent else None, self._put_id)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:  # the temporary object, not the one of the caller
                error.failure = replace(error.failure, kind=FailureKind.NO_UPLOAD)
            raise
        self._bucket.delete_temporary([self._temporary], is_done=True)

    def abort(self) -> None:
        """Abort the upload and delete the temporary object."""
        if not self._is_whole:
            self._upload.abort()
        self._bucket.delete([self._temporary])
