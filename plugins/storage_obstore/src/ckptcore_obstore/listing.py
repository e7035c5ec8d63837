"""Lists of keys, one page at a time: ListObjectsV2 of S3, which GCS supports too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from ckptcore_obstore.bucket_requests import BucketRequests
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a list.

    Attributes:
        keys: full keys of objects.
        sizes: size of each object in bytes; 0 if the service does not state it.
        prefixes: common prefixes up to the delimiter, if there is one.
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    prefixes: tuple[str, ...]


def list_objects(bucket: BucketRequests, prefix: str, delimiter: str = "") -> Iterator[ListPage]:
    """List the objects whose keys have a prefix.

    Keys are requested with escapes (``encoding-type=url``), because XML cannot represent some
    characters.

    Raises:
        RequestFailed: if a request fails, or if the service lacks ListObjectsV2.
    """
    query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        response = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_response(response.body)
        decode = key_decoder_of(root)
        objects = root.findall("{*}Contents")
        yield ListPage(
            tuple([decode(text_of(item, "Key")) for item in objects]),
            tuple([int(text) if (text := text_of(item, "Size")).isdecimal() else 0 for item in objects]),
            tuple([decode(text_of(item, "Prefix")) for item in root.iterfind("{*}CommonPrefixes")]),
        )
        token = text_of(root, "NextContinuationToken")
        if text_of(root, "IsTruncated").lower() != "true":
            return
        if not token:
            # The service supports only the first version of this request. Fail, because an
            # incomplete list would leave objects undeleted.
            raise RequestFailed(
                Failure(
                    FailureKind.UNSUPPORTED,
                    None,
                    "",
                    "the list is truncated, but has no continuation token (list-type=2)",
                )
            )
        query = {**query, "continuation-token": token}


def parse_response(body: bytes) -> ElementTree.Element:
    """Parse the XML of a response.

    Raises:
        RequestFailed: if the body is not XML.
    """
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise RequestFailed(
            Failure(FailureKind.OTHER, None, "", f"the response is not XML ({error}): {body[:100]!r}")
        ) from error


def key_decoder_of(root: ElementTree.Element) -> Callable[[str], str]:
    """Return the decoder of keys in a response.

    If keys are escaped, S3 writes ``+`` for a space and ``%2B`` for ``+``.
    """
    return unquote_plus if text_of(root, "EncodingType") == "url" else str


def text_of(element: ElementTree.Element, name: str) -> str:
    """Return the text of a child in any namespace, empty if there is none."""
    return element.findtext(f"{{*}}{name}") or ""
