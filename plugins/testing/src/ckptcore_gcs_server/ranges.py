"""Downloads of objects and of byte ranges."""

from __future__ import annotations

import re
from typing import Final

from ckptcore_gcs_server.messages import Request, Response
from ckptcore_gcs_server.objects import StoredObject

_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")


def media_response(request: Request, live: StoredObject) -> Response:
    """Return the bytes of an object, or of the requested ``Range`` (RFC 9110, 14.2); status 416 for an empty range."""
    size = len(live.data)
    headers = live.headers()
    asked = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if asked is None or asked.groups() == ("", ""):
        return Response(200, headers, live.data)
    first, last = asked.groups()
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    if last and first and int(last) < int(first):
        return Response(200, headers, live.data)
    if start >= stop:
        return Response(416, {"Content-Range": f"bytes */{size}"}, b"The requested range cannot be satisfied.")
    return Response(
        206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}, memoryview(live.data)[start:stop]
    )
