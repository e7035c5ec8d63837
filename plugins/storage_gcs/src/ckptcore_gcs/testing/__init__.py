"""What tests of storages on GCS need: a strict GCS in memory.

`ckptcore_testing.gcs_servers` runs it as a process of its own, and fake-gcs-server too; `ckptcore_gcs.testing.sample` puts it
into the matrix of all storages. Those import pytest; what is here does not, so that the server starts fast.
"""

from __future__ import annotations

from ckptcore_gcs_server import Answer, Intercept, Request, StrictGcs

__all__ = ["Answer", "Intercept", "Request", "StrictGcs"]
