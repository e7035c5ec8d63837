"""Hooks of the GCS plugin. obstore and google-auth are imported when a bucket is first used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

if TYPE_CHECKING:
    from ckptcore_gcs.buckets import GcsBuckets


class GcsPlugin:
    """Opens ``gs://bucket/directory``. Also accepts fsspec's spelling ``gcs://``. Thread-safe."""

    def __init__(self) -> None:
        """Initialise without opening a bucket."""
        self._buckets: GcsBuckets | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the openers by scheme."""
        return {"gs": self.open, "gcs": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a bucket. Makes no request."""
        from ckptcore_gcs.buckets import GcsBuckets

        if self._buckets is None:
            self._buckets = GcsBuckets()
        return self._buckets.open(url, options)


PLUGIN: Final = GcsPlugin()
"""The entry point. It keeps connections open until the process ends."""
