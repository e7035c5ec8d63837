"""Damaged and hostile versions in the format of slime: each is refused by name, before memory is taken for it."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from ckptcore_testing.cases import check_each, refused
from ckptcore_testing.hostile_json import sealed, tampered
from ckptcore_versions.slime import SlimeLayout
from ckptcore_versions.slime_frames import apply, encode

import ckptcore
from ckptcore.builtin import safetensors_directories
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UncommittedCheckpointError
from plugins.versions.tests.held import HeldState
from plugins.versions.tests.held import version_at as held_version_at
from plugins.versions.tests.slime_files import (
    CHECKSUMS,
    INDEX,
    PAYLOADS,
    frame,
    index_of,
    scattered_payload,
    version_at,
    write_delta,
    write_file,
    xor_payload,
)

FILE = "model-00000-of-00001.safetensors"
OLD = {"w": bytes(range(240)), "b": b"abcdefgh"}
NEW = {"w": bytes(range(239, -1, -1)), "b": b"abcdefgx"}
CHECKSUM = "0" * 32


def write_base(directory: Path, number: int = 0) -> None:
    tensors = {"w": ("F32", [6, 10], OLD["w"]), "b": ("U8", [8], OLD["b"])}
    write_file(version_at(directory, number) / "model.safetensors", tensors)


def write_versions(directory: Path, encoding: str = "xor") -> Path:
    """Write a base and a delta. Return the directory of the delta."""
    write_base(directory)
    write_delta(directory, 1, OLD, NEW, encoding)
    return version_at(directory, 1)


def change_index(version: Path, metadata: Mapping[str, Any]) -> None:
    index = json.loads((version / INDEX).read_text())
    index["metadata"] |= metadata
    (version / INDEX).write_text(json.dumps(index))


def write_frames(
    version: Path, frames: Mapping[str, bytes], checksums: Any = None, encoding: str = "xor", **index: Any
) -> None:
    """Write a delta with any frames."""
    tensors = {name: ("U8", [len(data)], data) for name, data in frames.items()}
    write_file(version / FILE, tensors, dict.fromkeys(frames, CHECKSUM) if checksums is None else checksums)
    listed = index_of(1, dict.fromkeys(frames, FILE), encoding)
    (version / INDEX).write_text(json.dumps({**listed, **index}))


def load(version: Path) -> Any:
    return ckptcore.load(version, context=ckptcore.Context(durability="none"))


# --- frames


@pytest.mark.parametrize("encoding", PAYLOADS)
def test_every_encoding_is_read(encoding: str, tmp_path: Path) -> None:
    version = write_versions(tmp_path, encoding)
    assert load(version)["w"].tobytes() == NEW["w"]


def test_adjacent_frames_of_xor_are_read(tmp_path: Path) -> None:
    """As readers of SGLang do."""
    payload = xor_payload(OLD["w"], NEW["w"])
    write_base(tmp_path)
    checksums = {"w": CHECKSUMS["xxh3-128"](NEW["w"])}
    write_frames(version_at(tmp_path, 1), {"w": frame(payload[:7]) + frame(b"") + frame(payload[7:])}, checksums)
    assert load(version_at(tmp_path, 1))["w"].tobytes() == NEW["w"]


BOMB = bytes(1 << 30)
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(xor_payload(OLD["w"], NEW["w"]))
XOR = frame(xor_payload(OLD["w"], NEW["w"]))
SCATTERED = scattered_payload(OLD["w"], NEW["w"])

FRAMES: Mapping[str, tuple[str, Callable[[], bytes], str]] = {
    "empty": ("xor", lambda: b"", "zstd frame"),
    "no frame": ("xor", lambda: b"\0" * 30, "zstd frame"),
    "a bomb": ("xor", lambda: frame(bytes(1 << 20)), "a size of 1048576 bytes where at most 240 bytes"),
    "a bomb of positions": (
        "overwrite",
        lambda: frame(bytes(1 << 20)),
        "a size of 1048576 bytes where at most 1204 bytes",
    ),
    "a large bomb": ("xor", lambda: frame(BOMB), "which cannot need more than 1504"),
    "another shape": ("xor", lambda: frame(bytes(236)), "fewer bytes than expected"),
    "no size": ("xor", lambda: SIZELESS, "no size"),
    "cut off": ("xor", lambda: XOR[:-3], "cut off"),
    "a damaged byte": ("xor", lambda: XOR[:8] + bytes([XOR[8] ^ 255]) + XOR[9:], ""),
    "two frames": ("xor", lambda: XOR + XOR, "bytes follow its last zstd frame"),
    "two frames of positions": ("overwrite", lambda: frame(SCATTERED) * 2, "bytes follow its last zstd frame"),
    "positions in two frames": ("overwrite", lambda: frame(SCATTERED[:50]) + frame(SCATTERED[50:]), "50 bytes"),
    "bytes after it": ("xor", lambda: XOR + b"x", "1 bytes follow its last zstd frame"),
    "bytes between": ("xor", lambda: frame(bytes(100)) + b"x" + frame(bytes(140)), "does not begin a whole zstd frame"),
    "too many positions": ("overwrite", lambda: frame((241).to_bytes(4, "little") + bytes(5)), "241 changed bytes"),
    "fewer values": ("overwrite", lambda: frame(SCATTERED[:-1]), "changed bytes"),
    "more values": ("overwrite", lambda: frame(SCATTERED + b"x"), "1205 bytes where at most 1204"),
    "a position outside": (
        "overwrite",
        lambda: frame(np.array([1, 240], "<u4").tobytes() + b"x"),
        "ascending numbers below 240",
    ),
    "a position twice": (
        "overwrite",
        lambda: frame(np.array([2, 7, 7], "<u4").tobytes() + b"xy"),
        "ascending numbers below 240",
    ),
    "a count of 64 bits": (
        "xor_sparse",
        lambda: frame(np.array([1 << 63, 1], "<u8").tobytes() + b"x"),
        "changed bytes of 240",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_hostile_frame_is_refused(name: str, tmp_path: Path) -> None:
    encoding, content, text = FRAMES[name]
    version = version_at(tmp_path, 1)
    write_base(tmp_path)
    write_frames(version, {"w": content()}, encoding=encoding)
    refused(lambda: load(version), "weight_v000001", "'w'", text, error=CorruptCheckpointError)
    problems = ckptcore.verify(version).problems
    assert problems and "'w'" in problems[0].message


def test_a_frame_that_is_longer_than_it_states_is_refused() -> None:
    content = bytearray(frame(np.random.default_rng(0).bytes(600)))
    assert zstandard.get_frame_parameters(bytes(content)).content_size == 600
    content[5:7] = bytes(2)  # sizes from 256 are stored in two bytes, less 256
    assert zstandard.get_frame_parameters(bytes(content)).content_size == 256
    elements = np.zeros(256, np.uint8)
    refused(lambda: apply(np.frombuffer(content, np.uint8), elements, "xor"), error=CorruptCheckpointError)


def test_memory_is_bounded_by_the_array(tmp_path: Path) -> None:
    """Of arrays that are not read no memory is needed, and a bomb is refused before it is decompressed."""
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 9, 3 << 20, dtype=np.uint8) for name in "abcd"}
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        array[rng.integers(0, len(array), 40_000)] ^= 5
    write_file(
        version_at(tmp_path, 0) / "model.safetensors",
        {name: ("U8", [3 << 10, 1 << 10], array.tobytes()) for name, array in old.items()},
    )
    location, version = version_at(tmp_path, 1), held_version_at
    encoded = {name: encode(old[name], new[name], "xor", "xxh3-128") for name in "abcd"}
    frames = {name: tensor.frame for name, tensor in encoded.items() if tensor is not None}
    checksums = {name: tensor.checksum for name, tensor in encoded.items() if tensor is not None}
    write_frames(location, frames, checksums)
    del version
    tracemalloc.start()
    try:
        opened = ckptcore.open(location)
        row = opened["c"][1000:1001]
        assert tracemalloc.get_traced_memory()[1] < (3 << 20) + (3 << 20)
        assert row.tobytes() == new["c"].reshape(-1, 1 << 10)[1000:1001].tobytes()
        del opened
        tracemalloc.reset_peak()
        bomb = np.frombuffer(frame(BOMB), np.uint8)
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        refused(lambda: apply(bomb, old["a"], "xor"), "a size of 1073741824 bytes", error=CorruptCheckpointError)
        assert tracemalloc.get_traced_memory()[1] - start < 1 << 20
    finally:
        tracemalloc.stop()


# --- indexes and files


def expect_refused(directory: Path, change: Callable[[Path], object], *texts: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    version = write_versions(directory)
    change(version)
    refused(lambda: load(version), *texts)
    assert not ckptcore.verify(version).ok


INDEXES: Mapping[str, tuple[dict[str, Any], str]] = {
    "another compression": ({"compression_format": "lz4"}, "'lz4'"),
    "another encoding": ({"delta_encoding": "plus"}, "'plus'"),
    "another checksum": ({"checksum_format": "md5"}, "'md5'"),
    "no number": ({"version": "seven"}, "'seven'"),
    "a number of 19 digits": ({"version": "1" * 19}, "expected digits"),
    "the version itself as base": ({"base_version": "000001"}, "not older"),
    "a newer base": ({"base_version": "000002"}, "not older"),
    "a negative base": ({"base_version": "-1"}, "'-1'"),
    "a missing base": ({"version": "000009", "base_version": "000008"}, "weight_v000008"),
    "null": ({"version": None}, "version"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(name: str, tmp_path: Path) -> None:
    metadata, text = INDEXES[name]
    expect_refused(tmp_path, lambda version: change_index(version, metadata), text)


@pytest.mark.parametrize(
    "file",
    [
        "../weight_v000000/model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        ".safetensors",
        "x.bin",
        "a\0",
        7,
    ],
    ids=repr,
)
def test_an_index_names_files_of_its_directory_alone(file: Any, tmp_path: Path) -> None:
    def change(version: Path) -> None:
        (version / INDEX).write_text(json.dumps(index_of(1, {"w": file})))

    expect_refused(tmp_path, change, "weight_map has the file")


def test_damage_of_files_is_named(tmp_path: Path) -> None:
    def rewritten(**changes: Any) -> Callable[[Path], None]:
        return lambda version: write_frames(version, {"w": XOR}, **changes)

    def of_dtype(version: Path) -> None:
        write_file(version / FILE, {"w": ("I8", [len(XOR)], XOR)}, {"w": CHECKSUM})
        (version / INDEX).write_text(json.dumps(index_of(1, {"w": FILE})))

    def check(change: Callable[[Path], None], text: str) -> None:
        expect_refused(tmp_path / "versions", change, text)

    for change, text in (
        (rewritten(checksums={}), "no checksum of 'w'"),
        (rewritten(checksums={"w": "0" * 31}), "32 hex digits"),
        (rewritten(checksums={"w": "A" * 32}), "32 hex digits"),
        (rewritten(), "does not give the expected elements"),
        (rewritten(weight_map={"w": FILE, "other": FILE}), "'other' is only in one of them"),
        (rewritten(weight_map=None), "does not describe a delta"),
        (of_dtype, "as I8 of shape"),
        (lambda version: (version / FILE).write_bytes(b"\xff" * 40), FILE),
        (lambda version: (version / INDEX).write_text("{"), INDEX),
        (lambda version: (version / INDEX).write_bytes(b"\xff\xfe"), INDEX),
    ):
        check(change, text)


def test_an_array_that_the_base_lacks_is_named(tmp_path: Path) -> None:
    expect_refused(tmp_path, lambda version: write_frames(version, {"a/b": XOR}), "'a/b', which its base does not have")


def test_a_frame_is_not_larger_than_its_array_allows(tmp_path: Path) -> None:
    expect_refused(tmp_path, lambda version: write_frames(version, {"b": bytes(5000)}), "5000 bytes for 'b'")


def test_a_base_of_another_version_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path, 4)
    write_delta(tmp_path, 5, OLD, NEW)
    version_at(tmp_path, 5).rename(version_at(tmp_path, 1))
    write_delta(tmp_path, 2, NEW, OLD)
    refused(lambda: load(version_at(tmp_path, 2)), "version 2 is relative to version 1", "weight_v000001 is version 5")


def test_versions_that_need_each_other_are_refused(tmp_path: Path) -> None:
    """Numbers descend along a chain, so a cycle needs directories under wrong names."""
    write_delta(tmp_path, 2, OLD, NEW)
    write_delta(tmp_path, 3, NEW, OLD)
    version_at(tmp_path, 3).rename(version_at(tmp_path, 1))
    refused(lambda: load(version_at(tmp_path, 2)), "weight_v000001", "needs it", error=CorruptCheckpointError)


def test_another_base_is_noticed(tmp_path: Path) -> None:
    write_versions(tmp_path)
    tensors = {"w": ("F32", [6, 10], OLD["w"][::-1]), "b": ("U8", [8], OLD["b"])}
    write_file(version_at(tmp_path, 0) / "model.safetensors", tensors)
    text = refused(lambda: load(version_at(tmp_path, 1)), "does not give the expected elements", "Its base differs")
    assert "weight_v000001" in text
    (problem,) = ckptcore.verify(version_at(tmp_path, 1)).problems
    assert problem.arrays == ("w",)


# --- notifications that come early or late


def test_an_index_before_its_files_is_unfinished(tmp_path: Path) -> None:
    version = write_versions(tmp_path)
    (version / FILE).rename(tmp_path / "late")
    refused(lambda: load(version), "the delta is incomplete", FILE, error=UncommittedCheckpointError)
    reader = ckptcore.CheckpointReader(tmp_path)
    assert (tuple(reader.steps), reader.latest) == ((0,), 0)
    (tmp_path / "late").rename(version / FILE)
    reader.reload()
    assert reader.latest == 1 and reader.load()["w"].tobytes() == NEW["w"]


def test_files_before_their_index_are_unfinished(tmp_path: Path) -> None:
    version = write_versions(tmp_path)
    (version / INDEX).rename(tmp_path / "late")
    refused(
        lambda: load(version), "their index, which is written last, does not exist", error=UncommittedCheckpointError
    )
    assert ckptcore.CheckpointReader(tmp_path).latest == 0
    (tmp_path / "late").rename(version / INDEX)
    assert ckptcore.CheckpointReader(tmp_path).latest == 1


def test_one_file_of_frames_is_not_taken_for_weights(tmp_path: Path) -> None:
    version = write_versions(tmp_path)
    refused(lambda: load(version / INDEX), "lists changes relative to another version", "name the directory")


def test_the_core_alone_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = write_versions(tmp_path)
    command = "`pip install 'ckptcore[versions]'`"
    monkeypatch.setattr(safetensors_directories, "install_hint", lambda layout: command)
    refused(lambda: load(version), "lists changes relative to another version, not weights", command)


# --- versions of ckptcore


def write_own(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Write three versions. Return the last, and its state."""
    states = [{"w": np.arange(400.0) + number * (np.arange(400) % 7 == 0), "n": number} for number in range(3)]
    for number, state in enumerate(states, start=1):
        held = None
        if number > 1:
            held = HeldState(held_version_at(str(version_at(directory, number - 1)), number - 1), states[number - 2])
        layout = SlimeLayout().numbered(number).against(held)
        context = ckptcore.Context(durability="none")
        ckptcore.save(version_at(directory, number), state, layout=layout, context=context)
    return version_at(directory, 3), states[-1]


def test_a_damaged_byte_is_noticed(tmp_path: Path) -> None:
    last, state = write_own(tmp_path)

    def check(number: int, position: float) -> None:
        for file in version_at(tmp_path, number).iterdir():
            content = file.read_bytes()
            at = int(position * (len(content) - 1))
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            if file.name == INDEX:  # only for other software
                assert load(last)["w"].tobytes() == state["w"].tobytes()
            else:
                with pytest.raises(CheckpointError):
                    load(last)
                assert not ckptcore.verify(last).ok
            file.write_bytes(content)

    check_each(check, (1, 2, 3), (0.0, 0.3, 0.7, 1.0))
    assert load(last)["w"].tobytes() == state["w"].tobytes()


def test_a_tampered_root_raises_no_other_error(tmp_path: Path) -> None:
    last, _ = write_own(tmp_path)
    root = json.loads((last / "checkpoint.json").read_bytes())
    for hostile in tampered(root["tables"]["layout"], 250):
        (last / "checkpoint.json").write_bytes(sealed({**root, "tables": {**root["tables"], "layout": hostile}}))
        try:
            load(last)
        except CheckpointError:
            continue
