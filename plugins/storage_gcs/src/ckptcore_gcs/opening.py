"""Opening of URLs. Locations with the same bucket and settings share one `GcsBucket`."""

from __future__ import annotations

from typing import Final

from ckptcore_obstore.open_buckets import OpenBuckets
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_gcs.buckets import GcsBucket
from ckptcore_gcs.service import GcsService
from ckptcore_gcs.settings import Settings, settings_of

_SCHEMES: Final = ("gs", "gcs")


class GcsBuckets:
    """Cache of the buckets that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._buckets = OpenBuckets[Settings, GcsBucket]()

    def open(self, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``gs://BUCKET`` or ``gs://BUCKET/DIRECTORY``. Creates nothing and makes no request.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        scheme, separator, path = url.partition("://")
        if not separator or scheme.lower() not in _SCHEMES:
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: expected a URL such as gs://bucket/directory"
            )
        name, _, directory = path.partition("/")
        if not name or not name.isascii() or not all(one.isalnum() or one in ".-_" for one in name):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid bucket name; expected a URL such as gs://bucket/directory"
            )
        settings = settings_of(name, options.config)
        bucket = self._buckets.get(settings, lambda: GcsBucket(GcsService(settings)))
        return ObjectStoreDirectory(bucket, directory.rstrip("/"))
