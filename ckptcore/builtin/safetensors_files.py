"""Files in the safetensors format as they are written: headers and names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final

from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON

__all__ = ["METADATA", "encode_header", "file_metadata", "file_names"]

METADATA: Final = "__metadata__"
"""The name in a header under which the metadata of the file stands."""

_ALIGNMENT: Final = 64
_LARGE_ALIGNMENT: Final = 4096
"""Where elements begin in a large file, in bytes: a page, so that direct I/O needs no copy."""


def encode_header(header: Mapping[str, JSON], data_bytes: int) -> bytes:
    """What stands before the elements of a file.

    Args:
        header: by name, what each tensor is and where.
        data_bytes: how many bytes of elements follow.
    """
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    alignment = _LARGE_ALIGNMENT if data_bytes > 1 << 20 else _ALIGNMENT
    padded = -(-(8 + len(encoded)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + encoded.ljust(padded)


def file_names(stem: str, count: int) -> list[str]:
    """The names of so many files that hold whole arrays."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def file_metadata(
    tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int], own: Mapping[str, str]
) -> dict[str, JSON]:
    """Return the metadata of a file with these leaves: aliases with the names of their arrays, and the user's entries.

    The user's entries replace others, as in `safetensors.torch.save_model`.
    """
    here = set(leaves)
    metadata: dict[str, JSON] = {
        names[alias]: names[target] for alias, target in tree.aliases.items() if target in here
    }
    metadata["format"] = "pt"  # Hugging Face loaders ask for it; it says nothing of who wrote the file
    metadata.update(own)
    return metadata
