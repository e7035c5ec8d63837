"""Arrays as the format holds them: which name, which cutting, and which bytes stand for elements that zarr does not know."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Final, Literal

import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, TreeMetadata, format_path
from ckptcore_orbax.zarr.chunking import MOST_CELLS, read_chunk, write_chunk
from ckptcore_orbax.zarr.dtypes import stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat, encode_metadata
from ckptcore_orbax.zarr.names import directory_names, key_names
from ckptcore_orbax.zarr.options import ArrayOptions, Form, options_of
from ckptcore_orbax.zarr.version2 import parse_zarr2, zarr2_array
from ckptcore_orbax.zarr.version3 import parse_zarr3, zarr3_array

__all__ = [
    "SESSIONS",
    "array_names",
    "dimension_names",
    "stored_box",
    "stored_format",
    "stored_view",
]

SESSIONS: Final = 2
"""Of how many processes an array is thought to come that is written in sessions: several, however many there will be."""

_MOST_NAME_BYTES: Final = 64_000
"""Of an array in a database, whose keys have up to 65,535: with the index of a chunk of any number of axes that NumPy has."""

_MOST_BLOSC_BYTES: Final = (1 << 31) - 17
"""Of what is compressed at once: blosc's BLOSC_MAX_BUFFERSIZE."""


def array_names(tree: TreeMetadata, form: Form) -> dict[int, str]:
    """The name of every array, aliases too; those of small values are in it because Orbax stores them as arrays.

    Raises:
        NameCollisionError
        UnsupportedKeyError: if one is too long for a database.
    """
    paths = dict(enumerate(tree.paths))
    if form.storage != "ocdbt":
        return directory_names(paths)
    names = key_names(paths)
    for leaf, name in names.items():
        if len(name) > _MOST_NAME_BYTES // 4 and len(name.encode()) > _MOST_NAME_BYTES:
            raise UnsupportedKeyError(
                f"{format_path(paths[leaf])[:200]}... has a name of {len(name.encode())} bytes, and an OCDBT "
                f"database takes {_MOST_NAME_BYTES}: shorten the keys. Nothing was written"
            )
    return names


def dimension_names(stored: ArraySpec, storage: Literal["ocdbt", "objects"]) -> Sequence[str] | None:
    """Return names for the axes of a zarr 3 array, such as ``axis0_512``; None in a database, which xarray does not open.

    xarray opens no group with an array that lacks them, or with a name that has two lengths. Names depend on the shape
    alone, so that arrays of one shape share their metadata.
    """
    return [f"axis{axis}_{extent}" for axis, extent in enumerate(stored.shape)] if storage == "objects" else None


def stored_format(record: ArrayRecord, name: str, form: Form, size: int) -> ArrayFormat:
    """How an array is stored; every process comes to the same.

    Args:
        record: what it is.
        name: its name.
        form: of the checkpoint.
        size: how many processes write it.

    Raises:
        UnsupportedLeafError: if it cannot be.
    """
    try:
        options = options_of(name, form.options, form.rules)
        return _format_of(record.spec, record.cuts, size, form.zarr_format, form.storage, options)
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
    """One object for all arrays of one kind, of which a model has few: what is done for each format is done once."""
    stored = stored_spec(spec, zarr_format)
    if cuts is not None:
        cuts += ((),) * (len(stored.shape) - len(cuts))
    chunk = write_chunk(stored, cuts, size)
    inner = chunk if options.chunk_bytes is None else read_chunk(stored, chunk, cuts, options.chunk_bytes)
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
    # What a reader refuses as hostile must not be written: it would be committed and never load.
    (parse_zarr2 if zarr_format == 2 else parse_zarr3)(encode_metadata(made), "the array")
    if options.compression is not None and options.compression.name == "blosc" and made.inner_bytes > _MOST_BLOSC_BYTES:
        raise UnsupportedLeafError(
            f"its chunks have {made.inner_bytes} bytes, and blosc takes {_MOST_BLOSC_BYTES}; give a smaller chunk_bytes"
        )
    cells = prod([-(-extent // step) for extent, step in zip(stored.shape, inner, strict=True)])
    if cells > MOST_CELLS:
        raise UnsupportedLeafError(
            f"it would fall into {cells} chunks of {list(inner)} elements, and at most {MOST_CELLS} are read; give a "
            "larger chunk_bytes, or cut it into shards that begin at multiples of a larger number"
        )
    return made


def stored_box(box: Box, stored: ArraySpec) -> Box:
    """A box of an array among the elements that stand for it: one more axis where those are bytes."""
    if len(box.start) == len(stored.shape):
        return box
    return Box((*box.start, 0), (*box.stop, stored.shape[-1]))


def stored_view(array: HostArray, stored: ArraySpec) -> HostArray:
    """The elements that stand for those of a box of an array; the same memory where they are the same."""
    dtype = stored.numpy_dtype
    little = array.dtype.newbyteorder("<")
    if little == dtype.newbyteorder("<"):
        return array
    plain = np.ascontiguousarray(array, dtype=little).reshape(-1)
    shape = array.shape if array.ndim == len(stored.shape) else (*array.shape, stored.shape[-1])
    return plain.view(dtype).reshape(shape)
