"""Signatures of requests: AWS Signature Version 4, with the body left unsigned.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlsplit

from ckptcore_s3.credentials import Credentials

__all__ = ["signed_headers"]


def signed_headers(
    method: str,
    url: str,
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
    *,
    now: datetime | None = None,
) -> dict[str, str]:
    """The headers of a request with those that sign it.

    Args:
        method: in capitals.
        url: whole, with escapes, its query sorted by name.
        headers: of the request, by names in small letters.
        credentials: whose request it is.
        region: of the bucket.
        now: the time to sign with; None: the clock's.
    """
    at = now or datetime.now(UTC)
    parts = urlsplit(url)
    signed = {
        **headers,
        "host": parts.netloc,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": at.strftime("%Y%m%dT%H%M%SZ"),
    }
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(signed))
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            parts.query,
            *[f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)],
            "",
            names,
            "UNSIGNED-PAYLOAD",
        ]
    )
    day = at.strftime("%Y%m%d")
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", signed["x-amz-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_access_key}".encode()
    for step in (day, region, "s3", "aws4_request"):
        key = _hmac(key, step)
    signature = _hmac(key, text).hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
