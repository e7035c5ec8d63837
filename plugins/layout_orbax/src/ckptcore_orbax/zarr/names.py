"""Names of arrays: keys joined by dots, as Orbax looks them up, or an escaped form if that name is not possible."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from ckptcore.errors import NameCollisionError
from ckptcore.model import TreePath, format_path
from ckptcore.planning import leaf_names

_RESERVED_NAMES: Final = frozenset(
    {
        "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json", "array_metadatas", "checkpoint",
        "commit_success.txt", "manifest.ocdbt", "metadata", "orbax.checkpoint",
    }
)  # fmt: skip
"""Names of other files in the directory of arrays."""

_OTHER_METADATA: Final = frozenset({"_CHECKPOINT_DELETION", ".zarray", ".zgroup", ".zattrs", "zarr.json"})

_OF_ARRAYS: Final = ("/.zarray", "/zarr.json")

_INNER: Final = re.compile(
    r"(d/|ocdbt_(meta|data)/|ocdbt\.process_|array_metadatas/|(python|grain|tf)_[0-9]+/).*|metrics/(metrics|commit_success\.txt)|"
    r"descriptor/descriptor\.pbtxt",
    re.DOTALL,
)
"""Files in directories with fixed names: of databases, of metadata, and of iterators of AXLearn."""

_MAX_BYTES: Final = 200
"""Maximum length of a path component in bytes. File systems allow 255; this leaves room for suffixes."""

_MAX_NAME_BYTES: Final = 1024
"""Maximum length of a name in bytes. Systems allow paths of 4096; this leaves room for the location and chunk keys."""


def orbax_files(keys: Sequence[str], members: Collection[str]) -> Collection[str]:
    """Return the keys of files that Orbax or AXLearn writes: metadata, arrays, databases, and whatever is in items.

    Args:
        keys: the keys of all files in the directory of a checkpoint.
        members: the names of its items.
    """
    arrays = {key.rpartition("/")[0] for key in keys if key.endswith(_OF_ARRAYS)}
    return [
        key
        for key in keys
        if key in _RESERVED_NAMES
        or key in _OTHER_METADATA
        or _INNER.fullmatch(key)
        or key.partition("/")[0] in members
        or any(key[:end] in arrays for end in _slashes(key))
    ]


def _slashes(key: str) -> Iterator[int]:
    return (index for index, character in enumerate(key) if character == "/")


def key_names(paths: Mapping[int, TreePath]) -> dict[int, str]:
    """Return the name of each leaf in a database, whose keys can contain any text.

    If the joined keys of several leaves are equal, no leaf gets that name, so that a reader that
    looks it up finds nothing instead of another array.

    Raises:
        NameCollisionError: two leaves would have the same name.
    """
    names = leaf_names(paths)
    joined = {leaf: ".".join(map(str, path)).rstrip("/") for leaf, path in paths.items()}
    shared = {text for text, count in Counter(joined.values()).items() if count > 1}
    for leaf, name in names.items():
        if not paths[leaf]:
            names[leaf] = ""  # the array is the whole tree
        elif name.rstrip("/") in shared or not name:
            names[leaf] = f"{name}\\"
    _check_unique(names, paths)
    return names


def directory_names(paths: Mapping[int, TreePath]) -> dict[int, str]:
    """Return the directory of each leaf: the name from `key_names` if every file system supports it.

    Raises:
        NameCollisionError: two leaves would have the same name.
    """
    names = key_names(paths)
    counts = Counter(name.replace("\\", "/").rstrip("/") for name in names.values())
    taken = set(names.values())
    for leaf, name in names.items():
        parts = name.split("/")
        if (
            name
            and (
                len(name.encode()) > _MAX_NAME_BYTES  # before its prefixes, which are quadratic in its length
                or any("/".join(parts[:count]) in taken for count in range(1, len(parts)))
                or counts[name.replace("\\", "/").rstrip("/")] > 1
                or parts[0] in _RESERVED_NAMES
                or parts[0].startswith("checkpoint.")
                or not all(map(_is_plain, parts))
            )
        ):
            names[leaf] = _escaped(name)
    _check_unique(names, paths)
    return names


def _is_plain(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and "\0" not in part
        and len(part.encode()) <= _MAX_BYTES
        and not part.startswith("ocdbt.process_")
        and part not in (".zarray", ".zgroup", "zarr.json")
    )


def _escaped(name: str) -> str:
    """Return a single path component that differs from all unescaped names."""
    safe = "".join([character if character not in "/\\%\0" else f"%{ord(character):02X}" for character in name])
    if len(safe.encode()) > _MAX_BYTES:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        safe = f"{safe.encode()[: _MAX_BYTES - 40].decode('utf-8', 'ignore')}%{digest}"
    return f"%{safe}"


def _check_unique(names: Mapping[int, str], paths: Mapping[int, TreePath]) -> None:
    seen: dict[str, int] = {}
    for leaf, name in names.items():
        first = seen.setdefault(name, leaf)
        if first != leaf:
            raise NameCollisionError(
                f"{format_path(paths[first])} and {format_path(paths[leaf])} would both be stored as {name!r}; "
                "rename one of the keys. Nothing was written"
            )
