"""Signatures of requests with the key of a storage account.

See https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from urllib.parse import parse_qsl, urlsplit

_SIGNED: Final = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)
"""Headers that are signed by their values, in this order."""


def shared_key_headers(
    method: str, url: str, headers: Mapping[str, str], account: str, key: str, *, now: datetime | None = None
) -> Mapping[str, str]:
    """Return the headers of a request, with the signature.

    Args:
        method: in upper case.
        url: full URL, escaped.
        headers: all other headers, by lower-case names. ``content-length`` must be among them if there is a body.
        account: name of the storage account.
        key: the account's key, in Base64.
        now: time of the request.
    """
    sent = {**headers, "x-ms-date": format_datetime(now or datetime.now(UTC), usegmt=True)}
    lines = [method, *[sent.get(name, "") for name in _SIGNED]]
    if sent.get("content-length") == "0":
        lines[1 + _SIGNED.index("content-length")] = ""
    lines += [f"{name}:{' '.join(sent[name].split())}" for name in sorted(sent) if name.startswith("x-ms-")]
    parts = urlsplit(url)
    lines.append(f"/{account}{parts.path or '/'}")
    lines += [f"{name.lower()}:{value}" for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True))]
    digest = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256).digest()
    sent["authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    return sent
