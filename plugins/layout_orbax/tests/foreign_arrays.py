"""Hypothesis strategies for arrays that tensorstore writes, with any format, chunk shape and codec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import tensorstore as ts
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES
from ckptcore_testing import bit_patterns
from ckptcore_testing.strategies import boxes
from hypothesis import strategies as st

from ckptcore.model import ArraySpec, Box, HostArray, dtype_from_name


def _is_known(dtype: str) -> bool:
    try:
        ts.dtype(dtype)
    except ValueError:
        return False
    return True


KNOWN_DTYPES: Final = [name for name in sorted(STORED_DTYPES[3]) if _is_known(name)]
"""The dtypes of `STORED_DTYPES` that the installed tensorstore supports."""

_LITTLE: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_BIG: Final = {"name": "bytes", "configuration": {"endian": "big"}}
_CRC: Final = {"name": "crc32c"}

DATABASES: Final = st.fixed_dictionaries(
    {
        "max_decoded_node_bytes": st.sampled_from([1, 100, 8 << 20]),
        "max_inline_value_bytes": st.sampled_from([0, 30, 1024]),
        "version_tree_arity_log2": st.sampled_from([1, 4]),
        "manifest_kind": st.sampled_from(["single", "numbered"]),
        "compression": st.sampled_from([None, {"id": "zstd"}]),
    }
)
"""Strategy for database options: deep or flat trees, many versions, inline values."""


@dataclass(frozen=True)
class ForeignArray:
    """An array that tensorstore writes.

    Attributes:
        zarr_format: 2 or 3.
        spec: shape and dtype of the array.
        metadata: metadata for tensorstore.
        writes: boxes and their elements, each written in a separate commit. Other elements are missing.
        stores_fill_value: True if tensorstore stores chunks that equal the fill value.
    """

    zarr_format: Literal[2, 3]
    spec: ArraySpec
    metadata: Mapping[str, Any]
    writes: Sequence[tuple[Box, HostArray]]
    stores_fill_value: bool

    @property
    def may_have_holes(self) -> bool:
        """True if a missing chunk means the fill value. Arrays of zarr 2 without a fill value store every chunk."""
        return not self.stores_fill_value and self.metadata["fill_value"] is not None


def _compressors(zarr_format: int) -> st.SearchStrategy[Any]:
    if zarr_format == 2:
        return st.sampled_from([None, None, {"id": "zlib", "level": 1}, {"id": "zstd", "level": 1}, {"id": "blosc"}])
    return st.sampled_from(
        [
            [],
            [],
            [{"name": "gzip", "configuration": {"level": 1}}],
            [{"name": "zstd", "configuration": {"level": 1}}],
            [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5}}],
        ]
    )


@st.composite
def _codecs(draw: st.DrawFn, axes: int, plain: bool) -> list[Any]:
    """Draw the codecs of a read chunk."""
    if plain:
        return [_LITTLE, *draw(st.sampled_from([[], [_CRC]]))]
    transpose: list[Any] = []
    if axes and draw(st.booleans()):
        order = draw(st.permutations(range(axes)))
        transpose = [{"name": "transpose", "configuration": {"order": list(order)}}]
    order_of_bytes = draw(st.sampled_from([_LITTLE, _LITTLE, _BIG]))
    return [*transpose, order_of_bytes, *draw(_compressors(3)), *draw(st.sampled_from([[], [_CRC]]))]


@st.composite
def _version3(draw: st.DrawFn, spec: ArraySpec) -> dict[str, Any]:
    axes = len(spec.shape)
    sides = st.lists(st.integers(1, 3), min_size=axes, max_size=axes)
    inner = draw(sides)
    codecs = draw(_codecs(axes, draw(st.booleans())))
    chunk = inner
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        chunk = [part * count for part, count in zip(inner, draw(sides), strict=True)]
        codecs = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": inner,
                    "codecs": codecs,
                    "index_codecs": [_LITTLE, *draw(st.sampled_from([[_CRC], []]))],
                    "index_location": draw(st.sampled_from(["end", "start"])),
                },
            }
        ]
        inner = chunk
    encoding = draw(st.sampled_from(["default", "v2"]))
    return {
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": encoding, "configuration": {"separator": draw(st.sampled_from("/."))}},
        "codecs": codecs,
        "fill_value": draw(_fills(spec.dtype)),
    }


@st.composite
def _version2(draw: st.DrawFn, spec: ArraySpec) -> dict[str, Any]:
    axes = len(spec.shape)
    text = spec.numpy_dtype.str
    if hasattr(ml_dtypes, spec.dtype):
        text = spec.dtype
    elif draw(st.integers(0, 3)) == 0:
        text = text.replace("<", ">")
    return {
        "shape": list(spec.shape),
        "chunks": draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes)),
        "dtype": text,
        "compressor": draw(_compressors(2)),
        "filters": None,
        "order": draw(st.sampled_from("CCF")) if axes > 1 else "C",
        "dimension_separator": draw(st.sampled_from("./")),
        "fill_value": None if text.startswith("float4") else draw(st.one_of(st.none(), _fills(spec.dtype))),
        "zarr_format": 2,
    }


def _fills(dtype: str) -> st.SearchStrategy[Any]:
    kind = dtype_from_name(dtype).kind
    if kind == "b":
        return st.booleans()
    if kind == "c":
        return st.sampled_from([[0.0, 0.0], [1.0, -2.0]])
    if "int" in dtype:
        return st.sampled_from([0, 1])
    # For float8_e8m0fnu tensorstore 0.1.86 reads 1.0 as 2 ** -64.
    return st.sampled_from([0.0, 0.0 if dtype == "float8_e8m0fnu" else 1.0])


@st.composite
def foreign_arrays(draw: st.DrawFn, zarr_format: Literal[2, 3]) -> ForeignArray:
    """Draw arrays of a zarr version, some of them with missing chunks."""
    names = [name for name in KNOWN_DTYPES if name in STORED_DTYPES[zarr_format]]
    spec = ArraySpec(
        tuple(draw(st.lists(st.integers(1, 9), max_size=3))), draw(st.sampled_from(["float32", "int16", *names]))
    )
    metadata = draw(_version3(spec) if zarr_format == 3 else _version2(spec))
    parts = [Box.whole(spec.shape)] if draw(st.booleans()) else []
    parts += draw(st.lists(boxes(spec.shape), max_size=2))
    writes = [
        (
            box,
            np.zeros(box.shape, spec.numpy_dtype)
            if seed == 0
            else bit_patterns(ArraySpec(box.shape, spec.dtype), seed),
        )
        for box in parts
        for seed in [draw(st.integers(0, 4))]
    ]
    return ForeignArray(zarr_format, spec, metadata, writes, draw(st.booleans()))


def _kvstore(directory: Path, name: str, database: Mapping[str, Any] | None) -> dict[str, Any]:
    if database is None:
        return {"driver": "file", "path": f"{directory}/{name}/"}
    return {"driver": "ocdbt", "base": f"{directory.as_uri()}/", "path": f"{name}/", "config": dict(database)}


def open_array(directory: Path, name: str, array: ForeignArray, database: Mapping[str, Any] | None, **more: Any) -> Any:
    """Open an array with tensorstore. `more` adds entries to the spec."""
    spec = {
        "driver": "zarr3" if array.zarr_format == 3 else "zarr",
        "kvstore": _kvstore(directory, name, database),
        **more,
    }
    return ts.open({"open": "create" not in more, **spec}, context=ts.Context({"file_io_sync": False})).result()


def write_arrays(directory: Path, arrays: Mapping[str, ForeignArray], database: Mapping[str, Any] | None) -> None:
    """Write arrays with tensorstore, as a tree that Orbax could read."""
    directory.mkdir(exist_ok=True)
    for name, array in arrays.items():
        writable = open_array(
            directory,
            name,
            array,
            database,
            create=True,
            metadata=dict(array.metadata),
            store_data_equal_to_fill_value=array.stores_fill_value,
        )
        for box, elements in array.writes:
            writable[box.slices].write(elements).result()
    first = next(iter(arrays.values()))
    (directory / "_METADATA").write_bytes(
        tree_file(
            list(arrays),
            zarr_format=first.zarr_format,
            database=database is not None,
            stores_fill_value=first.stores_fill_value,
        )
    )


def tree_file(names: Sequence[str], *, zarr_format: int, database: bool, stores_fill_value: bool) -> bytes:
    """Return the file `_METADATA` of Orbax for a dict of arrays."""
    table = {
        f"('{name}',)": {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in names
    }
    document = {
        "tree_metadata": table,
        "use_ocdbt": database,
        "use_zarr3": zarr_format == 3,
        "store_array_data_equal_to_fill_value": stores_fill_value,
    }
    return json.dumps(document).encode()
