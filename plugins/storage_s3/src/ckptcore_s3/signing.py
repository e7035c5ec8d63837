"""Request signatures: AWS Signature Version 4, with an unsigned body.

See https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlsplit

from ckptcore_s3.credentials import Credentials


def signed_headers(
    method: str,
    url: str,
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
    *,
    now: datetime | None = None,
) -> dict[str, str]:
    """Return the headers of a request, with the signature.

    Args:
        method: in upper case.
        url: full URL, escaped, with the query sorted by name.
        headers: headers to sign, by lower-case names.
        credentials: credentials to sign with.
        region: region of the bucket.
        now: time of the signature; None for the current time.
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
