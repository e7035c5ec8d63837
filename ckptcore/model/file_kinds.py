"""Kinds of files and directories of other software, recognised by their first bytes and names. Errors name them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import Final

from ckptcore.records import NamedTuple

FILE_HEAD_BYTES: Final = 512
"""Number of bytes at the start of a file by which its kind is recognised."""


class FileKind(NamedTuple):
    """A kind of file, or of directory.

    Attributes:
        noun: a noun for it, with an article.
        remedy: advice, as an imperative.
        layout: the layout that reads it; empty if no layout does.
        is_archive: True if a location can name files in it.
    """

    noun: str
    remedy: str
    layout: str = ""
    is_archive: bool = False

    def __str__(self) -> str:
        """Return noun and remedy. In a message, they follow the name of the file and ``is``."""
        return f"{self.noun}: {self.remedy}"


_OWNER: Final = "read it with {} and pass the arrays to ckptcore.save"
_UNPACK: Final = "unpack it, and load what it contains"
_CONCATENATE: Final = "join the parts in the order of their names, as `cat NAME.*` does, and load what that has"
_JOIN: Final = "join the parts, as `zip -s 0 PARTS.zip --out WHOLE.zip` does, and load what that has"
_AGAIN: Final = "download the file again; it may need a login or another address"

_LFS: Final = FileKind(
    "a pointer of Git LFS in place of the file", "run `git lfs pull` in its clone, or download the file itself"
)
_HTML: Final = FileKind("a page of HTML, such as an error or a login page", _AGAIN)
_PICKLE: Final = FileKind(
    "a pickle of Python, which can run any code when it is read",
    "if you trust it, read it with pickle.load, or joblib.load, and pass the arrays to ckptcore.save",
    "pickle",
)

_MAGIC: Final[Mapping[bytes, FileKind]] = {
    b"version https://git-lfs": _LFS,
    b"<?xml": FileKind("an XML document, such as the error of an object store", _AGAIN),
    b"\x89HDF\r\n\x1a\n": FileKind("an HDF5 file, as Keras writes it", _OWNER.format("h5py or Keras"), "hdf5"),
    b"\x93NUMPY": FileKind("an array of numpy.save", _OWNER.format("numpy.load"), "numpy"),
    b"GGUF": FileKind("a GGUF file of llama.cpp", _OWNER.format("the package gguf")),
    b"lmgg": FileKind("a GGML file of llama.cpp", "convert it to GGUF with the tools of llama.cpp"),
    b"tjgg": FileKind("a GGML file of llama.cpp", "convert it to GGUF with the tools of llama.cpp"),
    b"\x1f\x8b": FileKind(
        "compressed by gzip", "decompress it with gunzip, or unpack it with tar -xzf", is_archive=True
    ),
    b"\x28\xb5\x2f\xfd": FileKind("compressed by Zstandard", "decompress it with zstd -d"),
    b"\xfd7zXZ\x00": FileKind("compressed by xz", "decompress it with xz -d", is_archive=True),
    b"BZh": FileKind("compressed by bzip2", "decompress it with bzip2 -d", is_archive=True),
    b"\x04\x22\x4d\x18": FileKind("compressed by LZ4", "decompress it with lz4 -d"),
    b"7z\xbc\xaf\x27\x1c": FileKind("a 7z archive", _UNPACK),
    b"PAR1": FileKind("a Parquet file", _OWNER.format("pyarrow or pandas")),
    b"ARROW1": FileKind("an Arrow file", _OWNER.format("pyarrow")),
    b"SQLite format 3\x00": FileKind("a SQLite database", "load the checkpoint that it is about"),
}

_EMPTY: Final = FileKind("empty", "restore it from a copy, or load another one")
_MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum header length of safetensors. The first 8 bytes of a file are this length."""
_OLD_PICKLE: Final = re.compile(rb"\([dl]p\d+\n|c[A-Za-z_][\w.]*\n\w+\n")
"""Dicts, lists and objects in pickles of protocol 0, which are lines of text."""
_ZIP_PART: Final = re.compile(r"\.z\d{2,3}\Z", re.ASCII)
_SPLIT_PART: Final = re.compile(r"\.(zip|tar|tgz|gz)\.(\d{2,3}|part[a-z]{2})\Z", re.ASCII)
"""Names of archive parts, as ``zip -s``, ``split`` and 7-Zip give them. The first bytes of such parts are arbitrary."""
_WORD_VECTORS: Final = re.compile(rb"\d{1,12} \d{1,9}\n")
_TEXT: Final = FileKind("a text", "load the directory or the file with the weights")

_SUFFIXES: Final[Mapping[str, FileKind]] = {
    ".onnx": FileKind("an ONNX model", _OWNER.format("onnx (onnx.numpy_helper)")),
    ".pb": FileKind("a TensorFlow or protobuf file", _OWNER.format("TensorFlow")),
    ".zip": FileKind("no whole zip archive: damaged, or the last of several parts", _JOIN),
    ".h5": FileKind("no HDF5 file, in spite of its name", "download or copy it again"),
    ".yaml": FileKind("a configuration", _TEXT.remedy),
    ".json": FileKind("a text of JSON", _TEXT.remedy),
}


