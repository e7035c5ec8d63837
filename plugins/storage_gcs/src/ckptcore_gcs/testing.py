"""Storage samples for the matrix of all storages. The first location starts the server."""

from __future__ import annotations

import functools
from typing import Final

from ckptcore_testing import StorageSample
from ckptcore_testing.gcs_servers import gcs_server
from ckptcore_testing.shared_buckets import SharedBucket

SAMPLE: Final = StorageSample(scheme="gs", open=SharedBucket("gs", gcs_server).open, costly=True, aliases=("gcs",))
"""GCS on the strict server of ckptcore-testing."""

FAKE_GCS_SERVER: Final = StorageSample(
    scheme="gs", open=SharedBucket("gs", functools.partial(gcs_server, kind="fake-gcs-server")).open, costly=True
)
"""GCS on fake-gcs-server, an independent implementation."""
