"""The service: routes requests to the APIs, and formats errors."""

from __future__ import annotations

from ckptcore_gcs_server.buckets import Buckets
from ckptcore_gcs_server.json_api import JsonApi
from ckptcore_gcs_server.json_batches import answer_batch
from ckptcore_gcs_server.json_uploads import JsonUploads
from ckptcore_gcs_server.messages import Request, Response, refusal_as_json, refusal_as_xml
from ckptcore_gcs_server.refusals import Refusal, unauthorized
from ckptcore_gcs_server.xml_api import XmlApi


class Service:
    """Answers requests. Thread-safe.

    Args:
        base: the URL for clients.
        token: the required token (``Authorization: Bearer TOKEN``). None: no authorization.
    """

    def __init__(self, base: str, token: str | None = None) -> None:
        self.buckets = Buckets()
        self._token = token
        self._json = JsonApi(self.buckets, base)
        self._uploads = JsonUploads(self.buckets, base)
        self._xml = XmlApi(self.buckets)

    def answer(self, request: Request) -> Response:
        """Answer a request. A `Refusal` becomes an error response in the format of the requested API."""
        speaks_json = request.path.startswith(("/storage/v1", "/upload/storage/v1", "/download/storage/v1", "/batch"))
        try:
            # Requests to an upload session need no token, because the URL of the session is itself a secret.
            shown = request.headers.get("authorization", "").strip()
            if self._token is not None and shown != f"Bearer {self._token}" and "upload_id" not in request.query:
                raise unauthorized()
            if not speaks_json:
                return self._xml.answer(request)
            if request.path.startswith("/upload"):
                return self._uploads.answer(request)
            if request.path.startswith("/batch"):
                return answer_batch(request, self._one_of_a_batch)
            return self._json.answer(request)
        except Refusal as refusal:
            if refusal.status == 304:
                return Response(304)
            return refusal_as_json(refusal) if speaks_json else refusal_as_xml(refusal)

    def _one_of_a_batch(self, request: Request) -> Response:
        try:
            return self._json.answer(request)
        except Refusal as refusal:
            return refusal_as_json(refusal)
