"""Reader of arrays with TensorStore's own storage drivers, for checkpoints of other software."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit

import tensorstore

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import JSON
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, kind_in_place_of
from ckptcore.protocols import ReadStore, StorageAddress
from ckptcore_orbax.zarr.chunk_codec import ReadErrors
from ckptcore_orbax.zarr.chunk_locations import DatabaseCache, locate_chunks
from ckptcore_orbax.zarr.chunk_sizes import expect_justified
from ckptcore_orbax.zarr.chunking import check_chunk_count, iter_chunks
from ckptcore_orbax.zarr.state import ArraysState, BoxRead, ZarrArray
from ckptcore_orbax.zarr.tensorstore_guard import expect_usable

_QUOTED: Final = re.compile(r"^s3://.*(%20| )")


@functools.cache
def _quotes() -> bool:
    """Return whether the installed tensorstore quotes spaces in requests to S3. Versions before 0.1.86 do not."""
    version = importlib.metadata.version("tensorstore").split(".")
    return tuple(int(part) if part.isdecimal() else 0 for part in version) >= (0, 1, 86)


_GOOGLE: Final = "https://storage.googleapis.com"


def native_spec(address: StorageAddress) -> Mapping[str, Any] | None:
    """Return tensorstore's key-value store spec for a directory; None if the storage or an option is unsupported.

    ckptcore itself reads unsupported storages: they may need secrets that no address contains, or
    options that tensorstore lacks.
    """
    if _QUOTED.search(address.url) and not _quotes():
        return None
    options = _OPTIONS.get(address.url.partition("://")[0])
    driver_options = options(address.options) if options is not None else None
    if driver_options is None:
        return None
    try:
        # The URL is escaped: otherwise a directory called %2e%2e would refer to its parent.
        return {**tensorstore.KvStore.Spec(address.url).to_json(), **driver_options}
    except ValueError:
        return None


def _no_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    return None if options else {}


def _s3_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    """Return the options of https://google.github.io/tensorstore/kvstore/s3, or None if an option is unsupported."""
    remaining = dict(options)
    endpoint, region = remaining.pop("endpoint", None), remaining.pop("region", None)
    credentials = remaining.pop("credentials", None)
    pays = remaining.pop("requester_pays", False)
    if remaining or credentials not in _AWS_CREDENTIALS:
        return None
    driver: dict[str, Any] = {"aws_credentials": {"type": credentials}}
    if region is not None:
        driver["aws_region"] = region
    if endpoint is not None and not _is_usual(str(endpoint), str(region)):
        driver["endpoint"] = endpoint
    if pays:
        driver["requester_pays"] = True
    return driver


_AWS_CREDENTIALS: Final = ("anonymous", "environment")
"""Credential types for which tensorstore and ckptcore find the same credentials.

tensorstore 0.1.86 cannot use profiles ("Failed to create credentials provider"), its default search
may find other credentials, and no address contains explicit credentials.
"""


def _is_usual(endpoint: str, region: str) -> bool:
    """Return True for the endpoint of Amazon that tensorstore derives from the region. False for FIPS or dual stack."""
    host = urlsplit(endpoint).hostname or ""
    return host.removesuffix(".cn") in ("s3.amazonaws.com", f"s3.{region}.amazonaws.com")


def _gcs_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    """Return the options of https://google.github.io/tensorstore/kvstore/gcs, or None if an option is unsupported.

    tensorstore has one endpoint and one set of credentials per process, so other values are
    unsupported.
    """
    remaining = dict(options)
    endpoint = str(remaining.pop("endpoint", _GOOGLE)).rstrip("/")
    credentials = remaining.pop("credentials", "default")
    project = remaining.pop("user_project", None)
    if remaining or credentials != "default":
        return None
    if endpoint != os.environ.get("TENSORSTORE_GCS_HTTP_URL", _GOOGLE).rstrip("/"):
        return None
    return {} if project is None else {"gcs_user_project": {"project_id": project}}


_OPTIONS: Final[Mapping[str, Callable[[Mapping[str, JSON]], Mapping[str, Any] | None]]] = {
    "file": _no_options,
    "s3": _s3_options,
    "gs": _gcs_options,
}
"""Functions that convert the options of an address, by URL scheme."""


_STARTED_BYTES: Final = 128 << 20
"""Maximum size of elements being read at a time, in bytes, unless only `_MIN_STARTED` boxes are being read."""

_MIN_STARTED: Final = 2
"""Minimum number of boxes being read at a time, regardless of size."""

_CHECKED_CHUNKS: Final = 1 << 12
"""Number of chunks that are located at a time, because a few bytes of metadata can state millions of chunks."""

_TRIED_CHUNKS: Final = 1 << 8
"""Number of chunks of a box that are checked after an error."""

_OPENED: Final = 256
"""Maximum number of arrays opened at a time."""


def native_store(state: ArraysState, address: StorageAddress | None) -> Mapping[str, Any] | None:
    """Return tensorstore's spec of the store with the arrays; None if the storage is unsupported."""
    if address is None:
        return None
    # Escape names: %2e%2e would refer to the parent, and | would select another kind of store.
    url = f"{address.url}{quote(state.prefix.encode('utf-8', 'surrogateescape'))}"
    base = native_spec(StorageAddress(url, address.options))
    return {"driver": "ocdbt", "base": base} if base is not None and state.storage == "ocdbt" else base


