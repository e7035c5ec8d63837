"""Storage of arrays: names, chunk shapes, and dtypes that replace those unknown to zarr."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Final, Literal

import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, TreeMetadata, format_path
from ckptcore_orbax.zarr.chunking import MAX_CHUNKS, read_chunk_shape, write_chunk_shape
from ckptcore_orbax.zarr.dtypes import stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat, encode_metadata
from ckptcore_orbax.zarr.names import directory_names, key_names
from ckptcore_orbax.zarr.options import ArrayOptions, LayoutOptions, array_options
from ckptcore_orbax.zarr.version2 import parse_zarr2, zarr2_array
from ckptcore_orbax.zarr.version3 import parse_zarr3, zarr3_array

SESSION_WRITERS: Final = 2
"""Number of writers assumed for an array written in sessions. All numbers above 1 give the same chunk shape."""

_MAX_NAME_BYTES: Final = 64_000
"""Maximum name length in a database, whose keys have up to 65,535 bytes: leaves room for any chunk index."""

_MAX_BLOSC_BYTES: Final = (1 << 31) - 17
"""Maximum input of blosc in bytes, BLOSC_MAX_BUFFERSIZE."""


def array_names(tree: TreeMetadata, options: LayoutOptions) -> dict[int, str]:
    """Return a name for every leaf. Aliases and values have names too, because Orbax stores them as arrays.

    Raises:
        NameCollisionError: two leaves would have the same name.
        UnsupportedKeyError: a name is too long for a database.
    """
    paths = dict(enumerate(tree.paths))
    if options.storage != "ocdbt":
        return directory_names(paths)
    names = key_names(paths)
    for leaf, name in names.items():
        if len(name) > _MAX_NAME_BYTES // 4 and len(name.encode()) > _MAX_NAME_BYTES:
            raise UnsupportedKeyError(
                f"{format_path(paths[leaf])[:200]}... has a name of {len(name.encode())} bytes; OCDBT allows at most "
                f"{_MAX_NAME_BYTES}: shorten the keys. Nothing was written"
            )
    return names


def dimension_names(stored: ArraySpec, storage: Literal["ocdbt", "objects"]) -> Sequence[str] | None:
    """Return axis names of a zarr 3 array, such as ``axis0_512``; None in a database, which xarray cannot open.

    xarray cannot open a group if an array lacks names or one name has two lengths. The names depend
    only on the shape, so that arrays of equal shape share their metadata.
    """
    return [f"axis{axis}_{extent}" for axis, extent in enumerate(stored.shape)] if storage == "objects" else None


def stored_format(record: ArrayRecord, name: str, options: LayoutOptions, size: int) -> ArrayFormat:
    """Return the format of an array. All processes obtain the same result.

    Args:
        record: the array.
        name: name of the array.
        options: storage options of the checkpoint.
        size: number of processes that write the checkpoint.

    Raises:
        UnsupportedLeafError: the array cannot be stored with these options.
    """
    try:
        array = array_options(name, options.default, options.rules)
        return _format_of(record.spec, record.cuts, size, options.zarr_format, options.storage, array)
    except (UnsupportedLeafError, CorruptCheckpointError) as error:
        raise UnsupportedLeafError(f"{name}: {record.spec} cannot be stored: {error}. Nothing was written") from error


@functools.lru_cache(maxsize=1 << 12)
def _format_of(
    spec: ArraySpec,
    cuts: tuple[tuple[int, ...], ...] | None,
    size: int,
    zarr_format: Literal[2, 3],
    storage: Literal["ocdbt", "objects"],
    options: ArrayOptions,
) -> ArrayFormat:
    """Return one shared object per kind of array. A model has few kinds, and work per format is done once."""
    stored = stored_spec(spec, zarr_format)
    if options.compression is not None:
        from ckptcore_orbax.zarr.chunk_codec import expect_dtype  # delays the import of tensorstore

        expect_dtype(stored.dtype)
    if cuts is not None:
        cuts += ((),) * (len(stored.shape) - len(cuts))
    chunk = write_chunk_shape(stored, cuts, size)
    inner = chunk if options.chunk_bytes is None else read_chunk_shape(stored, chunk, cuts, options.chunk_bytes)
    if zarr_format == 2:
        made = zarr2_array(stored, inner, compression=options.compression)
    else:
        made = zarr3_array(
            stored,
            chunk,
            inner,
            checksum=options.checksum,
            compression=options.compression,
            dimension_names=dimension_names(stored, storage),
        )
    # Check with the reader: an array that it rejects as hostile must not be written, because it
    # could never be loaded.
    (parse_zarr2 if zarr_format == 2 else parse_zarr3)(encode_metadata(made), "the array")
    if options.compression is not None and options.compression.name == "blosc" and made.inner_bytes > _MAX_BLOSC_BYTES:
        raise UnsupportedLeafError(
            f"its chunks have {made.inner_bytes} bytes; blosc allows {_MAX_BLOSC_BYTES}; give a smaller chunk_bytes"
        )
    cells = prod([-(-extent // step) for extent, step in zip(stored.shape, inner, strict=True)])
    if cells > MAX_CHUNKS:
        raise UnsupportedLeafError(
            f"it would have {cells} chunks of {list(inner)} elements; at most {MAX_CHUNKS} can be read; give a "
            "larger chunk_bytes, or use shard boundaries that are multiples of a larger number"
        )
    return made


def stored_box(box: Box, stored: ArraySpec) -> Box:
    """Return a box in the stored array, which may have an additional axis for bytes."""
    if len(box.start) == len(stored.shape):
        return box
    return Box((*box.start, 0), (*box.stop, stored.shape[-1]))


def stored_view(array: HostArray, stored: ArraySpec) -> HostArray:
    """Return the elements of a box as stored. Returns `array` itself if the dtype is stored unchanged."""
    dtype = stored.numpy_dtype
    little = array.dtype.newbyteorder("<")
    if little == dtype.newbyteorder("<"):
        return array
    plain = np.ascontiguousarray(array, dtype=little).reshape(-1)
    shape = array.shape if array.ndim == len(stored.shape) else (*array.shape, stored.shape[-1])
    return plain.view(dtype).reshape(shape)
