"""Hooks of the S3 plugin. obstore is imported when a bucket is first used, and botocore for its first request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

if TYPE_CHECKING:
    from ckptcore_s3.service import S3Buckets


class S3Plugin:
    """Opens ``s3://bucket/directory``. Thread-safe."""

    def __init__(self) -> None:
        """Initialise without opening a bucket."""
        self._buckets: S3Buckets | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the openers by scheme."""
        return {"s3": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a bucket. Makes no request."""
        from ckptcore_s3.service import S3Buckets

        if self._buckets is None:
            self._buckets = S3Buckets()
        return self._buckets.open(url, options)


PLUGIN: Final = S3Plugin()
"""The entry point. It keeps connections open until the process ends."""
