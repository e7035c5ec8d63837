"""S3 for tests.

- `servers`: local servers: MiniStack, moto, a Ceph gateway
- `ceph`: starts a Ceph cluster
- `sample`: the S3 samples for the matrix of all storages
"""

from __future__ import annotations

from ckptcore_s3.testing.sample import MOTO, SAMPLE
from ckptcore_s3.testing.servers import ACCESS_KEY_ID, DIALECT, SECRET_ACCESS_KEY, S3Server, s3_server

__all__ = ["ACCESS_KEY_ID", "DIALECT", "MOTO", "SAMPLE", "SECRET_ACCESS_KEY", "S3Server", "s3_server"]
