"""HTTP requests and responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from ckptcore_gcs_server.refusals import Refusal, invalid


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        method: the method, in upper case.
        path: the path, still percent-encoded, to distinguish ``%2F`` in a name from a separator.
        query: decoded parameters by name. If a parameter is repeated, its last value.
        headers: headers by lower-case name.
        body: the whole body.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def number(self, name: str, default: int) -> int:
        """Return a query parameter, or `default` if it is missing.

        Raises:
            Refusal: if the parameter is not a non-negative integer.
        """
        text = self.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()):
            raise invalid(f"Invalid value for parameter {name}: {text!r}")
        return int(text)

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. An empty body is an empty object.

        Raises:
            Refusal: if the body is not a JSON object.
        """
        if not self.body:
            return {}
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise invalid(f"Parse Error: {error}") from error
        if not isinstance(value, dict):
            raise invalid("Parse Error: the body is not a JSON object")
        return value


@dataclass(frozen=True, slots=True)
class Response:
    """A response. The server adds the length of the body.

    Attributes:
        status: HTTP status.
        headers: headers to send.
        body: body to send.
        nbytes: the Content-Length of a response to a HEAD request, which has no body.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    nbytes: int | None = None


Intercept: TypeAlias = Callable[[Request, Callable[[Request], Response]], Response | None]
"""A function of a request and the service's `answer`, which returns the response for the client. None closes the
connection without a response."""


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of the JSON API."""
    return Response(
        status, {"Content-Type": "application/json; charset=UTF-8"} | dict(headers or {}), json.dumps(value).encode()
    )


def xml_response(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of the XML API. `text` is the root element."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    return Response(status, {"Content-Type": "application/xml; charset=UTF-8"} | dict(headers or {}), body)


def refusal_as_json(refusal: Refusal) -> Response:
    """Return an error in the format of the JSON API."""
    error: dict[str, Any] = {"message": refusal.message, "domain": "global", "reason": refusal.reason}
    if refusal.status == 412:
        error |= {"locationType": "header", "location": "If-Match"}
    return json_response(
        {"error": {"code": refusal.status, "message": refusal.message, "errors": [error]}}, refusal.status
    )


def refusal_as_xml(refusal: Refusal) -> Response:
    """Return an error in the format of the XML API."""
    return xml_response(
        f"<Error><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message></Error>", refusal.status
    )
