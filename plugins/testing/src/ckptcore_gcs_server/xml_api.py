"""The XML API of the service: buckets and objects (https://cloud.google.com/storage/docs/xml-api/overview)."""

from __future__ import annotations

from datetime import UTC
from typing import Final
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from ckptcore_gcs_server.buckets import Buckets
from ckptcore_gcs_server.conditions import check_entity_tags, xml_conditions
from ckptcore_gcs_server.json_api import generation_of, page_start, page_token
from ckptcore_gcs_server.messages import Request, Response, xml_response
from ckptcore_gcs_server.objects import Properties, StoredObject
from ckptcore_gcs_server.ranges import media_response
from ckptcore_gcs_server.refusals import not_implemented
from ckptcore_gcs_server.xml_uploads import XmlUploads, properties_in_headers, spelling

_NAMESPACE: Final = "http://doc.s3.amazonaws.com/2006-03-01"
_LONGEST_PAGE: Final = 1000


class XmlApi:
    """Answers requests to ``/``, ``/BUCKET`` and ``/BUCKET/NAME``."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._uploads = XmlUploads(buckets)

    def answer(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            Refusal: if the request is invalid, names a missing bucket, object or upload, or fails a precondition.
        """
        bucket, _, name = (unquote(part) for part in request.path.removeprefix("/").partition("/"))
        if {"uploads", "uploadId", "partNumber"} & request.query.keys():
            return self._uploads.answer(request, bucket, name)
        if {"acl", "cors", "versions", "compose", "tagging", "lifecycle"} & request.query.keys():
            raise not_implemented(f"the fake does not know {request.method} {request.path} with {dict(request.query)}")
        match request.method:
            case "GET" if not bucket:
                return self._list_buckets()
            case "PUT" if not name:
                self._buckets.create_bucket(bucket)
                return Response(200)
            case "DELETE" if not name:
                self._buckets.delete_bucket(bucket)
                return Response(204)
            case "HEAD" if not name:
                self._buckets.require(bucket)
                return Response(200)
            case "GET" if not name:
                return self._list(request, bucket)
            case "GET" | "HEAD":
                return self._get(request, bucket, name)
            case "PUT" if "x-goog-copy-source" in request.headers:
                return self._copy(request, bucket, name)
            case "PUT" if "x-goog-resumable" not in request.headers:
                properties = properties_in_headers(request)
                return _written(self._buckets.put(bucket, name, request.body, properties, xml_conditions(request)))
            case "DELETE":
                self._buckets.delete(bucket, name, xml_conditions(request), generation_of(request))
                return Response(204)
            case _:
                raise not_implemented(f"the fake does not know {request.method} {request.path}")

    def _list_buckets(self) -> Response:
        buckets = "".join(f"<Bucket><Name>{escape(name)}</Name></Bucket>" for name in self._buckets.buckets())
        return xml_response(
            f"<ListAllMyBucketsResult xmlns='{_NAMESPACE}'><Buckets>{buckets}</Buckets></ListAllMyBucketsResult>"
        )

    def _list(self, request: Request, bucket: str) -> Response:
        query = request.query
        if query.get("list-type") != "2":
            raise not_implemented("the fake lists with list-type=2 only")
        after = query.get("start-after", "")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = self._buckets.list(
            bucket,
            prefix=prefix,
            delimiter=delimiter,
            start=max(page_start(query.get("continuation-token")), after + "\0" if after else ""),
            limit=min(request.number("max-keys", _LONGEST_PAGE), _LONGEST_PAGE) or _LONGEST_PAGE,
        )
        token = "" if page.next_name is None else page_token(page.next_name)
        spell = spelling(request)
        return xml_response(
            f"<ListBucketResult xmlns='{_NAMESPACE}'><Name>{escape(bucket)}</Name><Prefix>{spell(prefix)}</Prefix>"
            f"<Delimiter>{spell(delimiter)}</Delimiter><KeyCount>{len(page.objects) + len(page.prefixes)}</KeyCount>"
            + ("<EncodingType>url</EncodingType>" if spell is quote else "")
            + f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>"
            + (f"<NextContinuationToken>{token}</NextContinuationToken>" if token else "")
            + "".join(_contents(stored, spell(stored.name)) for stored in page.objects)
            + "".join(f"<CommonPrefixes><Prefix>{spell(name)}</Prefix></CommonPrefixes>" for name in page.prefixes)
            + "</ListBucketResult>"
        )

    def _get(self, request: Request, bucket: str, name: str) -> Response:
        live = self._buckets.get(bucket, name, generation_of(request))
        xml_conditions(request).check_read(live)
        check_entity_tags(request, live)
        response = media_response(request, live)
        return (
            response
            if request.method == "GET"
            else Response(response.status, response.headers, nbytes=len(response.body))
        )

    def _copy(self, request: Request, bucket: str, name: str) -> Response:
        source_bucket, _, source_name = unquote(request.headers["x-goog-copy-source"]).removeprefix("/").partition("/")
        generation = request.headers.get("x-goog-copy-source-generation")
        source = self._buckets.get(source_bucket, source_name, None if generation is None else int(generation))
        xml_conditions(request, source=True).check_write(source)
        replaced = request.headers.get("x-goog-metadata-directive", "COPY").upper() == "REPLACE"
        properties: Properties = properties_in_headers(request) if replaced else source.properties
        written = self._buckets.put(
            bucket,
            name,
            source.data,
            properties,
            xml_conditions(request),
            composed=source.md5 is None,
            components=source.components,
        )
        return xml_response(
            f'<CopyObjectResult><ETag>"{written.etag}"</ETag><LastModified>{_moment(written)}</LastModified>'
            "</CopyObjectResult>",
            headers=_written(written).headers,
        )


def _written(stored: StoredObject) -> Response:
    kept = ("ETag", "x-goog-generation", "x-goog-metageneration", "x-goog-hash", "x-goog-stored-content-length")
    return Response(200, {name: value for name, value in stored.headers().items() if name in kept})


def _contents(stored: StoredObject, key: str) -> str:
    return (
        f"<Contents><Key>{key}</Key><Generation>{stored.generation}</Generation>"
        f"<MetaGeneration>{stored.metageneration}</MetaGeneration><LastModified>{_moment(stored)}</LastModified>"
        f'<ETag>"{stored.etag}"</ETag><Size>{len(stored.data)}</Size></Contents>'
    )


def _moment(stored: StoredObject) -> str:
    return stored.updated.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
