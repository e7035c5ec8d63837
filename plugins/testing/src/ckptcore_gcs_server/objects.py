"""Stored objects: immutable bytes with a generation and checksums."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote

import google_crc32c


def md5(data: bytes) -> str:
    """Return the MD5 of bytes in base64, the service's format."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def crc32c(data: bytes) -> str:
    """Return the CRC32C of bytes, big-endian in base64, the service's format."""
    return base64.b64encode(int(google_crc32c.value(data)).to_bytes(4, "big")).decode()


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of an object that a client sets.

    Attributes:
        content_type: the media type.
        metadata: custom names and values.
        headers: other fields by their names in the JSON API (``cacheControl``, ``contentEncoding``, ...).
    """

    content_type: str = "application/octet-stream"
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One generation of an object.

    Attributes:
        bucket, name: the bucket and the name.
        data: the bytes.
        generation: unique number of this write, larger than those of all earlier writes.
        metageneration: version of the properties. It starts at 1, and each change of the properties adds 1.
        properties: the client's properties.
        created, updated: time of the write, and of the last change of properties.
        crc32c: CRC32C in base64.
        md5: MD5 in base64. None for composed objects and for multipart uploads of the XML API.
        components: number of components of a composed object, or None.
    """

    bucket: str
    name: str
    data: bytes
    generation: int
    properties: Properties
    crc32c: str
    md5: str | None
    created: datetime
    updated: datetime
    metageneration: int = 1
    components: int | None = None

    @property
    def etag(self) -> str:
        """Opaque tag that changes with the bytes and the properties."""
        return base64.b64encode(b"%x/%x" % (self.generation, self.metageneration)).decode()

    def resource(self, base: str) -> dict[str, Any]:
        """Return the resource of the object in the JSON API. `base` is the URL of the service."""
        path = f"{quote(self.bucket, safe='')}/o/{quote(self.name, safe='')}"
        resource: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": f"{base}/storage/v1/b/{path}",
            "mediaLink": f"{base}/download/storage/v1/b/{path}?generation={self.generation}&alt=media",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": self.properties.content_type,
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": _timestamp(self.created),
            "updated": _timestamp(self.updated),
            "timeStorageClassUpdated": _timestamp(self.created),
            **self.properties.headers,
        }
        if self.md5 is not None:
            resource["md5Hash"] = self.md5
        if self.components is not None:
            resource["componentCount"] = self.components
        if self.properties.metadata:
            resource["metadata"] = dict(self.properties.metadata)
        return resource

    def headers(self) -> dict[str, str]:
        """Return the headers of a download, equal in both APIs."""
        hashes = [f"crc32c={self.crc32c}"] + ([] if self.md5 is None else [f"md5={self.md5}"])
        headers = {
            "Content-Type": self.properties.content_type,
            "ETag": f'"{self.etag}"',
            "Last-Modified": format_datetime(self.updated.astimezone(UTC), usegmt=True),
            "Accept-Ranges": "bytes",
            "x-goog-generation": str(self.generation),
            "x-goog-metageneration": str(self.metageneration),
            "x-goog-stored-content-length": str(len(self.data)),
            "x-goog-stored-content-encoding": "identity",
            "x-goog-storage-class": "STANDARD",
            "x-goog-hash": ",".join(hashes),
        }
        if self.components is not None:
            headers["x-goog-component-count"] = str(self.components)
        return headers | {f"x-goog-meta-{name}": value for name, value in self.properties.metadata.items()}


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
