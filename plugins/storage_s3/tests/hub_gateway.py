"""A local server that behaves like the S3 gateway of Hugging Face.

It follows https://huggingface.co/docs/hub/storage-buckets-s3 (November 2026). The address of an object is
``/NAMESPACE/BUCKET/KEY``. The gateway does not store user metadata. It redirects reads of clients that are not based on
botocore. Only PutObject has conditions, and ListObjectsV2 is the only way to list objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from xml.sax.saxutils import escape

from plugins.storage_s3.tests.stub_server import Reply, Request, error_reply

_DATE = "Sun, 29 Nov 2026 10:00:00 GMT"
_PROXIED = ("aws-cli", "botocore", "aws-sdk-rust")
_ENDS = ("/", "..")


class HubGateway:
    """A gateway with one bucket, ``team/box``. Pass it to a stub server as the function that answers.

    Attributes:
        objects: data by key.
        uploads: parts of unfinished uploads, by key and id.
        checks: False to ignore conditions, as other gateways do.
        lost: the answers to this many of the next puts are lost.
        lost_completions: the answers to this many of the next completions of uploads are lost.
        redirected: number of reads that were redirected.
    """

    def __init__(self, *, checks: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.checks = checks
        self.lost = self.lost_completions = 0
        self.redirected = 0

    def __call__(self, request: Request) -> Reply:
        """Answer a request."""
        assert request.path.startswith("/team/box"), request.path
        assert "Credential=HFAK" in request.headers["authorization"]
        key = request.path.removeprefix("/team/box").removeprefix("/")
        if not key:
            return self._of_bucket(request)
        if key.endswith(_ENDS) or "//" in key or "../" in key or "\\" in key:
            return error_reply(400, "InvalidArgument", "invalid key")
        if "uploads" in request.query or "uploadId" in request.query:
            return self._of_upload(key, request)
        if request.method == "PUT":
            return self._put(key, request)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return Reply(204)
        return self._read(key, request)

    def _put(self, key: str, request: Request) -> Reply:
        there, wanted = self.objects.get(key), request.headers.get("if-match")
        if self.checks and there is not None and "if-none-match" in request.headers:
            return error_reply(412, "PreconditionFailed")
        if self.checks and wanted is not None and wanted != _tag(there):
            return error_reply(412 if there is not None else 404, "PreconditionFailed" if there else "NoSuchKey")
        self.objects[key] = request.body
        if self.lost:
            self.lost -= 1
            return Reply(0)
        return Reply(200, b"", {"etag": _tag(request.body)})

    def _read(self, key: str, request: Request) -> Reply:
        data = self.objects.get(key)
        if data is None:
            return error_reply(404, "NoSuchKey")
        headers = {"etag": _tag(data), "last-modified": _DATE}
        if request.method == "HEAD":
            return Reply(200, b"", {**headers, "content-length": str(len(data))})
        if not any(name in request.headers.get("user-agent", "") for name in _PROXIED):
            self.redirected += 1
            return Reply(302, b"", {"location": "https://cdn.invalid/data?Signature=x"})
        asked = request.headers.get("range")
        if asked is None:
            return Reply(200, data, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(data)), len(data) - 1) + 1
        if start >= len(data):
            return error_reply(416, "InvalidRange")
        return Reply(206, data[start:stop], {**headers, "content-range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _of_bucket(self, request: Request) -> Reply:
        if request.method == "POST" and "delete" in request.query:
            return error_reply(501, "NotImplemented")
        if "uploads" in request.query:
            prefix = request.query.get("prefix", "")
            unfinished = [(key, name) for name, (key, _) in self.uploads.items() if key.startswith(prefix)]
            items = [
                f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId></Upload>" for key, name in unfinished
            ]
            return _xml("ListMultipartUploadsResult", [*items, "<IsTruncated>false</IsTruncated>"])
        if request.query.get("list-type") != "2" or request.query.get("delimiter", "/") != "/":
            return error_reply(501, "NotImplemented")
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter")
        keys, above = [], set()
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            name, slash, _ = key.removeprefix(prefix).partition("/")
            if delimiter and slash:
                above.add(f"{prefix}{name}/")
            else:
                keys.append(key)
        items = [f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size></Contents>" for key in keys]
        items += [
            f"<CommonPrefixes><Prefix>{escape(directory)}</Prefix></CommonPrefixes>" for directory in sorted(above)
        ]
        return _xml("ListBucketResult", [*items, "<IsTruncated>false</IsTruncated>"])

    def _of_upload(self, key: str, request: Request) -> Reply:
        if "uploads" in request.query:
            name = f"upload-{len(self.uploads)}-{hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()}"
            self.uploads[name] = key, {}
            return _xml("InitiateMultipartUploadResult", [f"<UploadId>{name}</UploadId>"])
        name = request.query["uploadId"]
        if name not in self.uploads:
            return error_reply(404, "NoSuchUpload")
        if request.method == "PUT":
            self.uploads[name][1][int(request.query["partNumber"])] = request.body
            return Reply(200, b"", {"etag": _tag(request.body)})
        parts = self.uploads.pop(name)[1]
        if request.method == "DELETE":
            return Reply(204)
        # The documentation of the gateway mentions no conditions for this request.
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        if self.lost_completions:
            self.lost_completions -= 1
            return Reply(0)
        return _xml("CompleteMultipartUploadResult", [])


def _tag(data: bytes | None) -> str:
    return "" if data is None else f'"{hashlib.sha256(data).hexdigest()}"'


def _xml(name: str, items: Sequence[str]) -> Reply:
    return Reply(200, f"<{name}>{''.join(items)}</{name}>".encode(), {"content-type": "application/xml"})
