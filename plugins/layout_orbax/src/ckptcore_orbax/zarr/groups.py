"""Groups of zarr 2 and 3: the inner nodes of a hierarchy, by which programs list its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptcore_orbax.zarr.documents import encode_document
from ckptcore_orbax.zarr.dtypes import ZarrFormat

__all__ = ["encode_group", "groups_around"]


def encode_group(zarr_format: ZarrFormat) -> tuple[str, bytes]:
    """Return the name and the bytes of the object that makes a directory a group without attributes.

    From the specifications: zarr 3, "Group metadata"; zarr 2, "Groups".
    """
    if zarr_format == 3:
        return "zarr.json", encode_document({"zarr_format": 3, "node_type": "group", "attributes": {}})
    return ".zgroup", encode_document({"zarr_format": 2})


def groups_around(names: Iterable[str]) -> Sequence[str]:
    """Return the paths of all groups around arrays, ``""`` for the outermost one; none if an array has no name.

    Args:
        names: the paths of the arrays; none is inside another.
    """
    found = {""}
    for name in names:
        if not name:
            return ()
        parts = name.split("/")
        found.update(["/".join(parts[:count]) for count in range(1, len(parts))])
    return sorted(found)
