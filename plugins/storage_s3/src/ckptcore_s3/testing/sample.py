"""Storage samples of S3 for the matrix of all storages."""

from __future__ import annotations

import functools
from typing import Final

from ckptcore_testing import StorageSample
from ckptcore_testing.shared_buckets import SharedBucket

from ckptcore_s3.testing.servers import s3_server

SAMPLE: Final = StorageSample(scheme="s3", open=SharedBucket("s3", s3_server).open, costly=True)
"""S3 on the default test server; see `s3_server`."""

MOTO: Final = StorageSample(
    scheme="s3", open=SharedBucket("s3", functools.partial(s3_server, kind="moto")).open, costly=True
)
"""S3 on moto, an independent implementation."""
