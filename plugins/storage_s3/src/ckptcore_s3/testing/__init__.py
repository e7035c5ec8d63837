"""S3 for tests.

- `servers`: servers on this machine: MiniStack, moto, a Ceph gateway
- `ceph`: how a cluster of Ceph is made for that
- `sample`: puts S3 into the matrix of all storages
"""

from __future__ import annotations

from ckptcore_s3.testing.sample import MOTO, SAMPLE
from ckptcore_s3.testing.servers import ACCESS_KEY_ID, DIALECT, SECRET_ACCESS_KEY, S3Server, s3_server

__all__ = ["ACCESS_KEY_ID", "DIALECT", "MOTO", "SAMPLE", "SECRET_ACCESS_KEY", "S3Server", "s3_server"]
