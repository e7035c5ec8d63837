"""The sample that puts GCS into the matrix of all storages: the strict server, started with the first location."""

from __future__ import annotations

from typing import Final

from ckptcore.testing import StorageSample
from ckptcore.testing.shared_buckets import SharedBucket
from ckptcore_gcs.testing.servers import gcs_server

__all__ = ["SAMPLE"]

SAMPLE: Final = StorageSample(scheme="gs", open=SharedBucket("gs", gcs_server).open, costly=True, aliases=("gcs",))
"""GCS on the strict server."""
