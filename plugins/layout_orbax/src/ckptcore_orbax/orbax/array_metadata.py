"""The files `array_metadatas/process_N`: how arrays of JAX were cut, and which of them are random keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptcore_orbax.orbax.documents import (
    corrupt,
    encode_document,
    expect,
    extents,
    object_of,
    parse_document,
    text_of,
)

__all__ = ["ARRAY_METADATA", "ArrayMetadata", "encode_array_metadata", "parse_array_metadata"]

ARRAY_METADATA: Final = "array_metadatas"
"""The directory of these files."""


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """What is said of an array.

    Attributes:
        name: of the array.
        write_shape: elements of what one process writes at once: a shard.
        chunk_shape: elements of what can be read at once.
        random_key_impl: the implementation of JAX whose random keys have these elements as data; None: it is an array.
    """

    name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    random_key_impl: str | None = None


def parse_array_metadata(data: bytes, key: str) -> list[ArrayMetadata]:
    """What such a file says; it may be hostile.

    Raises:
        CorruptCheckpointError
    """
    document = object_of(parse_document(data, key), key, "the file")
    found: list[ArrayMetadata] = []
    for entry in expect(document.get("array_metadatas", []), list, key, "array_metadatas"):
        said = object_of(object_of(entry, key, "an entry").get("array_metadata"), key, "array_metadata")
        extra = said.get("ext_metadata")
        impl = None if extra is None else object_of(extra, key, "ext_metadata").get("random_key_impl")
        write_shape = extents(said.get("write_shape"), key, "write_shape")
        chunk_shape = extents(said.get("chunk_shape"), key, "chunk_shape")
        if len(write_shape) != len(chunk_shape):
            raise corrupt(key, f"a chunk_shape of {len(write_shape)} axes", list(chunk_shape))
        found.append(
            ArrayMetadata(
                text_of(said.get("param_name"), key, "param_name"),
                write_shape,
                chunk_shape,
                None if impl is None else text_of(impl, key, "random_key_impl"),
            )
        )
    return found


def encode_array_metadata(arrays: Iterable[ArrayMetadata]) -> bytes:
    """Such a file."""
    return encode_document(
        {
            "array_metadatas": [
                {
                    "array_metadata": {
                        "param_name": array.name,
                        "write_shape": array.write_shape,
                        "chunk_shape": array.chunk_shape,
                        "ext_metadata": array.random_key_impl and {"random_key_impl": array.random_key_impl},
                    }
                }
                for array in arrays
            ]
        }
    )
