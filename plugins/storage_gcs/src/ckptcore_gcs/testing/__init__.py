"""What tests of storages on GCS need: a strict GCS in memory."""

from __future__ import annotations

from ckptcore_gcs.testing.strict import Answer, Intercept, Request, StrictGcs

__all__ = ["Answer", "Intercept", "Request", "StrictGcs"]
