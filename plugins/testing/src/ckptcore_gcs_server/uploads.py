"""State of uploads: multipart uploads of the XML API, and resumable uploads of the JSON API."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from ckptcore_gcs_server.conditions import Conditions
from ckptcore_gcs_server.objects import Properties
from ckptcore_gcs_server.refusals import Refusal, invalid

_SMALLEST_PART: Final = 5 << 20
_MAX_PARTS: Final = 10_000
_QUANTUM: Final = 256 << 10


@dataclass(slots=True)
class PartUpload:
    """A multipart upload of the XML API (https://cloud.google.com/storage/docs/multipart-uploads).

    Attributes:
        id, bucket, name: the id of the upload, and the bucket and name of the object.
        properties: the properties of the object.
        parts: the bytes and the hexadecimal MD5 of each part, by part number.
        begun: time at which the upload started.
    """

    id: str
    bucket: str
    name: str
    properties: Properties
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))

    def put(self, number: int, data: bytes) -> str:
        """Add or replace a part. Return its entity tag."""
        if not 1 <= number <= _MAX_PARTS:
            raise invalid(f"Part number must be an integer between 1 and {_MAX_PARTS}, inclusive")
        tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.parts[number] = data, tag
        return tag

    def joined(self, named: Sequence[tuple[int, str]]) -> bytes:
        """Return the object: the parts that the client lists by number and entity tag. Other parts are ignored."""
        if not named:
            raise invalid("The XML you provided names no part", "MalformedXML")
        numbers = [number for number, _ in named]
        if numbers != sorted(set(numbers)):
            raise invalid("The list of parts was not in ascending order", "InvalidPartOrder")
        pieces: list[bytes] = []
        for number, tag in named:
            data, present = self.parts.get(number, (b"", ""))
            if not present or tag.strip().strip('"') != present:
                raise invalid(f"Part {number} was not found, or has another entity tag", "InvalidPart")
            pieces.append(data)
        for number, piece in zip(numbers[:-1], pieces[:-1], strict=True):
            if len(piece) < _SMALLEST_PART:
                raise invalid(
                    f"Part {number} has {len(piece)} bytes; only the last may have fewer than {_SMALLEST_PART}",
                    "EntityTooSmall",
                )
        return b"".join(pieces)


@dataclass(slots=True)
class ResumableSession:
    """A resumable upload (https://cloud.google.com/storage/docs/performing-resumable-uploads).

    Attributes:
        id, bucket, name: the id of the session, and the bucket and name of the object.
        properties: the properties of the object.
        conditions: preconditions of the request that started the session. They are checked when all bytes are received.
        data: the received bytes; empty after the upload is finished.
        done: True when the upload is finished. Further requests, except DELETE, get the properties of the object.
        lock: held by the current request.
    """

    id: str
    bucket: str
    name: str
    properties: Properties
    conditions: Conditions
    data: bytearray = field(default_factory=bytearray)
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, start: int, piece: bytes, total: int | None) -> bool:
        """Add bytes. Return True if the object is complete.

        Args:
            start: offset of the bytes. Bytes that were received before are skipped.
            piece: the bytes.
            total: size of the object, or None if the client does not know it yet.
        """
        if start > len(self.data):
            raise Refusal(
                503, "backendError", "ServiceUnavailable", f"bytes {len(self.data)} to {start} were not received yet"
            )
        if total is None and len(piece) % _QUANTUM:
            raise invalid(f"expected a multiple of {_QUANTUM} bytes in each piece except the last, found {len(piece)}")
        self.data += piece[len(self.data) - start :]
        if total is not None and len(self.data) > total:
            raise invalid(f"received {len(self.data)} bytes, but {total} were announced")
        return total == len(self.data)
