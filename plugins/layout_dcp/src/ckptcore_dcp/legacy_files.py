"""Files of torch.save as they were before torch 1.6, and are with ``_use_new_zipfile_serialization=False``.

Pickles one after the other (``torch/serialization.py``, `_legacy_save`): a magic number, the version 1001, a dict about
the machine, the value, and a list of the keys of storages. Then come the storages in that order: each a count of
elements in 8 bytes and the elements, all little endian whatever the machine was. How large an element is, only the
pickle says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import dtype_from_name
from ckptcore_dcp.pickles import Call, Persistent, Value, brief, read_pickle
from ckptcore_dcp.storages import StoredBytes
from ckptcore_dcp.stored_tensors import storage_size
from ckptcore_dcp.zip_directories import Fetch

__all__ = ["is_legacy", "read_legacy"]

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_COUNT_BYTES: Final = 8
_FIRST_BYTES: Final = 1 << 18
_MOST_PICKLE_BYTES: Final = 1 << 28


def is_legacy(head: bytes) -> bool:
    """Whether a file whose first bytes are these was written so: a pickle of protocol 2 or later begins it, with the magic number."""
    return head[:1] == b"\x80" and b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") in head[:32]


def read_legacy(fetch: Fetch, size: int, *, key: str) -> tuple[Value, Mapping[str, StoredBytes], int]:
    """The value in a file, where its storages are, and how many bytes the pickles take.

    Args:
        fetch: reads the file.
        size: of the file, in bytes.
        key: the file, for errors.

    Raises:
        CorruptCheckpointError: it is not such a file, or it is cut off.
    """
    values, position = _read_pickles(fetch, size, key)
    magic, version, _, value, keys = values
    if magic != _MAGIC or version != _VERSION:
        raise _corrupt(key, 0, position, f"expected version {_VERSION}, found {brief(version)}")
    if not isinstance(keys, list) or not all(type(one) in (str, int) for one in keys):
        raise _corrupt(key, 0, position, "the list of its storages is missing")
    pickle_bytes = position
    sizes = _storage_sizes(value, key)
    found: dict[str, StoredBytes] = {}
    for one in keys:
        name = str(one)
        known = sizes.get(name)
        if known is None or name in found:
            raise _corrupt(key, position, position, f"the storage {name[:80]!r} is listed twice, or nothing is in it")
        count, itemsize = known
        start = position + _COUNT_BYTES
        stop = start + count * itemsize
        if stop > size:
            raise _corrupt(
                key, position, size, f"its storage {name[:80]!r} ends at byte {stop} of {size}; it is cut off"
            )
        found[name] = StoredBytes(key, start, count * itemsize)
        position = stop
    if position != size:
        # Each count tells where its storage ends. Only where the file goes on behind them, is there doubt about what
        # the pickle says.
        for (count, _), storage in zip((sizes[str(one)] for one in keys), found.values(), strict=True):
            if fetch(storage.start - _COUNT_BYTES, storage.start) != count.to_bytes(_COUNT_BYTES, "little"):
                raise _corrupt(key, storage.start, size, "its storages are not as long as the pickle says")
    return value, found, pickle_bytes


def _read_pickles(fetch: Fetch, size: int, key: str) -> tuple[list[Value], int]:
    """The five values in front, and where they end. How long pickles are is known once they are read."""
    length = min(_FIRST_BYTES, size)
    while True:
        data = fetch(0, length)
        position = 0
        values: list[Value] = []
        try:
            for _ in range(5):
                value, position = read_pickle(data, key=key, start=position)
                values.append(value)
                if len(values) == 1 and value != _MAGIC:
                    raise _corrupt(key, 0, position, "it does not begin with the magic number")
        except CorruptCheckpointError:
            # Cut off or damaged: more bytes will tell, while there are some.
            if length >= min(size, _MOST_PICKLE_BYTES) or (values and values[0] != _MAGIC):
                raise
            length = min(4 * length, size, _MOST_PICKLE_BYTES)
            continue
        return values, position


def _storage_sizes(value: Value, key: str) -> Mapping[str, tuple[int, int]]:
    """The elements of each storage that a value refers to, and the bytes of one."""
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
                    raise _corrupt(key, 0, 0, f"the storage {name[:80]!r} has two sizes")
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


def _corrupt(key: str, start: int, stop: int, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key!r} cannot be read as a file of torch.save from before torch 1.6: {reason}. Restore it from a copy, or "
        "load another checkpoint",
        key=key,
        start=start,
        stop=max(start, stop),
    )
