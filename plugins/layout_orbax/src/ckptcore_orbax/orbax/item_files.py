"""Metadata files of an item: `array_metadatas/process_N`, `_strings.json`, and all files that a save writes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.model import JSON, ArrayRecord, TreeMetadata, ValueRecord
from ckptcore_orbax.orbax.json_files import (
    encode_json,
    expect_object,
    expect_shape,
    expect_text,
    expect_type,
    parse_json,
    unexpected,
)
from ckptcore_orbax.orbax.shardings import SHARDING_FILE, encode_shardings
from ckptcore_orbax.orbax.tree_file import TREE_FILE, encode_tree, orbax_name
from ckptcore_orbax.orbax.trees import value_text, value_type

ARRAY_METADATA: Final = "array_metadatas"
"""Directory of array metadata files."""


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """Metadata of an array.

    Attributes:
        name: name of the array.
        write_shape: shape of a shard, which one process writes at once.
        chunk_shape: shape of a read chunk.
        random_key_impl: JAX implementation, if the array is the data of random keys; else None.
    """

    name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    random_key_impl: str | None = None


def parse_array_metadata(data: bytes, key: str) -> list[ArrayMetadata]:
    """Parse an array metadata file, which may be hostile.

    Raises:
        CorruptCheckpointError: the file is invalid.
    """
    document = expect_object(parse_json(data, key), key, "the file")
    arrays: list[ArrayMetadata] = []
    for entry in expect_type(document.get("array_metadatas", []), list, key, "array_metadatas"):
        members = expect_object(expect_object(entry, key, "an entry").get("array_metadata"), key, "array_metadata")
        extra = members.get("ext_metadata")
        impl = None if extra is None else expect_object(extra, key, "ext_metadata").get("random_key_impl")
        write_shape = expect_shape(members.get("write_shape"), key, "write_shape")
        chunk_shape = expect_shape(members.get("chunk_shape"), key, "chunk_shape")
        if len(write_shape) != len(chunk_shape):
            raise unexpected(key, f"a chunk_shape of {len(write_shape)} axes", list(chunk_shape))
        arrays.append(
            ArrayMetadata(
                expect_text(members.get("param_name"), key, "param_name"),
                write_shape,
                chunk_shape,
                None if impl is None else expect_text(impl, key, "random_key_impl"),
            )
        )
    return arrays


def encode_array_metadata(arrays: Iterable[ArrayMetadata]) -> bytes:
    """Return an array metadata file."""
    return encode_json(
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


STRINGS_FILE: Final = "_strings.json"

_BAD_ESCAPE: Final = re.compile("~(?![01])")


class Strings:
    """The strings in `_strings.json`, which may be hostile.

    Raises:
        CorruptCheckpointError: the file is invalid. Also raised by `text` if the name has no string.
    """

    def __init__(self, data: bytes, key: str) -> None:
        self._key = key
        self._document = expect_object(parse_json(data, key), key, "the file")

    def text(self, name: str) -> str:
        """Return the string of a leaf."""
        value: JSON = self._document
        for token in _tokens(name) or ():
            value = value.get(token) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise unexpected(self._key, f"the string {name[:80]!r}", value)
        return expect_type(value, str, self._key, "a string")


def encode_strings(strings: Mapping[str, str]) -> bytes:
    """Return the file of strings by name.

    Omits names that Orbax cannot look up: names that are not JSON pointers (with an invalid ``~``
    escape or a lone surrogate), and names that extend the name of another string with ``/``.
    """
    document: dict[str, Any] = {}
    addressed = {name: tokens for name in strings if (tokens := _tokens(name)) is not None}
    for name, tokens in sorted(addressed.items(), key=lambda item: len(item[1])):
        inner: Any = document
        for token in tokens[:-1]:
            inner = inner.setdefault(token, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            # Readers in other languages reject a file with lone surrogates.
            inner.setdefault(tokens[-1], strings[name].encode("utf-8", "replace").decode())
    return encode_json(document)


def _tokens(name: str) -> list[str] | None:
    """Return the keys that lead to a string (RFC 6901); None if the name is not a JSON pointer."""
    if _BAD_ESCAPE.search(name) or any("\ud800" <= character <= "\udfff" for character in name):
        return None
    return [token.replace("~1", "/").replace("~0", "~") for token in name.split("/")]


def item_files(
    tree: TreeMetadata,
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
) -> dict[str, bytes]:
    """Return the metadata files of an item, by their names in its directory.

    If several leaves have the same Orbax name, the files that Orbax searches by name omit all of
    these leaves, so that Orbax never finds the wrong leaf.

    Args:
        tree: the tree to save.
        shapes: write shape and read chunk shape of each array leaf, by its number.
        use_ocdbt: True if a database contains the arrays.
        use_zarr3: True if the arrays are zarr 3, not 2.
    """
    names = [orbax_name(path) for path in tree.paths]
    counts = Counter(names)
    strings: dict[str, str] = {}
    shardings: dict[str, JSON] = {}
    arrays: list[ArrayMetadata] = []
    for number, (name, record) in enumerate(zip(names, tree.leaves, strict=True)):
        if counts[name] > 1:
            continue
        if isinstance(record, ValueRecord):
            if (text := value_text(record)) is not None:
                strings[name] = text
        elif value_type(record) == "jax.Array":
            if "sharding" in record.notes:
                shardings[name] = record.notes["sharding"]
            write_shape, chunk_shape = shapes.get(number, (record.spec.shape, record.spec.shape))
            arrays.append(ArrayMetadata(name, write_shape, chunk_shape, _random_key_impl(record)))
    write_shapes = {number: write_shape for number, (write_shape, _) in shapes.items()}
    files = {
        TREE_FILE: encode_tree(tree, write_shapes, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3),
        SHARDING_FILE: encode_shardings(shardings),
    }
    if strings:
        files[STRINGS_FILE] = encode_strings(strings)
    if arrays:
        files[f"{ARRAY_METADATA}/process_0"] = encode_array_metadata(arrays)
    return files


def _random_key_impl(record: ArrayRecord) -> str | None:
    impl = record.notes.get("impl")
    return impl if record.kind == "jax.key" and isinstance(impl, str) else None