def file_kind(head: bytes, name: str) -> FileKind | None:
    """Return the kind of a file of other software, or None if the kind is unknown.

    Args:
        head: the first `FILE_HEAD_BYTES` of the file, or all of a shorter file.
        name: its name.
    """
    if not head:
        return _EMPTY
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    text = head.lstrip()[:16].lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return _HTML
    if head[4:8] == b"TFL3":
        return FileKind("a TensorFlow Lite model", _OWNER.format("TensorFlow"))
    if head[257:262] == b"ustar":  # POSIX.1-1988: the magic is in the header of the first member
        return FileKind("a tar archive", _UNPACK, is_archive=True)
    if (part := part_of_archive(head, name)) is not None:
        return part
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(head, name)
    # Before pickles: a header length of 0x280 has the first bytes of a pickle, 80 02.
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < _MAX_HEADER_BYTES:
        if not name or name.endswith(".safetensors"):
            return None
        return FileKind("a safetensors file that is cut off or damaged", _EMPTY.remedy)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _PICKLE
    for suffix, kind in _SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    if _OLD_PICKLE.match(head):
        return _PICKLE
    if _WORD_VECTORS.match(head):
        return FileKind("vectors of words in the format of word2vec", _OWNER.format("gensim"))
    return _TEXT if is_text(head) else None


def kind_in_place_of(head: bytes) -> FileKind | None:
    """Return the kind of a pointer, a page or an empty file that replaces the expected file; None for other files."""
    kind = file_kind(head, "")
    return kind if kind in (_LFS, _HTML, _EMPTY) or head.startswith(b"<?xml") else None


def part_of_archive(head: bytes, name: str) -> FileKind | None:
    """Return the kind of a file that is a part of an archive, by its first bytes or its name; None for other files.

    The last part of a zip is not recognised, because it has the name of a whole zip. See `file_kind` for arguments.
    """
    if head.startswith(b"PK\x07\x08") or _ZIP_PART.search(name):
        return FileKind("a part of a zip archive in several parts", _JOIN)
    return (
        FileKind("by its name a part of an archive that was split", _CONCATENATE) if _SPLIT_PART.search(name) else None
    )


def is_text(head: bytes) -> bool:
    """Return True for UTF-8 without control characters. The last character may be cut off."""
    text = head.decode("utf-8", "ignore")
    is_printable = all(character.isprintable() or character.isspace() for character in text)
    # `ignore` drops invalid bytes. If the head ends inside a character, at most 3 bytes of this character are dropped.
    return bool(text) and len(text.encode()) > len(head) - 4 and is_printable


def _zip_kind(head: bytes, name: str) -> FileKind:
    """Return the kind of a zip by the name of its first member (APPNOTE.TXT 4.3.7)."""
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length].decode("utf-8", "replace")
    if first.endswith(".npy"):
        return FileKind("an archive of numpy.savez", _OWNER.format("numpy.load"), "numpy")
    if first in ("metadata.json", "model.weights.h5") or (first == "config.json" and name.endswith(".keras")):
        return FileKind("a model of Keras", _OWNER.format("keras.saving.load_model"), "hdf5")
    if first == "serialized_exported_program.json":
        remedy = "load it with torch.export.load and pass program.state_dict to ckptcore.save"
        return FileKind("an exported program of PyTorch before 2.8", remedy)
    shown = first if first.isprintable() else repr(first)
    return FileKind(f"a zip archive that begins with {shown[:80]}", _UNPACK, is_archive=True)


def directory_kind(names: Collection[str]) -> FileKind | None:
    """Return the kind of a directory of other software by the names in it, or None if the kind is unknown.

    Args:
        names: the names; names of directories end with ``/``.
    """
    for patterns, kind in _DIRECTORIES:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return kind
    return None


def whole_formats(names: Collection[str]) -> Mapping[str, str]:
    """Return the formats of the checkpoints that use a whole directory with the given names.

    For each format, the result has the name in the directory that loads its checkpoint alone, or an empty text if no
    name does. ``ITEM`` stands for the name of an item. See `directory_kind` for `names`.
    """
    formats: dict[str, str] = {}
    if ".metadata" in names or "__0.metadata" in names:
        formats["torch.distributed.checkpoint"] = ".metadata" if ".metadata" in names else ""
    if not {"_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint"}.isdisjoint(names):
        formats["Orbax"] = "" if "_METADATA" in names else "ITEM"
    if "latest" in names and (step := next((name for name in names if name.startswith("global_step")), "")):
        formats["DeepSpeed"] = step.removesuffix("/")
    return formats


_DIRECTORIES: Final[tuple[tuple[tuple[str, ...], FileKind], ...]] = (
    (
        ("zero_pp_rank_*", "mp_rank_*", "bf16_zero_pp_rank_*"),
        FileKind(
            "a checkpoint of DeepSpeed",
            "write one file with its zero_to_fp32.py, load that, or load one file of a rank by its own path",
            "deepspeed",
        ),
    ),
    (("saved_model.pb",), FileKind("a SavedModel of TensorFlow", _OWNER.format("TensorFlow"))),
    (("*.data-00000-of-00001",), FileKind("a checkpoint of TensorFlow", _OWNER.format("tf.train.load_checkpoint"))),
    (
        ("zarr.json", ".zgroup", ".zarray"),
        FileKind("a zarr hierarchy without the metadata of a checkpoint", _OWNER.format("zarr.open")),
    ),
    (
        ("_ROOT_METADATA",),
        FileKind("the metadata of a run of Orbax", "load one of the steps in the directory that contains it"),
    ),
    (("*.gguf",), FileKind("a directory of GGUF files of llama.cpp", _OWNER.format("the package gguf"))),
    (("*.onnx",), FileKind("a directory of an ONNX model", _OWNER.format("onnx (onnx.numpy_helper)"))),
)
"""Kinds of directories, each with patterns of names. A directory has a kind if one of its names matches a pattern."""
