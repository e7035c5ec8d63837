"""Opening: from a URL and options to a directory of a bucket; what is open is shared by all that name the same bucket so."""

from __future__ import annotations

from typing import Final

from ckptcore_obstore.open_buckets import OpenBuckets
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageOptions
from ckptcore_gcs.buckets import GcsBucket
from ckptcore_gcs.service import GcsService
from ckptcore_gcs.settings import Settings, settings_of

__all__ = ["GcsBuckets"]

_SCHEMES: Final = ("gs", "gcs")


class GcsBuckets:
    """The buckets that this process used last, by their settings. Any thread."""

    def __init__(self) -> None:
        """Open nothing."""
        self._buckets = OpenBuckets[Settings, GcsBucket]()

    def open(self, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``gs://BUCKET`` or ``gs://BUCKET/DIRECTORY``; creates nothing and makes no request.

        Raises:
            InvalidLocationError
            ValueError: for an option that is not known or of another type.
        """
        scheme, separator, path = url.partition("://")
        if not separator or scheme.lower() not in _SCHEMES:
            raise InvalidLocationError(f"expected a URL such as gs://bucket/directory, found {url!r}")
        name, _, directory = path.partition("/")
        if not name or not name.isascii() or not all(one.isalnum() or one in ".-_" for one in name):
            raise InvalidLocationError(f"the URL {url!r} names no bucket; expected one such as gs://bucket/directory")
        settings = settings_of(name, options.config)
        bucket = self._buckets.get(settings, lambda: GcsBucket(GcsService(settings)))
        return ObjectStoreDirectory(bucket, directory.rstrip("/"))