def check_native_files(
    wanted: Mapping[int, Sequence[BoxRead]], state: ArraysState, store: ReadStore, databases: DatabaseCache
) -> None:
    """Apply the checks of the store to files that tensorstore will open. For file systems only.

    tensorstore follows links out of the checkpoint, and waits forever for a writer of a named pipe.

    Raises:
        InvalidLocationError: a link leads out of the checkpoint.
        CorruptCheckpointError: a file is missing, or not a regular file, or too small for a read chunk.
        InsufficientMemoryError: a read chunk does not fit in memory.
    """
    if store.address is None or not store.address.url.startswith("file:"):
        return
    sizes: dict[str, int] = {}
    for leaf, targets in wanted.items():
        for target in targets:
            stored = state.arrays[leaf]
            check_chunk_count(target.box, stored.format.chunk, stored.name)
            indices = (index for index, _ in iter_chunks(stored.format.chunk, target.box))
            while batch := list(itertools.islice(indices, _CHECKED_CHUNKS)):
                for location in locate_chunks(state, leaf, batch, store, databases).values():
                    if location is None:
                        continue
                    if location.inline is None and location.key not in sizes:
                        try:
                            sizes[location.key] = store.size(location.key)
                        except ObjectNotFoundError as error:
                            raise CorruptCheckpointError(
                                f"a chunk is missing: {error}; restore it from a copy, or load another checkpoint",
                                key=location.key,
                            ) from error
                    if location.inline is not None:
                        nbytes = len(location.inline)
                    else:  # arrays of a database share files
                        nbytes = sizes[location.key] if location.nbytes is None else location.nbytes
                    expect_justified(stored, nbytes)


def expect_chunks(
    wanted: Mapping[int, Sequence[BoxRead]], state: ArraysState, store: ReadStore, databases: DatabaseCache
) -> None:
    """Reject a file that is not a chunk, such as a Git LFS pointer. Checks only the first chunks of each box.

    Raises:
        CorruptCheckpointError: there is such a file.
    """
    for leaf, targets in wanted.items():
        for target in targets:
            chunks = iter_chunks(state.arrays[leaf].format.chunk, target.box)
            first = [index for index, _ in itertools.islice(chunks, _TRIED_CHUNKS)]
            for location in locate_chunks(state, leaf, first, store, databases).values():
                if location is not None and location.inline is None:
                    head = store.get(location.key, 0, FILE_HEAD_BYTES)
                    if (kind := kind_in_place_of(head)) is not None:
                        raise CorruptCheckpointError(f"{location.key} is {kind}", key=location.key)


def read_native(
    state: ArraysState, wanted: Mapping[int, Sequence[BoxRead]], native: Mapping[str, Any]
) -> Iterator[int]:
    """Fill the destinations. Yields the number of each when it is complete.

    Raises:
        CorruptCheckpointError: bytes are missing or wrong.
    """
    # One context for all arrays, so that a database is opened once and its nodes are cached.
    context = tensorstore.Context()
    started: deque[tuple[ZarrArray, BoxRead, Any]] = deque()
    started_bytes = 0
    try:
        for leaves in _batches(list(wanted), _OPENED):
            opening = [(leaf, _open(state.arrays[leaf], native, context)) for leaf in leaves]
            for leaf, pending in opening:
                stored = state.arrays[leaf]
                with ReadErrors(stored.name):
                    array = pending.result()
                for target in wanted[leaf]:
                    expect_usable()
                    with ReadErrors(stored.name):
                        reading = tensorstore.array(target.buffer).write(array[target.box.slices])
                    started.append((stored, target, reading))
                    started_bytes += _bytes_in_flight(stored, target)
                    while started_bytes > _STARTED_BYTES and len(started) > _MIN_STARTED:
                        started_bytes -= _bytes_in_flight(*started[0][:2])
                        yield _finish(started)
        while started:
            yield _finish(started)
    finally:
        # After an error or an early exit, tensorstore may still be writing to destinations.
        for _, _, remaining in started:
            remaining.exception()


def _bytes_in_flight(stored: ZarrArray, target: BoxRead) -> int:
    """Return the memory for reading a destination: at least one read chunk, which can be larger than its array."""
    return max(target.buffer.nbytes, stored.format.inner_bytes)


def _batches(leaves: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(leaves), size):
        yield leaves[start : start + size]


def _open(stored: ZarrArray, native: Mapping[str, Any], context: Any) -> Any:
    kvstore = {**native, "path": f"{native.get('path', '')}{stored.prefix}"}
    driver = "zarr3" if stored.format.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
    with ReadErrors(stored.name):
        return tensorstore.open(spec, open=True, read=True, context=context)


def _finish(started: deque[tuple[ZarrArray, BoxRead, Any]]) -> int:
    """Wait for the oldest read, then remove it from `started`.

    It is removed last: after an interrupt, `read_native` waits for the reads in `started`.
    """
    stored, target, reading = started[0]
    with ReadErrors(stored.name):
        reading.result()
    started.popleft()
    return target.number
