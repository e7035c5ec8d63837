"""The hooks of the GCS plugin. Imports neither obstore nor google-auth: only a bucket that is used needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

if TYPE_CHECKING:
    from ckptcore_gcs.opening import GcsBuckets

__all__ = ["PLUGIN", "GcsPlugin"]


class GcsPlugin:
    """Offers locations such as ``gs://bucket/runs/step_1``; fsspec's ``gcs://`` names the same. Any thread."""

    def __init__(self) -> None:
        """Open nothing."""
        self._buckets: GcsBuckets | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """By scheme."""
        return {"gs": self.open, "gcs": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a bucket; makes no request."""
        from ckptcore_gcs.opening import GcsBuckets

        if self._buckets is None:
            self._buckets = GcsBuckets()
        return self._buckets.open(url, options)


PLUGIN: Final = GcsPlugin()
"""What the entry point names; it keeps connections for as long as the process lives."""
