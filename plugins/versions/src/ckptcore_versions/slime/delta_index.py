"""Deltas of the format of slime: the index, the frames that it lists, and the state that describes them.

A delta is a directory ``weight_v000007`` with files of safetensors and ``model.safetensors.index.json``. A tensor of a
file is a frame: uint8, of one axis. ``__metadata__`` of the file has the checksum of each tensor by its name. The index
has, as ``metadata``, ``version`` and ``base_version`` in decimal digits, ``delta_encoding``, ``compression_format`` and
``checksum_format``. A full version has no ``delta_encoding``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UncommittedCheckpointError
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.plain_safetensors import read_header
from ckptcore.planning import natural_column
from ckptcore.protocols import BaseReference, Inspection, ReadStore
from ckptcore_versions.slime.frames import READ_ENCODINGS
from ckptcore_versions.tensor_names import tensor_names

INDEX: Final = "model.safetensors.index.json"
"""The file whose writing publishes a version."""

FRAME_COLUMNS: Final = ("files", "names", "file", "offset", "nbytes", "checksums")
"""The columns of a `Delta`, which its state has, too."""

_CHECKSUM_DIGITS: Final = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
_MAX_INDEX_BYTES: Final = 1 << 28
_MAX_VERSION: Final = 10**18
_VERSION: Final = re.compile(r"[0-9]{1,18}")
_FILE: Final = re.compile(r"[^/\\\0.][^/\\\0]{0,250}\.safetensors")
_VERSION_0: Final = (
    "Version 0 is the model that the trainer and the engines began with, which is not in this directory. Link or copy "
    "it there as weight_v000000; a link also needs context=Context(io=IOOptions(bases='anywhere'))"
)
_AGAIN: Final = "restore the directory from a copy, or load another version"


def stored_tensors(tree: TreeMetadata) -> Mapping[str, ArraySpec]:
    """Return the arrays that have a name in files of their own, by name. Those that are tied to others have none.

    Raises:
        NameCollisionError: two arrays would have the same name.
    """
    names = tensor_names(tree)
    stored = {leaf: tree.leaves[leaf] for leaf in names if leaf not in tree.aliases}
    return {names[leaf]: record.spec for leaf, record in stored.items() if isinstance(record, ArrayRecord)}


def version_name(number: int) -> str:
    """Return the name of the directory of a version."""
    return f"weight_v{number:06d}"


class Delta(NamedTuple):
    """A delta.

    Attributes:
        version, base_version: numbers of versions; the base is older.
        encoding: the encoding of its frames.
        checksum_format: the format of its checksums.
        base: its base, if ckptcore wrote the delta; None: other software wrote it.
        files: the files with frames.
        names: the tensors that it changes, each once.
        file, offset, nbytes: of each frame, the number of its file, and its position and size there in bytes.
        checksums: of the new bytes of each tensor, in hex digits.
    """

    version: int
    base_version: int
    encoding: str
    checksum_format: str
    base: BaseReference | None
    files: Sequence[str]
    names: Sequence[str]
    file: Sequence[int]
    offset: Sequence[int]
    nbytes: Sequence[int]
    checksums: Sequence[str]

    @classmethod
    def of_state(cls, state: JSON) -> Delta | None:
        """Return the delta that a state describes; None for the state of a full version.

        Args:
            state: the result of `to_state`; may be hostile.

        Raises:
            CorruptCheckpointError: the state is damaged.
        """
        try:
            columns: Any = state  # the errors of a hostile state are caught below
            if "delta_encoding" not in columns:
                return None
            delta = cls(
                columns["version"],
                columns["base_version"],
                columns["delta_encoding"],
                columns["checksum_format"],
                BaseReference(*columns["base"][:3]) if "base" in columns else None,
                *[columns[name] for name in FRAME_COLUMNS],
            )
            delta._check()
        except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise CorruptCheckpointError(f"the description of a delta is damaged: {error!r}; {_AGAIN}") from error
        return delta

    def to_state(self) -> dict[str, JSON]:
        """Return the delta as JSON for the state of the layout."""
        return {
            "version": self.version,
            "base_version": self.base_version,
            "delta_encoding": self.encoding,
            "checksum_format": self.checksum_format,
            **({} if self.base is None else {"base": list(self.base[:3])}),
            **{name: list(getattr(self, name)) for name in FRAME_COLUMNS},
        }

    def _check(self) -> None:
        """Raise TypeError, IndexError, OverflowError or ValueError if the delta cannot be."""
        natural_column([self.version, self.base_version], _MAX_VERSION)
        if self.base_version >= self.version:
            raise ValueError(f"version {self.version} has the base {self.base_version}, which is not older")
        if self.encoding not in READ_ENCODINGS:
            raise ValueError(f"the encoding {self.encoding!r} is unknown, expected one of {', '.join(READ_ENCODINGS)}")
        if self.checksum_format not in _CHECKSUM_DIGITS:
            known = ", ".join(_CHECKSUM_DIGITS)
            raise ValueError(f"the checksum format {self.checksum_format!r} is unknown, expected one of {known}")
        texts = [*(self.base or ()), *self.files, *self.names, *self.checksums]
        if {*map(type, texts)} - {str}:
            raise TypeError("expected text")
        if len(set(self.names)) != len(self.names):
            raise ValueError("a tensor is listed twice")
        count = len(self.names)
        natural_column(self.file, len(self.files), count)
        natural_column(self.offset, 1 << 62, count)
        natural_column(self.nbytes, 1 << 62, count)
        digits = _CHECKSUM_DIGITS[self.checksum_format]
        if len(self.checksums) != count or any(not _is_hex(text, digits) for text in self.checksums):
            raise ValueError(f"the checksum of a tensor is missing, or does not have {digits} hex digits")

    @property
    def reference(self) -> BaseReference:
        """The base."""
        if self.base is not None:
            return self.base
        remedy = "" if self.base_version else _VERSION_0
        return BaseReference(version_name(self.base_version), remedy=remedy)

    @property
    def tree(self) -> TreeMetadata:
        """The tree of the frames: a uint8 array by the name of each tensor."""
        leaves = tuple([ArrayRecord(ArraySpec((nbytes,), "uint8")) for nbytes in self.nbytes])
        return TreeMetadata(Node("dict", tuple(self.names), (LEAF,) * len(leaves)), leaves)

    @property
    def table(self) -> dict[str, JSON]:
        """The state of a `ChunkTable` of `tree`."""
        return {
            "files": list(self.files),
            "leaf": list(range(len(self.names))),
            "file": list(self.file),
            "offset": list(self.offset),
        }

    def index_json(self) -> bytes:
        """Return the content of the index."""
        index = {
            "metadata": {
                "version": f"{self.version:06d}",
                "base_version": f"{self.base_version:06d}",
                "delta_encoding": self.encoding,
                "compression_format": "zstd",
                "checksum_format": self.checksum_format,
            },
            "weight_map": {name: self.files[file] for name, file in zip(self.names, self.file, strict=True)},
        }
        return json.dumps(index).encode()


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and not set(text) - set("0123456789abcdef")


def inspect_delta(store: ReadStore) -> Inspection | None:
    """Inspect a directory that other software wrote; None if it is not a delta.

    Reads the index, and the headers of the files that it lists.

    Raises:
        CorruptCheckpointError: the delta is damaged.
        UncommittedCheckpointError: a file that the index lists does not exist.
    """
    if INDEX not in store.list_names(""):
        return None
    nbytes = store.size(INDEX)
    if nbytes > _MAX_INDEX_BYTES:
        raise CorruptCheckpointError(
            f"{INDEX} has {nbytes} bytes, and at most {_MAX_INDEX_BYTES} are expected; {_AGAIN}", key=INDEX
        )
    try:
        index: Any = json.loads(store.get(INDEX))
        if not isinstance(index, dict) or not isinstance(index.get("metadata"), dict):
            return None
        metadata = index["metadata"]
        if "delta_encoding" not in metadata:
            return None
        delta = _read_delta(store, metadata, index.get("weight_map"))
        delta._check()
    except (TypeError, KeyError, ValueError, OverflowError, IndexError, RecursionError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"{INDEX} does not describe a delta of weights: {error}; {_AGAIN}", key=INDEX
        ) from error
    return Inspection(delta.tree, delta.to_state(), "slime", {"weight_version": metadata}, files=(INDEX, *delta.files))


def _read_delta(store: ReadStore, metadata: Mapping[str, Any], weight_map: object) -> Delta:
    if metadata["compression_format"] != "zstd":
        raise ValueError(f"the compression {metadata['compression_format']!r} is unknown, expected zstd")
    version, base_version = (_number(metadata[name], name) for name in ("version", "base_version"))
    if not isinstance(weight_map, dict):
        raise TypeError("it has no weight_map from names to files")
    tensors: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ValueError(
                f"weight_map has the file {str(file)[:80]!r}, expected a name such as model-00001.safetensors"
            )
        tensors.setdefault(file, []).append(name)
    columns: dict[str, list[Any]] = {name: [] for name in FRAME_COLUMNS}
    for number, file in enumerate(sorted(tensors)):
        columns["files"].append(file)
        _add_frames(store, file, number, tensors[file], columns)
    return Delta(
        version, base_version, metadata["delta_encoding"], metadata["checksum_format"], None, *columns.values()
    )


def _number(text: object, name: str) -> int:
    if not isinstance(text, str) or not _VERSION.fullmatch(text):
        raise ValueError(f"{name} is {str(text)[:40]!r}, expected digits such as '000007'")
    return int(text)


def _add_frames(
    store: ReadStore, file: str, number: int, names: Sequence[str], columns: Mapping[str, list[Any]]
) -> None:
    """Add the frames in a file to columns.

    Raises:
        CorruptCheckpointError: the file is damaged, or does not have exactly the tensors that the index lists in it.
        UncommittedCheckpointError: the file does not exist.
    """
    try:
        header = read_header(functools.partial(store.get, file), store.size(file), file)
    except ObjectNotFoundError as error:
        raise UncommittedCheckpointError(
            f"the delta is incomplete: {INDEX} lists {file}, which does not exist. If it is being copied, load again "
            f"later. Otherwise {_AGAIN}"
        ) from error
    differing = sorted(header.tensors.keys() ^ set(names))
    if differing:
        raise CorruptCheckpointError(
            f"{INDEX} and {file} do not have the same tensors: {differing[0]!r} is only in one of them; {_AGAIN}",
            key=file,
        )
    checksums = header.metadata or {}
    for name, entry in header.tensors.items():
        if entry.dtype != "U8" or len(entry.shape) != 1:
            raise CorruptCheckpointError(
                f"{file} has {name!r} as {entry.dtype} of shape {list(entry.shape)}, expected the bytes of a zstd "
                f"frame, U8 of one axis; {_AGAIN}",
                key=file,
            )
        if name not in checksums:
            raise CorruptCheckpointError(f"{file} has no checksum of {name!r} in its __metadata__; {_AGAIN}", key=file)
        columns["names"].append(name)
        columns["file"].append(number)
        columns["offset"].append(entry.start)
        columns["nbytes"].append(entry.stop - entry.start)
        columns["checksums"].append(checksums[name])
