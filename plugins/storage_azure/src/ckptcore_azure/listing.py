"""Lists of blobs, one page at a time: see https://learn.microsoft.com/rest/api/storageservices/list-blobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import unquote
from xml.etree import ElementTree

from ckptcore_obstore.bucket_requests import BucketRequests
from ckptcore_obstore.listing import ListPage, parse_response, text_of


def list_blobs(
    bucket: BucketRequests, prefix: str, delimiter: str = "", *, uncommitted: bool = False
) -> Iterator[ListPage]:
    """List the blobs whose keys have a prefix.

    Args:
        bucket: the container.
        prefix: beginning of the keys.
        delimiter: end of common prefixes.
        uncommitted: include keys that have only uncommitted blocks.

    Raises:
        RequestFailed: if a request fails.
    """
    query = {"restype": "container", "comp": "list", "prefix": prefix}
    if delimiter:
        query["delimiter"] = delimiter
    if uncommitted:
        query["include"] = "uncommittedblobs"
    while True:
        response = bucket.run(partial(bucket.plain.send, "GET", query=query))
        root = parse_response(response.body)
        # Accounts with a hierarchical namespace list directories, too.
        blobs = [
            one for one in root.iterfind(".//{*}Blob") if one.findtext("{*}Properties/{*}ResourceType") != "directory"
        ]
        sizes = [one.findtext("{*}Properties/{*}Content-Length") or "" for one in blobs]
        yield ListPage(
            tuple([_name(one) for one in blobs]),
            tuple([int(text) if text.isdecimal() else 0 for text in sizes]),
            tuple([_name(one) for one in root.iterfind(".//{*}BlobPrefix")]),
        )
        marker = text_of(root, "NextMarker")
        if not marker:
            return
        query = {**query, "marker": marker}


def _name(element: ElementTree.Element) -> str:
    """Return a name. Azure escapes those that XML cannot represent."""
    found = element.find("{*}Name")
    name = "" if found is None else found.text or ""
    return unquote(name) if found is not None and found.get("Encoded") == "true" else name
