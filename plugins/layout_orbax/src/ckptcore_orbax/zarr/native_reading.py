"""Reading arrays that other software wrote by tensorstore, from the storage itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import tensorstore

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.protocols import ReadStore, StorageAddress
from ckptcore_orbax.zarr.chunk_places import ChunkPlaces
from ckptcore_orbax.zarr.codec import Telling
from ckptcore_orbax.zarr.native_addresses import native_base
from ckptcore_orbax.zarr.read_chunks import Target
from ckptcore_orbax.zarr.state import ArraysState, StoredName
from ckptcore_orbax.zarr.using import expect_usable

__all__ = ["expect_own_files", "native_store", "read_native"]

_STARTED_BYTES: Final = 128 << 20
"""Elements that are read at a time, in bytes."""

_LEAST_STARTED: Final = 2
"""Boxes that are read at a time, however large they are."""

_OPENED: Final = 256
"""Arrays that are opened at a time."""


def native_store(state: ArraysState, address: StorageAddress | None) -> Mapping[str, Any] | None:
    """The store of tensorstore's own in which the arrays are; None where it knows no such storage, or cannot name it."""
    if address is None:
        return None
    # Without escapes a directory called %2e%2e would be the one above, and one with a | another kind of store.
    url = f"{address.url}{quote(state.prefix.encode('utf-8', 'surrogateescape'))}"
    base = native_base(StorageAddress(url, address.options))
    return {"driver": "ocdbt", "base": base} if base is not None and state.storage == "ocdbt" else base


def expect_own_files(
    wanted: Mapping[int, Sequence[Target]], state: ArraysState, places: ChunkPlaces, store: ReadStore
) -> None:
    """Hold files that tensorstore is about to open to what the store opens: it follows links out of the checkpoint, and waits
    for ever for who writes to a named pipe. Only file systems have either.

    Raises:
        InvalidLocationError: a link leads out.
        CorruptCheckpointError: a file is missing, or is none.
    """
    if store.address is None or not store.address.url.startswith("file:"):
        return
    seen = {""}  # what stands with the keys of a database
    for leaf, targets in wanted.items():
        for target in targets:
            for place in places.find(state.arrays[leaf], target.box).values():
                if place is None or place.key in seen:
                    continue
                seen.add(place.key)
                try:
                    store.size(place.key)
                except ObjectNotFoundError as error:
                    raise CorruptCheckpointError(f"a chunk is missing: {error}", key=place.key) from error


def read_native(state: ArraysState, wanted: Mapping[int, Sequence[Target]], native: Mapping[str, Any]) -> Iterator[int]:
    """Fill targets; yields the number of each once it is there.

    Raises:
        CorruptCheckpointError: where bytes are missing or wrong.
    """
    # One context for all, so that a database is opened once and its nodes are kept.
    context = tensorstore.Context()
    started: deque[tuple[StoredName, Target, Any]] = deque()
    held = 0
    try:
        for leaves in _groups(list(wanted), _OPENED):
            opening = [(leaf, _open(state.arrays[leaf], native, context)) for leaf in leaves]
            for leaf, opened in opening:
                stored = state.arrays[leaf]
                with Telling(stored.name):
                    array = opened.result()
                for target in wanted[leaf]:
                    expect_usable()
                    with Telling(stored.name):
                        reading = tensorstore.array(target.buffer).write(array[target.box.slices])
                    started.append((stored, target, reading))
                    held += _taken(stored, target)
                    while held > _STARTED_BYTES and len(started) > _LEAST_STARTED:
                        held -= _taken(*started[0][:2])
                        yield _finish(started)
        while started:
            yield _finish(started)
    finally:
        # After an error, or where nobody asks for more, tensorstore still writes to targets.
        for _, _, left in started:
            left.exception()


def _taken(stored: StoredName, target: Target) -> int:
    """Bytes that reading a target takes: a read chunk at least, of which a hostile array may have next to nothing."""
    return max(target.buffer.nbytes, stored.form.inner_bytes)


def _groups(leaves: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(leaves), size):
        yield leaves[start : start + size]


def _open(stored: StoredName, native: Mapping[str, Any], context: Any) -> Any:
    kvstore = {**native, "path": f"{native.get('path', '')}{stored.prefix}"}
    driver = "zarr3" if stored.form.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
    with Telling(stored.name):
        return tensorstore.open(spec, open=True, read=True, context=context)


def _finish(started: deque[tuple[StoredName, Target, Any]]) -> int:
    """Wait for the target that was started first. It is taken out when nothing writes to it any more, also if interrupted."""
    stored, target, reading = started[0]
    with Telling(stored.name):
        reading.result()
    started.popleft()
    return target.number
