"""Opening of URLs. Locations with the same bucket and settings share one `Bucket`."""

from __future__ import annotations

import os
from typing import Final

from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.open_buckets import OpenBuckets
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_s3.service import S3Service
from ckptcore_s3.settings import Settings, settings_of

_SCHEME: Final = "s3://"
_DIRECTORY_BUCKET: Final = "--x-s3"
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html"""


class S3Buckets:
    """Cache of the buckets that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._buckets = OpenBuckets[tuple[int, Settings], Bucket]()

    def open(self, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``s3://BUCKET`` or ``s3://BUCKET/DIRECTORY``. Creates nothing and makes no request.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        if url[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: expected a URL such as s3://bucket/directory"
            )
        name, _, directory = url[len(_SCHEME) :].partition("/")
        if not name or not name.isascii() or not all(one.isalnum() or one in ".-_" for one in name):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid bucket name; expected a URL such as s3://bucket/directory"
            )
        if name.endswith(_DIRECTORY_BUCKET):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: it is in a directory bucket (S3 Express One Zone), which "
                "needs sessions that ckptcore does not make; use a general purpose bucket"
            )
        settings = settings_of(name, options.config)
        owner = os.getpid(), settings  # A forked child cannot use the connections and locks of its parent.
        bucket = self._buckets.get(owner, lambda: Bucket(S3Service(settings)))
        return ObjectStoreDirectory(bucket, directory.rstrip("/"))
