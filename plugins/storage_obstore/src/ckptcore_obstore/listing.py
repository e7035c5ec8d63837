"""Lists of keys: what S3's ListObjectsV2 answers, which GCS answers too, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from ckptcore_obstore.bucket_requests import BucketRequests
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed

__all__ = ["Listed", "list_objects", "parse_answer", "spelling_of", "text_of"]


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a list.

    Attributes:
        keys: of objects, whole.
        prefixes: up to the delimiter, where one was given.
    """

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]


def list_objects(bucket: BucketRequests, prefix: str, delimiter: str = "") -> Iterator[Listed]:
    """The objects whose keys begin with a prefix.

    Keys come with escapes (``encoding-type=url``): XML has no way to write some of their characters.

    Raises:
        RequestFailed
    """
    query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        answer = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_answer(answer.body)
        spell = spelling_of(root)
        yield Listed(
            tuple([spell(text_of(item, "Key")) for item in root.iterfind("{*}Contents")]),
            tuple([spell(text_of(item, "Prefix")) for item in root.iterfind("{*}CommonPrefixes")]),
        )
        token = text_of(root, "NextContinuationToken")
        if text_of(root, "IsTruncated").lower() != "true":
            return
        if not token:
            # Of a service that knows the first version of this request only. Who lists must know: what is not seen is not deleted.
            raise RequestFailed(
                Failure(
                    FailureKind.UNSUPPORTED,
                    None,
                    "",
                    "the list goes on, and the service does not say where (list-type=2)",
                )
            )
        query = {**query, "continuation-token": token}


def parse_answer(body: bytes) -> ElementTree.Element:
    """The XML of an answer.

    Raises:
        RequestFailed: if it is none.
    """
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise RequestFailed(
            Failure(FailureKind.OTHER, None, "", f"the answer is no XML ({error}): {body[:100]!r}")
        ) from error


def spelling_of(root: ElementTree.Element) -> Callable[[str], str]:
    """How keys in an answer are to be read: with escapes where it says so; then S3 writes ``+`` for a space, and %2B for ``+``."""
    return unquote_plus if text_of(root, "EncodingType") == "url" else str


def text_of(element: ElementTree.Element, name: str) -> str:
    """The text of a child, in any namespace; empty where there is none."""
    return element.findtext(f"{{*}}{name}") or ""
