"""A strict Google Cloud Storage server in memory: the JSON and the XML API, with all preconditions enforced."""

from __future__ import annotations

from ckptcore_gcs_server.messages import Intercept, Request, Response
from ckptcore_gcs_server.server import StrictGcs

__all__ = ["Intercept", "Request", "Response", "StrictGcs"]
