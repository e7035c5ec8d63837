"""Requests to the JSON API, for operations that the XML API lacks.

See https://cloud.google.com/storage/docs/json_api/v1.
"""

from __future__ import annotations

import email.parser
import email.policy
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from ckptcore_obstore.bucket_requests import PUT_ID_KEY, BucketRequests
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_response

from ckptcore.protocols import IfAbsent, PutCondition
from ckptcore_gcs.settings import Settings

MAX_BATCH_SIZE: Final = 100
"""Maximum number of requests in a batch: https://cloud.google.com/storage/docs/batch"""

MAX_COMPONENTS: Final = 32
"""Maximum number of sources of a composition: https://cloud.google.com/storage/docs/composite-objects"""

_RESPONSE: Final = re.compile(r"response-(\d{1,3})>")


class JsonRequests:
    """JSON API requests to one bucket. Thread-safe.

    Every method raises `RequestFailed` if a request fails. All methods except `put` retry transient
    failures first.
    """

    def __init__(self, bucket: BucketRequests, settings: Settings) -> None:
        """Initialise without sending a request."""
        self._bucket = bucket
        self._name = settings.bucket
        self._objects = f"{settings.endpoint}/storage/v1/b/{settings.bucket}/o"
        self._path = f"/storage/v1/b/{settings.bucket}/o"
        self._uploads = f"{settings.endpoint}/upload/storage/v1/b/{settings.bucket}/o"
        self._batches = f"{settings.endpoint}/batch/storage/v1"

    def put(self, key: str, data: bytes | memoryview, condition: PutCondition | None, put_id: str) -> str:
        """Put an object in one request, without retries. Return its generation.

        Uses a multipart upload, because all servers enforce conditions on such uploads. Its body has the metadata and
        the data.
        """
        boundary = uuid.uuid4().hex
        resource = json.dumps({"name": key, **_properties(put_id)})
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{resource}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
        headers = {"content-type": f"multipart/related; boundary={boundary}"}
        query = {"uploadType": "multipart", "name": key} | _condition(condition)
        response = self._bucket.plain.send_to("POST", self._uploads, query=query, headers=headers, body=body)
        return str(_parsed(response.body).get("generation", ""))

    def compose(self, key: str, sources: Sequence[str], condition: PutCondition | None, put_id: str) -> None:
        """Compose an object of up to `MAX_COMPONENTS` objects. The sources are kept."""
        resource: dict[str, Any] = {
            "kind": "storage#composeRequest",
            "sourceObjects": [{"name": source} for source in sources],
            "destination": _properties(put_id),
        }
        self._change(f"{self._objects}/{quote(key, safe='')}/compose", _condition(condition), resource, key, put_id)

    def copy(self, source: str, key: str, condition: PutCondition | None, put_id: str) -> None:
        """Copy an object inside the service. The source is kept."""
        url = f"{self._objects}/{quote(source, safe='')}/rewriteTo/b/{self._name}/o/{quote(key, safe='')}"
        query = _condition(condition)
        while True:
            # A long rewrite takes several requests:
            # https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite
            response = self._change(url, query, _properties(put_id), key, put_id)
            if response.get("done", True) or "rewriteToken" not in response:
                return
            query = {**query, "rewriteToken": str(response["rewriteToken"])}

    def _change(
        self, url: str, query: Mapping[str, str], resource: Mapping[str, Any], key: str, put_id: str
    ) -> Mapping[str, Any]:
        body = json.dumps(resource).encode()
        headers = {"content-type": "application/json; charset=UTF-8"}
        plain = self._bucket.plain
        try:
            response = self._bucket.run(lambda: plain.send_to("POST", url, query=query, headers=headers, body=body))
        except RequestFailed as error:
            # Check if an earlier try succeeded, but its response was lost.
            if error.failure.kind is not FailureKind.CONDITION or self._bucket.tag_if_put_by(key, put_id) is None:
                raise
            return {}
        return _parsed(response.body)

    def delete(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Delete up to `MAX_BATCH_SIZE` objects in one request. A missing object is not an error.

        `check` is called before each try.
        """
        left = list(keys)

        def request() -> None:
            nonlocal left
            if len(left) == 1:
                self._delete_one(left[0])
                return
            failures = self._send_batch(left)
            left = [key for key, failure in zip(left, failures, strict=True) if failure is not None]
            # Raise a permanent failure if one exists, because it ends the retries. After a
            # transient failure, all remaining deletions are retried.
            refused = [failure for failure in failures if failure is not None]
            for failure in sorted(refused, key=lambda failure: failure.kind.is_transient):
                raise RequestFailed(failure)

        if left:
            self._bucket.run(request, check)

    def _delete_one(self, key: str) -> None:
        try:
            self._bucket.plain.send_to("DELETE", f"{self._objects}/{quote(key, safe='')}")
        except RequestFailed as error:
            if error.failure.kind is not FailureKind.MISSING:
                raise

    def _send_batch(self, keys: Sequence[str]) -> list[Failure | None]:
        """Delete objects in one request. Return a failure for each object; None if it was deleted or missing."""
        boundary = uuid.uuid4().hex
        parts = [
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{number}>\r\n\r\n"
            f"DELETE {self._path}/{quote(key, safe='')} HTTP/1.1\r\n\r\n\r\n"
            for number, key in enumerate(keys)
        ]
        body = ("".join(parts) + f"--{boundary}--\r\n").encode()
        headers = {"content-type": f"multipart/mixed; boundary={boundary}"}
        response = self._bucket.plain.send_to("POST", self._batches, headers=headers, body=body)
        responses = _batch_responses(response.headers.get("content-type", ""), response.body)
        if sorted(responses) != list(range(len(keys))):
            message = f"received {len(responses)} responses to a batch of {len(keys)} requests"
            raise RequestFailed(Failure(FailureKind.SERVER, None, "", message))
        statuses = [responses[number] for number in range(len(keys))]
        refusals = self._bucket.service.refusals
        failures = [
            None if status < 300 else failure_of_response(status, words, refusals) for status, words in statuses
        ]
        return [None if failure is None or failure.kind is FailureKind.MISSING else failure for failure in failures]


def _properties(put_id: str) -> dict[str, Any]:
    return {"contentType": "application/octet-stream", "metadata": {PUT_ID_KEY: put_id}}


def _condition(condition: PutCondition | None) -> dict[str, str]:
    if condition is None:
        return {}
    return {"ifGenerationMatch": "0" if isinstance(condition, IfAbsent) else condition.tag}


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a response.

    Raises:
        RequestFailed: if the body is not a JSON object.
    """
    try:
        value = json.loads(body)
    except ValueError as error:
        raise RequestFailed(
            Failure(FailureKind.OTHER, None, "", f"the response is not JSON ({error}): {body[:100]!r}")
        ) from error
    if not isinstance(value, dict):
        raise RequestFailed(Failure(FailureKind.OTHER, None, "", f"the response is not a JSON object: {body[:100]!r}"))
    return value


def _batch_responses(content_type: str, body: bytes) -> dict[int, tuple[int, bytes]]:
    """Return the status and body of each response in a batch.

    Keys are request numbers, from the ``Content-ID`` header of each part.
    """
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body
    )
    responses: dict[int, tuple[int, bytes]] = {}
    for position, part in enumerate(message.iter_parts() if message.is_multipart() else ()):
        named = _RESPONSE.search(str(part.get("Content-ID", "")))
        text = part.get_payload(decode=True)
        line, _, rest = (text if isinstance(text, bytes) else b"").lstrip().partition(b"\n")
        status = line.split(b" ")[1:2]
        # The body follows the headers, which may be missing, and an empty line.
        content = (b"\n" + rest.replace(b"\r\n", b"\n")).partition(b"\n\n")[2]
        number = position if named is None else int(named[1])
        responses[number] = (int(status[0]) if status and status[0].isdigit() else 500, content)
    return responses
