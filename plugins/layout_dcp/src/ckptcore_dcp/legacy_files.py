"""The torch.save format before torch 1.6, also written with ``_use_new_zipfile_serialization=False``.

A sequence of pickles (``torch/serialization.py``, `_legacy_save`): a magic number, the version
1001, a dict about the machine, the value, and a list of storage keys. The storages follow in that order. Each consists
of a count of elements in 8 bytes, and the elements. Everything is little endian on all machines. The element size is
known from the pickle only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import dtype_from_name
from ckptcore_dcp.pickles import Call, Persistent, Places, Value, brief, read_pickle
from ckptcore_dcp.storages import StoredBytes
from ckptcore_dcp.stored_tensors import storage_size
from ckptcore_dcp.zip_directories import Fetch

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_COUNT_BYTES: Final = 8
_FIRST_BYTES: Final = 1 << 18
_MAX_PICKLE_BYTES: Final = 1 << 28


def is_legacy(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of the legacy format.

    It begins with a pickle of protocol 2 or later that contains the magic number.
    """
    return head[:1] == b"\x80" and b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") in head[:32]


def read_legacy(
    fetch: Fetch, size: int, *, key: str, places: Places, first_bytes: int = _FIRST_BYTES
) -> tuple[Value, Mapping[str, StoredBytes], int]:
    """Return the value in a file, its storages, and the total length of the pickles in bytes.

    Args:
        fetch: reads the file.
        size: length of the file, in bytes.
        key: the file, for errors.
        places: receives the byte ranges of texts and bytes in the file.
        first_bytes: length of the first read.

    Raises:
        CorruptCheckpointError: the file has another format, or is truncated.
    """
    values, position = _read_pickles(fetch, size, key, places, first_bytes)
    magic, version, _, value, keys = values
    if magic != _MAGIC or version != _VERSION:
        raise _corrupt_file(key, 0, position, f"expected version {_VERSION}, found {brief(version)}")
    if not isinstance(keys, list) or not all(type(item) in (str, int) for item in keys):
        raise _corrupt_file(key, 0, position, "the list of storages is missing")
    pickle_bytes = position
    sizes = _storage_sizes(value, key)
    storages: dict[str, StoredBytes] = {}
    for item in keys:
        name = str(item)
        known = sizes.get(name)
        if known is None or name in storages:
            raise _corrupt_file(key, position, position, f"the storage {name[:80]!r} is listed twice or not used")
        count, itemsize = known
        start = position + _COUNT_BYTES
        stop = start + count * itemsize
        if stop > size:
            raise _corrupt_file(
                key, position, size, f"the storage {name[:80]!r} ends at byte {stop} of {size}; the file is cut off"
            )
        storages[name] = StoredBytes(key, start, count * itemsize)
        position = stop
    if position != size:
        # The counts before the storages allow a check of the sizes in the pickle. The check needs a
        # request per storage, so it is made only if the file has bytes after the last storage.
        for (count, _), storage in zip((sizes[str(item)] for item in keys), storages.values(), strict=True):
            if fetch(storage.start - _COUNT_BYTES, storage.start) != count.to_bytes(_COUNT_BYTES, "little"):
                raise _corrupt_file(key, storage.start, size, "the storages are not as long as the pickle states")
    return value, storages, pickle_bytes


def _read_pickles(fetch: Fetch, size: int, key: str, places: Places, first_bytes: int) -> tuple[list[Value], int]:
    """Return the five leading values, and their end. Reads more bytes until the pickles are complete."""
    length = min(first_bytes, size)
    while True:
        data = fetch(0, length)
        position = 0
        values: list[Value] = []
        try:
            for _ in range(5):
                value, position = read_pickle(data, key=key, start=position, places=places)
                values.append(value)
                if len(values) == 1 and value != _MAGIC:
                    raise _corrupt_file(key, 0, position, "the magic number is missing")
        except CorruptCheckpointError:
            # Truncated or damaged: retry with more bytes, if the file has more.
            if length >= min(size, _MAX_PICKLE_BYTES) or (values and values[0] != _MAGIC):
                raise
            length = min(4 * length, size, _MAX_PICKLE_BYTES)
            continue
        return values, position


def _storage_sizes(value: Value, key: str) -> Mapping[str, tuple[int, int]]:
    """Return the element count and element size of each storage that a value refers to."""
    sizes: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    left: list[Value] = [value]
    while left:
        each = left.pop()
        if isinstance(each, Persistent):
            if isinstance(each.id, tuple) and each.id and each.id[0] in ("storage", b"storage"):
                name, dtype, count = storage_size(each, key=key)
                known = sizes.setdefault(name, (count, dtype_from_name(dtype).itemsize))
                if known[0] * known[1] != count * dtype_from_name(dtype).itemsize:
                    raise _corrupt_file(key, 0, 0, f"the storage {name[:80]!r} has two sizes")
            continue
        if not isinstance(each, list | tuple | dict | set | frozenset | Call) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            left.extend(each.keys())
            left.extend(each.values())
        elif isinstance(each, Call):
            left.extend([*each.arguments, each.state, *each.appended, *each.keywords.values()])
            left.extend(part for _, part in each.pairs)
        else:
            left.extend(each)
    return sizes


def _corrupt_file(key: str, start: int, stop: int, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key!r} cannot be read as a torch.save file of the format before torch 1.6: {reason}. Restore it from a "
        "copy, or load another checkpoint",
        key=key,
        start=start,
        stop=max(start, stop),
    )
