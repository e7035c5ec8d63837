"""Requests to a container that obstore lacks: blocks, lists with their states, copies with conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.plain_requests import PlainRequests, Response

from ckptcore.protocols import Buffer
from ckptcore_azure.service import AzureService

_VERSION: Final = "2023-11-03"
"""Version of the protocol: https://learn.microsoft.com/rest/api/storageservices/versioning-for-the-azure-storage-services"""


class AzureRequests(PlainRequests):
    """Single requests to one container, without retries. Thread-safe."""

    def __init__(self, service: AzureService) -> None:
        """Initialise without sending a request."""
        super().__init__(service)
        self._azure = service

    def send_to(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
    ) -> Response:
        """Send one request. See `PlainRequests`. The length of the body is signed."""
        given = {**(headers or {}), "x-ms-version": _VERSION}
        if len(body) or method in ("PUT", "POST"):
            given["content-length"] = str(len(body))
        parameters = {**(query or {}), **self._azure.signature()}
        return super().send_to(method, url, query=parameters, headers=given, body=body)
