"""Preconditions of requests.

See https://cloud.google.com/storage/docs/request-preconditions: generation 0 means that the object does not exist. If a
"not match" condition of a read fails, the response is 304. If any other condition fails, it is 412.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from ckptcore_gcs_server.messages import Request
from ckptcore_gcs_server.objects import StoredObject
from ckptcore_gcs_server.refusals import condition_not_met, invalid, not_implemented, not_modified

_XML_HEADERS: Final = (
    "x-goog-if-generation-match",
    "x-goog-if-generation-not-match",
    "x-goog-if-metageneration-match",
    "x-goog-if-metageneration-not-match",
)

_ENTITY_HEADERS: Final = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Generations and metagenerations that an object must have or must not have. None: no condition."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    def check_write(self, live: StoredObject | None) -> None:
        """Raise a refusal (412) if the existing object must not be replaced or deleted."""
        if not (self._match(live) and self._differ(live)):
            raise condition_not_met()

    def check_read(self, live: StoredObject) -> None:
        """Raise a refusal (412, or 304 for a failed "not match") if the object must not be read."""
        if not self._match(live):
            raise condition_not_met()
        if not self._differ(live):
            raise not_modified()

    def _match(self, live: StoredObject | None) -> bool:
        generation, metageneration = _numbers(live)
        return self.generation in (None, generation) and self.metageneration in (None, metageneration)

    def _differ(self, live: StoredObject | None) -> bool:
        generation, metageneration = _numbers(live)
        return self.not_generation != generation and self.not_metageneration != metageneration


def json_conditions(request: Request, prefix: str = "if") -> Conditions:
    """Return the conditions in the parameters of a JSON request. `prefix` is ``ifSource`` for the source of a copy."""
    _refuse_entity_headers(request, reading=request.method == "GET")
    return Conditions(
        *(
            _number(request.query, f"{prefix}{name}")
            for name in ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")
        )
    )


def xml_conditions(request: Request, *, source: bool = False) -> Conditions:
    """Return the conditions in the headers of an XML request, for its object or for the source of a copy."""
    _refuse_entity_headers(request, reading=request.method in ("GET", "HEAD"))
    if source:
        names = [header.replace("x-goog-", "x-goog-copy-source-") for header in _XML_HEADERS]
    else:
        names = list(_XML_HEADERS)
    return Conditions(*(_number(request.headers, name) for name in names))


def refuse_conditions(request: Request) -> None:
    """Refuse all conditions, as the service does in multipart uploads of the XML API.

    "Preconditions cannot be used in XML API multipart uploads. Attempting to do so results in a 400 NotImplemented
    error." (https://cloud.google.com/storage/docs/request-preconditions)
    """
    for name in (*_XML_HEADERS, *_ENTITY_HEADERS):
        if name in request.headers:
            raise not_implemented(f"A header you provided implies functionality that is not implemented: {name}", 400)


def check_entity_tags(request: Request, live: StoredObject) -> None:
    """Check the standard conditional headers of a read. Tags take precedence over dates (RFC 9110, 13.2.2)."""
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    changed = live.updated.replace(microsecond=0)
    if match is not None:
        if not _names(match, live.etag):
            raise condition_not_met()
    elif (date := request.headers.get("if-unmodified-since")) is not None and changed > parsedate_to_datetime(date):
        raise condition_not_met()
    if none_match is not None:
        if _names(none_match, live.etag):
            raise not_modified()
    elif (date := request.headers.get("if-modified-since")) is not None and changed <= parsedate_to_datetime(date):
        raise not_modified()


def _refuse_entity_headers(request: Request, *, reading: bool) -> None:
    # These headers are documented for reads only. A client that relies on them for writes would lose objects on the
    # real service.
    for name in () if reading else _ENTITY_HEADERS:
        if name in request.headers:
            raise not_implemented(f"the header {name} is documented for reads only", 400)


def _names(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag in [part.strip().removeprefix("W/").strip('"') for part in header.split(",")]


def _numbers(live: StoredObject | None) -> tuple[int, int]:
    return (0, 0) if live is None else (live.generation, live.metageneration)


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not text.removeprefix("-").isdigit():
        raise invalid(f"Invalid value for {name}: {text!r}")
    return int(text)
