"""The table of files in each manifest and node, and the rules for paths in it.

The path of a file is ``transitive + base + relative``, concatenated without a separator. A table
stores base and relative as one string, with the length of the base. The transitive path is the base
of the file that contains the node, known from its parent. It is empty in a manifest. `decode_files` puts the
directory of the database before it, so that its results are keys of the store. Databases that Orbax merged have the
base ``ocdbt.process_0/`` and the relative path ``d/<32 hex digits>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Final

import numpy as np

from ckptcore.errors import InvalidLocationError
from ckptcore_orbax.ocdbt.cursor import Cursor, encode_varint, encode_varints

NODES: Final = "ocdbt_meta"
"""Directory of nodes, if nodes and values are in separate directories."""

VALUES: Final = "ocdbt_data"
"""Directory of values, if nodes and values are in separate directories."""

_MAX_PATH_BYTES: Final = 65535
"""Limit of tensorstore."""

_ALWAYS_ALLOWED_TABLE: Final = 1 << 20
_MAX_GROWTH: Final = 64
"""Limit for the total size of the paths of a table.

The limit is the larger of `_ALWAYS_ALLOWED_TABLE` bytes and `_MAX_GROWTH` times their size without shared prefixes.
"""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a database.

    Attributes:
        path: key of the object in the store; empty if the entry names no file.
        base: transitive path of the nodes in this file: a prefix of `path`.
    """

    path: str
    base: str


def check_path(path: str) -> str | None:
    """Return a description of what is wrong with a path, or None."""
    if "\0" in path:
        return "a NUL character"
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        return "an empty, '.' or '..' part"
    return None


def decode_files(cursor: Cursor, transitive: str) -> list[DataFile]:
    """Read the table of files.

    Args:
        cursor: position of the table.
        transitive: directory of the database, followed by the transitive path of the manifest or node. A
            prefix of every resulting path.

    Raises:
        CorruptCheckpointError: the table is invalid, or a path leaves the store.
    """
    byte_range = cursor.byte_range
    count = cursor.count("the number of files")
    if count == 0:
        return []
    prefixes = [0, *cursor.varints(count - 1, "the shared prefix of a path", _MAX_PATH_BYTES).tolist()]
    suffixes = cursor.varints(count, "the length of a path", _MAX_PATH_BYTES).tolist()
    bases = cursor.varints(count, "the length of a base path", _MAX_PATH_BYTES).tolist()
    table_bytes = sum(suffixes)
    limit = max(_ALWAYS_ALLOWED_TABLE, _MAX_GROWTH * table_bytes)
    if (total := sum(prefixes) + table_bytes + count * len(transitive)) > limit:
        raise byte_range.damage_error(f"its paths of files have {total} bytes, expected at most {limit}")
    files = []
    path = b""
    for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=True):
        if prefix > len(path):
            raise byte_range.damage_error(f"the path of a file shares {prefix} bytes with one of {len(path)}")
        path = path[:prefix] + cursor.take(suffix, "the path of a file")
        if base > len(path) or len(path) > _MAX_PATH_BYTES:
            raise byte_range.damage_error(f"the path of a file has {len(path)} bytes and a base of {base}")
        try:
            relative, own_base = path.decode(), path[:base].decode()
        except UnicodeDecodeError as error:
            raise byte_range.damage_error(f"the path of a file is not UTF-8: {path[:200]!r}") from error
        if not relative:
            files.append(DataFile("", transitive))
            continue
        if (wrong := check_path(transitive + relative)) is not None:
            raise byte_range.damage_error(
                f"the path of a file has {wrong}: {(transitive + relative)[:200]!r}, expected a relative one such as "
                "'d/name'"
            )
        files.append(DataFile(transitive + relative, transitive + own_base))
    return files


def encode_files(paths: Sequence[str]) -> bytes:
    """Return a table of paths relative to the database. Sorted paths take less space.

    The base of each path ends before the directory of its file, as in Orbax's databases. Files in
    `NODES` have an empty base.

    Raises:
        InvalidLocationError: readers would reject a path.
    """
    if not paths:
        return encode_varint(0)
    encoded = []
    for path in paths:
        data = path.encode()
        if (wrong := check_path(path) or ("too many bytes" if len(data) > _MAX_PATH_BYTES else None)) is not None:
            raise InvalidLocationError(
                f"the path {path[:200]!r} of a file has {wrong}: expected a relative one such as "
                "'ocdbt.process_0/d/name'"
            )
        encoded.append(data)
    shared = [len(commonprefix(pair)) for pair in pairwise(encoded)]  # noqa: RUF071  # keys, not paths
    suffixes = [data[prefix:] for data, prefix in zip(encoded, [0, *shared], strict=True)]
    bases = [len(path[: _base_length(path)].encode()) for path in paths]
    return b"".join(
        (
            encode_varint(len(paths)),
            encode_varints(np.array(shared, np.uint64)),
            encode_varints(np.array([len(suffix) for suffix in suffixes], np.uint64)),
            encode_varints(np.array(bases, np.uint64)),
            *suffixes,
        )
    )


def _base_length(path: str) -> int:
    """Return the number of characters before ``d/<name>`` or ``ocdbt_data/<name>``."""
    above, _, directory = path.rpartition("/")[0].rpartition("/")
    return len(above) + 1 if above and directory in ("d", VALUES) else 0
