"""Multipart uploads of the XML API (https://cloud.google.com/storage/docs/multipart-uploads)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from ckptcore_gcs_server.buckets import Buckets
from ckptcore_gcs_server.conditions import Conditions, refuse_conditions
from ckptcore_gcs_server.messages import Request, Response, xml_response
from ckptcore_gcs_server.objects import Properties, crc32c
from ckptcore_gcs_server.refusals import invalid, no_upload, not_implemented
from ckptcore_gcs_server.uploads import PartUpload

_LONGEST_PAGE: Final = 1000
_NAMESPACE: Final = re.compile(r"^\{.*\}")


class XmlUploads:
    """Answers requests of multipart uploads. Preconditions are refused, as in the service."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def answer(self, request: Request, bucket: str, name: str) -> Response:
        """Answer a request.

        Raises:
            Refusal: if the request is invalid, has a precondition, or names a missing bucket or upload.
        """
        self._buckets.require(bucket)
        refuse_conditions(request)
        match request.method:
            case "GET" if "uploads" in request.query and not name:
                return self._list(request, bucket)
            case "POST" if "uploads" in request.query:
                return self._begin(request, bucket, name)
            case "PUT" if "uploadId" in request.query:
                tag = self._upload(request, bucket, name).put(request.number("partNumber", 0), request.body)
                return Response(200, {"ETag": f'"{tag}"', "x-goog-hash": f"crc32c={crc32c(request.body)}"})
            case "POST" if "uploadId" in request.query:
                return self._complete(request, bucket, name)
            case "DELETE" if "uploadId" in request.query:
                del self._buckets.part_uploads[self._upload(request, bucket, name).id]
                return Response(204)
            case _:
                raise not_implemented(f"the fake does not know {request.method} {request.path}")

    def _begin(self, request: Request, bucket: str, name: str) -> Response:
        upload = PartUpload(self._buckets.new_id("parts"), bucket, name, properties_in_headers(request))
        self._buckets.part_uploads[upload.id] = upload
        return xml_response(
            f"<InitiateMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"
            f"<UploadId>{upload.id}</UploadId></InitiateMultipartUploadResult>"
        )

    def _complete(self, request: Request, bucket: str, name: str) -> Response:
        upload = self._upload(request, bucket, name)
        data = upload.joined(_named_parts(request.body))
        # Two requests can complete an upload at the same time. Only one of them removes it; the other one must fail.
        if self._buckets.part_uploads.pop(upload.id, None) is None:
            raise no_upload(upload.id)
        stored = self._buckets.put(bucket, name, data, upload.properties, Conditions(), composed=True)
        return xml_response(
            f"<CompleteMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"
            f'<ETag>"{stored.etag}"</ETag></CompleteMultipartUploadResult>',
            headers={"x-goog-generation": str(stored.generation), "x-goog-hash": f"crc32c={stored.crc32c}"},
        )

    def _list(self, request: Request, bucket: str) -> Response:
        query = request.query
        if "delimiter" in query:
            raise not_implemented("the fake lists uploads without a delimiter only")
        limit = min(request.number("max-uploads", _LONGEST_PAGE), _LONGEST_PAGE)
        marker = query.get("key-marker", ""), query.get("upload-id-marker", "\uffff")
        uploads = sorted(
            (upload.name, upload.id, upload)
            for upload in list(self._buckets.part_uploads.values())
            if upload.bucket == bucket and upload.name.startswith(query.get("prefix", ""))
        )
        rest = [entry for entry in uploads if not query.get("key-marker") or entry[:2] > marker]
        page = rest[:limit]
        spell = spelling(request)
        markers = ""
        if len(rest) > len(page):
            markers = (
                f"<NextKeyMarker>{spell(page[-1][0])}</NextKeyMarker>"
                f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
            )
        return xml_response(
            f"<ListMultipartUploadsResult><Bucket>{escape(bucket)}</Bucket>{markers}"
            + ("<EncodingType>url</EncodingType>" if spell is quote else "")
            + f"<IsTruncated>{'true' if markers else 'false'}</IsTruncated>"
            + "".join(
                f"<Upload><Key>{spell(name)}</Key><UploadId>{id}</UploadId><StorageClass>STANDARD</StorageClass>"
                f"<Initiated>{upload.begun.isoformat()}</Initiated></Upload>"
                for name, id, upload in page
            )
            + "</ListMultipartUploadsResult>"
        )

    def _upload(self, request: Request, bucket: str, name: str) -> PartUpload:
        id = request.query["uploadId"]
        upload = self._buckets.part_uploads.get(id)
        if upload is None or (upload.bucket, upload.name) != (bucket, name):
            raise no_upload(id)
        return upload


def spelling(request: Request) -> Callable[[str], str]:
    """Return the function that encodes names in a listing: as a URL if the client requests it, otherwise as XML."""
    return quote if request.query.get("encoding-type") == "url" else escape


def properties_in_headers(request: Request) -> Properties:
    """Return the properties of an object in the headers of the XML API."""
    start = "x-goog-meta-"
    fixed = {
        "cache-control": "cacheControl",
        "content-disposition": "contentDisposition",
        "content-encoding": "contentEncoding",
        "content-language": "contentLanguage",
    }
    return Properties(
        request.headers.get("content-type", "application/octet-stream"),
        {name.removeprefix(start): value for name, value in request.headers.items() if name.startswith(start)},
        {field: request.headers[name] for name, field in fixed.items() if name in request.headers},
    )


def _named_parts(body: bytes) -> list[tuple[int, str]]:
    """Parse the numbers and tags in the body of a request that completes an upload."""
    try:
        root = ElementTree.fromstring(body)
        parts = []
        for part in root:
            fields = {_NAMESPACE.sub("", child.tag): child.text or "" for child in part}
            parts.append((int(fields["PartNumber"]), fields["ETag"]))
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise invalid(f"The XML you provided was not well-formed: {error}", "MalformedXML") from error
    return parts
