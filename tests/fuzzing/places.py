"""Places: checkpoints in which one file is fuzzed. Its checksums are repaired, so that readers parse its content."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import xxhash
from ckptcore_orbax.crc32c import crc32c_of
from ckptcore_orbax.ocdbt.cursor import ByteRange
from ckptcore_orbax.ocdbt.frame import MANIFEST_MAGIC, NODE_MAGIC, decode_frame, encode_frame
from ckptcore_orbax.ocdbt.manifest import decode_manifest, encode_manifest

from tests.fuzzing.mutations import MutatorName

Files: TypeAlias = Mapping[str, bytes]
"""The contents of files, by their paths in a directory."""


@dataclass(frozen=True, slots=True)
class Place:
    """A fuzzed file in a directory of intact ones.

    Attributes:
        files: the intact directory.
        sample: an input for which `build` returns intact files.
        build: returns the files to replace for an input.
        mutator: the mutator that changes inputs in addition to that of the fuzzer.
        location: the location to open, relative to the directory.
    """

    files: Files
    sample: bytes
    build: Callable[[bytes], Files]
    mutator: MutatorName
    location: str = "."

    def __post_init__(self) -> None:
        assert all(key in self.files for key in self.build(self.sample)), "it would add a file"


def files_below(directory: Path, *without: str) -> dict[str, bytes]:
    """Return the files of a directory, except those of these names."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in without]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def place(files: Files, key: str, mutator: MutatorName = "bytes", location: str = ".") -> Place:
    """Return a place whose input is the whole file."""
    return Place(files, files[key], lambda data: {key: data}, mutator, location)


# --- our own format ---------------------------------------------------------------------------------------------------

_CHECKSUM_TAIL: Final = b',"checksum":"xxh3_64:'


def _checksum(data: bytes) -> str:
    return f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}"


def _without_checksum(root: bytes) -> bytes:
    return root[: root.rindex(_CHECKSUM_TAIL)] + b"}"


def _sealed(root: bytes) -> bytes:
    """Add a checksum to a root."""
    body = root.rstrip().removesuffix(b"}")
    return body + f',"checksum":"{_checksum(body)}"}}\n'.encode()


def root_place(files: Files, key: str = "checkpoint.json", location: str = ".") -> Place:
    """Return a place whose input is a root without its checksum."""
    return Place(files, _without_checksum(files[key]), lambda data: {key: _sealed(data)}, "json", location)


def part_place(files: Files, table: str) -> Place:
    """Return a place whose input is a table of the root that is stored in its own object."""
    root = json.loads(_without_checksum(files["checkpoint.json"]))
    key = f"checkpoint.{root['save_id']}.{table}.json"
    encoded = json.dumps(root["tables"].pop(table), separators=(",", ":")).encode()

    def build(data: bytes) -> Files:
        root["parts"][table] = {"key": key, "size": len(data), "checksum": _checksum(data)}
        return {"checkpoint.json": _sealed(json.dumps(root, separators=(",", ":")).encode()), key: data}

    return Place({**files, **build(encoded)}, encoded, build, "json")


def session_place(files: Files, root_key: str, location: str) -> Place:
    """Return a place whose input is the table of the first session of a partial save."""
    root = json.loads(_without_checksum(files[root_key]))
    name = root["sessions"][0][5]
    key = root_key.rpartition("/")[0] + "/" + name

    def build(data: bytes) -> Files:
        root["sessions"][0][6:8] = len(data), _checksum(data)
        return {root_key: _sealed(json.dumps(root, separators=(",", ":")).encode()), key: data}

    return Place(files, files[key], build, "json lines", location)


# --- formats of other software ----------------------------------------------------------------------------------------


def safetensors_place(files: Files, key: str, location: str = ".") -> Place:
    """Return a place whose input is the header of a safetensors file, without its length."""
    whole = files[key]
    stop = 8 + int.from_bytes(whole[:8], "little")

    def build(data: bytes) -> Files:
        return {key: len(data).to_bytes(8, "little") + data + whole[stop:]}

    return Place(files, whole[8:stop], build, "json", location)


def zip_place(files: Files, key: str, location: str) -> Place:
    """Return a place whose input is the pickle in a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(files[key])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = [name for name in members if name.endswith("/data.pkl")]

    def build(data: bytes) -> Files:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), data if name == pickled else content)
        return {key: made.getvalue()}

    return Place(files, members[pickled], build, "pickle", location)


def manifest_place(files: Files, key: str) -> Place:
    """Return a place whose input is the body of a manifest of OCDBT."""
    whole = files[key]
    body = decode_frame(whole, MANIFEST_MAGIC, ByteRange("manifest", key, 0, len(whole)))
    return Place(files, body, lambda data: {key: encode_frame(data, MANIFEST_MAGIC)}, "bytes")


def database_node_place(files: Files, directory: str) -> Place:
    """Return a place whose input is the body of the root node of an OCDBT database. The manifest states its length."""
    manifest_key = f"{directory}/manifest.ocdbt"
    encoded = files[manifest_key]
    manifest = decode_manifest(encoded, "", ByteRange("manifest", manifest_key, 0, len(encoded)))
    assert manifest.newest is not None and manifest.newest.root is not None
    newest, root = manifest.newest, manifest.newest.root
    key = f"{directory}/{root.file.path}"
    start, stop = root.offset, root.offset + root.length
    whole = files[key]
    body = decode_frame(whole[start:stop], NODE_MAGIC, ByteRange("node", key, start, stop))

    def build(data: bytes) -> Files:
        frame = encode_frame(data, NODE_MAGIC)
        version = replace(newest, root=replace(root, length=len(frame)))
        return {
            key: whole[:start] + frame + whole[stop:],
            manifest_key: encode_manifest(manifest.uuid, version),
        }

    return Place(files, body, build, "bytes")


def shard_place(files: Files, key: str, chunks: int) -> Place:
    """Return a place whose input is a shard of zarr 3, without the checksum of the index at its end."""
    index_bytes = 16 * chunks

    def build(data: bytes) -> Files:
        return {key: data + crc32c_of(data[-index_bytes:]).to_bytes(4, "little")}

    return Place(files, files[key][:-4], build, "bytes")
