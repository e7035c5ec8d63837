"""The hooks of the S3 plugin. Imports neither obstore nor boto3: only a bucket that is used needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

if TYPE_CHECKING:
    from ckptcore_s3.opening import S3Buckets

__all__ = ["PLUGIN", "S3Plugin"]


class S3Plugin:
    """Offers locations such as ``s3://bucket/runs/step_1``. Any thread."""

    def __init__(self) -> None:
        """Open nothing."""
        self._buckets: S3Buckets | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """By scheme."""
        return {"s3": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a bucket; makes no request."""
        from ckptcore_s3.opening import S3Buckets

        if self._buckets is None:
            self._buckets = S3Buckets()
        return self._buckets.open(url, options)


PLUGIN: Final = S3Plugin()
"""What the entry point names; it keeps connections for as long as the process lives."""
