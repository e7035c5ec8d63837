"""Versions in the format of slime, written and read by the format's page alone, with zstandard and struct.

No distribution on PyPI has the writers or readers of slime, miles and SGLang, so this module follows
``docs/format/slime.md`` instead, and is stricter than any of them: it refuses what one of them refuses. The goldens in
``golden/slime`` were written by slime and pulled by SGLang; ``test_slime_engines`` runs readers from their sources.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
CHECKSUMS: Mapping[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def version_at(directory: Path, number: int) -> Path:
    return directory / f"weight_v{number:06d}"


# --- write


def write_file(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Any = None) -> None:
    """Write a safetensors file of dtypes, shapes and bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join([data for _, _, data in tensors.values()]))


def xor_payload(old: bytes, new: bytes) -> bytes:
    return bytes([first ^ second for first, second in zip(old, new, strict=True)])


def scattered_payload(old: bytes, new: bytes, width: int = 4, *, is_xor: bool = False) -> bytes:
    """Return the payload of ``overwrite``, or of ``xor_sparse``."""
    positions = [at for at in range(len(new)) if old[at] != new[at]]
    code = "<" + {4: "I", 8: "Q"}[width] * (len(positions) + 1)
    return struct.pack(code, len(positions), *positions) + bytes(
        [new[at] ^ (old[at] if is_xor else 0) for at in positions]
    )


PAYLOADS: Mapping[str, Callable[[bytes, bytes], bytes]] = {
    "xor": xor_payload,
    "overwrite": scattered_payload,
    "xor_sparse": lambda old, new: scattered_payload(old, new, 8, is_xor=True),
}


def frame(payload: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(payload)


def index_of(
    number: int, files: Mapping[str, str], encoding: str = "xor", checksum: str = "xxh3-128"
) -> dict[str, Any]:
    """Return the index of a delta."""
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    return {"metadata": metadata, "weight_map": dict(files)}


def write_delta(
    directory: Path,
    number: int,
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    encoding: str = "xor",
    checksum: str = "xxh3-128",
) -> None:
    """Write a delta: one file, and then its index."""
    file, version = "model-00000-of-00001.safetensors", version_at(directory, number)
    changed = {name: data for name, data in new.items() if data != old[name]}
    frames = {name: frame(PAYLOADS[encoding](old[name], data)) for name, data in changed.items()}
    checksums = {name: CHECKSUMS[checksum](data) for name, data in changed.items()}
    version.mkdir(parents=True, exist_ok=True)
    if frames:
        write_file(version / file, {name: ("U8", [len(data)], data) for name, data in frames.items()}, checksums)
    (version / INDEX).write_text(json.dumps(index_of(number, dict.fromkeys(frames, file), encoding, checksum)))


# --- read


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the header and the bytes of each tensor. Tensors must fill the file in the order of their offsets."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    tensors, position = {}, 0
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        assert begin == position, (path, name)
        tensors[name] = data[start + begin : start + end]
        position = end
    assert start + position == len(data), path
    return header, tensors


def listed_files(version: Path) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], dict[str, bytes]]]]:
    """Return the index of a version, and the content of its files, which must be exactly those in the directory."""
    index = json.loads((version / INDEX).read_text())
    files = {name: read_file(version / name) for name in set(index["weight_map"].values())}
    assert set(files) == {path.name for path in version.glob("*.safetensors")}
    for name, (_, tensors) in files.items():
        assert set(tensors) == {tensor for tensor, file in index["weight_map"].items() if file == name}
    assert int(index["metadata"]["version"]) == int(version.name.removeprefix("weight_v"))
    return index["metadata"], files


def pull(directory: Path, number: int, base: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the bytes of each tensor of a version.

    Args:
        directory: the directory of versions.
        number: the version.
        base: the tensors of version 0; None if there is a full version.
    """
    if number == 0 and base is not None:
        return dict(base)
    metadata, files = listed_files(version_at(directory, number))
    if "delta_encoding" not in metadata:
        return {name: data for _, tensors in files.values() for name, data in tensors.items()}
    assert set(metadata) == {"version", "base_version", "delta_encoding", "compression_format", "checksum_format"}
    assert metadata["base_version"] == f"{number - 1:06d}" and metadata["compression_format"] == "zstd"
    state = pull(directory, number - 1, base)
    for header, tensors in files.values():
        assert set(header["__metadata__"]) == set(tensors)
        for name, data in tensors.items():
            assert header[name]["dtype"] == "U8" and header[name]["shape"] == [len(data)]
            state[name] = _changed(state[name], data, metadata["delta_encoding"])
            assert CHECKSUMS[metadata["checksum_format"]](state[name]) == header["__metadata__"][name]
    return state


def _changed(old: bytes, data: bytes, encoding: str) -> bytes:
    payload = zstandard.ZstdDecompressor().decompress(data)  # needs the size in the frame, and reads one frame
    assert frame_bytes(data) == len(data)
    if encoding == "xor":
        assert len(payload) == len(old)
        return xor_payload(old, payload)
    assert encoding == "overwrite"
    (count,) = struct.unpack_from("<I", payload)
    positions = struct.unpack_from(f"<{count}I", payload, 4)
    assert list(positions) == sorted(set(positions)) and len(payload) == 4 + 5 * count
    changed = bytearray(old)
    for at, value in zip(positions, payload[4 + 4 * count :], strict=True):
        changed[at] = value
    return bytes(changed)


def frame_bytes(data: bytes) -> int:
    """Return the size of the first zstd frame."""
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    decompressor.decompress(data)
    return len(data) - len(decompressor.unused_data)
