"""What goes over the wire: a request and an answer, parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from ckptcore_gcs_server.refusals import Refusal, invalid

__all__ = ["Answer", "Intercept", "Request", "json_answer", "refusal_as_json", "refusal_as_xml", "xml_answer"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of HTTP.

    Attributes:
        method: in capitals.
        path: still quoted, for a ``%2F`` is part of a name.
        query: parameters, unquoted; of a repeated one the last.
        headers: by name in small letters.
        body: whole.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def number(self, name: str, default: int) -> int:
        """A parameter of the query that is a whole number from 0 on."""
        text = self.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()):
            raise invalid(f"Invalid value for parameter {name}: {text!r}")
        return int(text)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty one."""
        if not self.body:
            return {}
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise invalid(f"Parse Error: {error}") from error
        if not isinstance(value, dict):
            raise invalid("Parse Error: the body is no JSON object")
        return value


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of HTTP; the length of the body is told by whoever sends it.

    Attributes:
        status: of HTTP.
        headers: as they are sent.
        body: what is sent.
        nbytes: the Content-Length of an answer to a HEAD, which sends no body.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    nbytes: int | None = None


Intercept: TypeAlias = Callable[[Request, Callable[[Request], Answer]], Answer | None]
"""Stands between the connection and the service: is given a request and what answers it, and says what the client gets to
see; None: the connection is closed without an answer."""


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer of the JSON API."""
    return Answer(
        status, {"Content-Type": "application/json; charset=UTF-8"} | dict(headers or {}), json.dumps(value).encode()
    )


def xml_answer(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer of the XML API, from the text of its root element."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    return Answer(status, {"Content-Type": "application/xml; charset=UTF-8"} | dict(headers or {}), body)


def refusal_as_json(refusal: Refusal) -> Answer:
    """An error in the JSON API's form."""
    error: dict[str, Any] = {"message": refusal.message, "domain": "global", "reason": refusal.reason}
    if refusal.status == 412:
        error |= {"locationType": "header", "location": "If-Match"}
    return json_answer(
        {"error": {"code": refusal.status, "message": refusal.message, "errors": [error]}}, refusal.status
    )


def refusal_as_xml(refusal: Refusal) -> Answer:
    """An error in the XML API's form."""
    return xml_answer(
        f"<Error><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message></Error>", refusal.status
    )
