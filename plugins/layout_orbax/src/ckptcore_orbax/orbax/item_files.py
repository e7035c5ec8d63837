"""The files beside the arrays of an item: `array_metadatas/process_N`, `_strings.json`, and all of them for a save."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.model import JSON, ArrayRecord, TreeMetadata, ValueRecord
from ckptcore_orbax.orbax.documents import (
    corrupt,
    encode_document,
    expect,
    extents,
    object_of,
    parse_document,
    text_of,
)
from ckptcore_orbax.orbax.shardings import SHARDING_FILE, encode_shardings
from ckptcore_orbax.orbax.tree_file import TREE_FILE, encode_tree, orbax_name
from ckptcore_orbax.orbax.values import value_text, value_type

__all__ = [
    "ARRAY_METADATA",
    "STRINGS_FILE",
    "ArrayMetadata",
    "Strings",
    "encode_array_metadata",
    "encode_strings",
    "item_files",
    "parse_array_metadata",
]

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


STRINGS_FILE: Final = "_strings.json"

_BAD_ESCAPE: Final = re.compile("~(?![01])")


class Strings:
    """What such a file holds; it may be hostile.

    Raises:
        CorruptCheckpointError: also from `text`, if there is no string at the name.
    """

    def __init__(self, data: bytes, key: str) -> None:
        self._key = key
        self._document = object_of(parse_document(data, key), key, "the file")

    def text(self, name: str) -> str:
        """The string of a leaf."""
        found: JSON = self._document
        for token in _tokens(name) or ():
            found = found.get(token) if isinstance(found, dict) else None
        if not isinstance(found, str):
            raise corrupt(self._key, f"the string {name[:80]!r}", found)
        return expect(found, str, self._key, "a string")


def encode_strings(strings: Mapping[str, str]) -> bytes:
    """The file of strings by name.

    A name that is no JSON pointer (it has a ``~`` that escapes nothing), or one that goes on with ``/`` from the name
    of another string, is left out: Orbax finds nothing there.
    """
    document: dict[str, Any] = {}
    addressed = {name: tokens for name in strings if (tokens := _tokens(name)) is not None}
    for name, tokens in sorted(addressed.items(), key=lambda item: len(item[1])):
        inner: Any = document
        for token in tokens[:-1]:
            inner = inner.setdefault(token, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            # Readers in other languages refuse a whole file that has surrogates that stand alone.
            inner.setdefault(tokens[-1], strings[name].encode("utf-8", "replace").decode())
    return encode_document(document)


def _tokens(name: str) -> list[str] | None:
    """The keys that lead to a string, as RFC 6901 has them; None where the name is no JSON pointer."""
    if _BAD_ESCAPE.search(name) or any("\ud800" <= character <= "\udfff" for character in name):
        return None
    return [token.replace("~1", "/").replace("~0", "~") for token in name.split("/")]


def item_files(
    tree: TreeMetadata,
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
    custom: JSON = None,
) -> dict[str, bytes]:
    """The files beside the arrays of a tree, by their names in the directory of the item.

    What Orbax finds by a name is left out where several leaves have that name: it finds nothing, and never another
    leaf.

    Args:
        tree: what is saved.
        shapes: of each leaf that is an array, by its number: what one process writes at once, and what can be read at
            once.
        use_ocdbt, use_zarr3: how arrays are stored.
        custom: metadata of the user's for this tree.
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
            arrays.append(ArrayMetadata(name, write_shape, chunk_shape, _impl(record)))
    write_shapes = {number: write_shape for number, (write_shape, _) in shapes.items()}
    files = {
        TREE_FILE: encode_tree(tree, write_shapes, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, custom=custom),
        SHARDING_FILE: encode_shardings(shardings),
    }
    if strings:
        files[STRINGS_FILE] = encode_strings(strings)
    if arrays:
        files[f"{ARRAY_METADATA}/process_0"] = encode_array_metadata(arrays)
    return files


def _impl(record: ArrayRecord) -> str | None:
    impl = record.notes.get("impl")
    return impl if record.kind == "jax.key" and isinstance(impl, str) else None
