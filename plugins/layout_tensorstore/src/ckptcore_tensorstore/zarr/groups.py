"""Groups of zarr 2 and 3: the inner nodes of a hierarchy, which programs that list it look for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptcore_tensorstore.zarr.documents import encode_document
from ckptcore_tensorstore.zarr.dtypes import ZarrFormat

__all__ = ["encode_group", "groups_around"]


def encode_group(zarr_format: ZarrFormat) -> tuple[str, bytes]:
    """The name of the object that makes a directory a group without attributes, and its bytes.

    From the specifications: zarr 3, "Group metadata"; zarr 2, "Groups".
    """
    if zarr_format == 3:
        return "zarr.json", encode_document({"zarr_format": 3, "node_type": "group", "attributes": {}})
    return ".zgroup", encode_document({"zarr_format": 2})


def groups_around(names: Iterable[str]) -> Sequence[str]:
    """The paths of all groups that arrays are in, ``""`` for the outermost one; none where an array has no name.

    Args:
        names: the paths of the arrays; none lies within another.
    """
    found = {""}
    for name in names:
        if not name:
            return ()
        parts = name.split("/")
        found.update(["/".join(parts[:count]) for count in range(1, len(parts))])
    return sorted(found)
