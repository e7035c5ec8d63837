"""The JSON API of the service: buckets and objects (https://cloud.google.com/storage/docs/json_api/v1)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from ckptcore_gcs_server.buckets import Buckets
from ckptcore_gcs_server.conditions import Conditions, json_conditions
from ckptcore_gcs_server.messages import Request, Response, json_response
from ckptcore_gcs_server.objects import Properties, StoredObject
from ckptcore_gcs_server.ranges import media_response
from ckptcore_gcs_server.refusals import Refusal, invalid, not_implemented

_LONGEST_PAGE: Final = 1000
_MAX_COMPONENTS: Final = 32
_FIXED_FIELDS: Final = ("cacheControl", "contentDisposition", "contentEncoding", "contentLanguage")


class JsonApi:
    """Answers requests to ``/storage/v1`` and ``/download/storage/v1``."""

    def __init__(self, buckets: Buckets, base: str) -> None:
        self._buckets = buckets
        self._base = base

    def answer(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            Refusal: if the request is invalid, names a missing bucket or object, or fails a precondition.
        """
        path = request.path.removeprefix("/download").removeprefix("/storage/v1").strip("/")
        # Split the path before unquoting, because names contain quoted slashes.
        match request.method, [unquote(part) for part in path.split("/")]:
            case "GET", ["b"]:
                items = [self._bucket(name) for name in self._buckets.buckets()]
                return json_response({"kind": "storage#buckets", "items": items})
            case "POST", ["b"]:
                name = request.json().get("name")
                if not isinstance(name, str):
                    raise invalid("Required parameter: name")
                self._buckets.create_bucket(name)
                return json_response(self._bucket(name))
            case "GET", ["b", bucket]:
                self._buckets.require(bucket)
                return json_response(self._bucket(bucket))
            case "GET", ["b", bucket, "storageLayout"]:
                self._buckets.require(bucket)
                layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US", "locationType": "region"}
                return json_response(layout | {"hierarchicalNamespace": {"enabled": False}})
            case "DELETE", ["b", bucket]:
                self._buckets.delete_bucket(bucket)
                return Response(204)
            case "GET", ["b", bucket, "o"]:
                return self._list(request, bucket)
            case "GET", ["b", bucket, "o", name]:
                return self._get(request, bucket, name)
            case "DELETE", ["b", bucket, "o", name]:
                self._buckets.delete(bucket, name, json_conditions(request), generation_of(request))
                return Response(204)
            case (("PATCH" | "PUT"), ["b", bucket, "o", name]):
                return self._change(request, bucket, name)
            case "POST", ["b", bucket, "o", name, "compose"]:
                return self._compose(request, bucket, name)
            case "POST", ["b", bucket, "o", name, ("rewriteTo" | "copyTo") as verb, "b", to_bucket, "o", to_name]:
                written = self._copy(request, (bucket, name), (to_bucket, to_name))
                return json_response(
                    _rewritten(written, self._base) if verb == "rewriteTo" else self._resource(written)
                )
            case "POST", ["b", bucket, "o", name, "moveTo", "o", to_name]:
                written = self._copy(request, (bucket, name), (bucket, to_name))
                generation = Conditions(generation=self._buckets.get(bucket, name).generation)
                self._buckets.delete(bucket, name, generation)
                return json_response(self._resource(written))
            case _:
                raise not_implemented(f"the fake does not know {request.method} {request.path}")

    def _list(self, request: Request, bucket: str) -> Response:
        start = max(request.query.get("startOffset", ""), page_start(request.query.get("pageToken")))
        page = self._buckets.list(
            bucket,
            prefix=request.query.get("prefix", ""),
            delimiter=request.query.get("delimiter", ""),
            start=start,
            stop=request.query.get("endOffset") or None,
            limit=min(request.number("maxResults", _LONGEST_PAGE), _LONGEST_PAGE) or _LONGEST_PAGE,
        )
        listing: dict[str, Any] = {"kind": "storage#objects"}
        # Empty members are left out, as in the service.
        if page.objects:
            listing["items"] = [self._resource(stored) for stored in page.objects]
        if page.prefixes:
            listing["prefixes"] = list(page.prefixes)
        if page.next_name is not None:
            listing["nextPageToken"] = page_token(page.next_name)
        return json_response(listing)

    def _get(self, request: Request, bucket: str, name: str) -> Response:
        media = request.query.get("alt") == "media" or request.path.startswith("/download")
        conditions = json_conditions(request)
        try:
            live = self._buckets.get(bucket, name, generation_of(request))
        except Refusal as refusal:
            if not media:
                raise
            # In this API, the body of a failed download is a line of text, not JSON.
            return Response(refusal.status, {"Content-Type": "text/html; charset=UTF-8"}, refusal.message.encode())
        conditions.check_read(live)
        return media_response(request, live) if media else json_response(self._resource(live))

    def _change(self, request: Request, bucket: str, name: str) -> Response:
        conditions = json_conditions(request)
        old = self._buckets.get(bucket, name).properties if request.method == "PATCH" else Properties()
        changed = self._buckets.change_properties(bucket, name, properties_of(request.json(), old), conditions)
        return json_response(self._resource(changed))

    def _compose(self, request: Request, bucket: str, name: str) -> Response:
        body = request.json()
        sources = body.get("sourceObjects") or []
        if not 1 <= len(sources) <= _MAX_COMPONENTS:
            raise invalid(f"The number of source components provided ({len(sources)}) is not from 1 to 32.")
        pieces: list[StoredObject] = []
        for source in sources:
            generation = source.get("generation")
            piece = self._buckets.get(bucket, source["name"], None if generation is None else int(generation))
            wanted = (source.get("objectPreconditions") or {}).get("ifGenerationMatch")
            Conditions(generation=None if wanted is None else int(wanted)).check_write(piece)
            pieces.append(piece)
        written = self._buckets.put(
            bucket,
            name,
            b"".join(piece.data for piece in pieces),
            properties_of(body.get("destination") or {}, pieces[0].properties),
            json_conditions(request),
            composed=True,
            components=sum(piece.components or 1 for piece in pieces),
        )
        return json_response(self._resource(written))

    def _copy(self, request: Request, source: tuple[str, str], destination: tuple[str, str]) -> StoredObject:
        generation = request.query.get("sourceGeneration")
        stored = self._buckets.get(*source, None if generation is None else int(generation))
        json_conditions(request, "ifSource").check_write(stored)
        return self._buckets.put(
            *destination,
            stored.data,
            properties_of(request.json(), stored.properties),
            json_conditions(request),
            composed=stored.md5 is None,
            components=stored.components,
        )

    def _bucket(self, bucket: str) -> dict[str, str]:
        created = self._buckets.buckets()[bucket].isoformat()
        return {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US", "timeCreated": created}

    def _resource(self, stored: StoredObject) -> dict[str, Any]:
        return stored.resource(self._base)


def properties_of(resource: Mapping[str, Any], old: Properties | None = None) -> Properties:
    """Return the properties in an object's JSON resource. Missing properties are taken from `old`, if given.

    Custom metadata with the value null is removed.
    """
    old = old or Properties()
    metadata = {**old.metadata, **(resource.get("metadata") or {})}
    return Properties(
        content_type=resource.get("contentType") or old.content_type,
        metadata={name: str(value) for name, value in metadata.items() if value is not None},
        headers={**old.headers, **{name: str(resource[name]) for name in _FIXED_FIELDS if resource.get(name)}},
    )


def generation_of(request: Request) -> int | None:
    """Return the generation in a request, or None if the request does not specify one."""
    return request.number("generation", 0) or None


def page_token(name: str) -> str:
    """Return an opaque token for a page that starts with this name."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def page_start(token: str | None) -> str:
    """Return the name at which the page of a token starts. Without a token, return "" for the first page."""
    try:
        return base64.urlsafe_b64decode(token or "").decode()
    except (binascii.Error, ValueError) as error:
        raise invalid(f"Invalid page token: {token!r}") from error


def _rewritten(written: StoredObject, base: str) -> dict[str, Any]:
    size = str(len(written.data))
    return {
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": size,
        "objectSize": size,
        "done": True,
        "resource": written.resource(base),
    }
