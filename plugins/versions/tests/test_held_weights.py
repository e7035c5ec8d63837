"""The memory of a publish: one copy of the weights, in host memory or in a mapped file, and little more."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.trees import same_value
from ckptcore_versions import Publisher
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.held_weights import HeldWeights, in_files_of, in_host_memory

from ckptcore.context import MemoryOptions
from ckptcore.errors import CorruptCheckpointError, StorageError, StorageFullError
from ckptcore.model import (
    LEAF,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    Node,
    TreeMetadata,
    TreePath,
    WriteItem,
    WritePlan,
)
from ckptcore.runtime import runtime_of
from plugins.versions.tests.published import CONTEXT, base_of, load, publisher
from plugins.versions.tests.watched_deltas import WatchedDeltas

_ARRAY_BYTES = 1 << 20
_COUNT = 40
_ENCODED_BYTES = 32 << 20
"""Bytes of elements that the layout encodes together."""


def _weights(number: int) -> dict[str, Any]:
    """Return 40 arrays of 1 MiB."""
    weights = {f"w{array:02d}": np.arange(_ARRAY_BYTES // 4, dtype=np.float32) for array in range(_COUNT)}
    for array in weights.values():
        array[:number] += 1
    return weights


def _deleted_bytes(directory: Path) -> int:
    """Return the bytes of the mappings of this process of unnamed files in a directory."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith(str(directory))]
    return sum(int(stop, 16) - int(start, 16) for start, stop in bounds)


def _publish(place: Path, background: bool, limit: int | None, **options: Any) -> tuple[list[int], Publisher]:
    """Publish three versions. Return the bytes of copied weights at each moment at which the encoder takes an array."""
    context = replace(CONTEXT, memory=MemoryOptions(save_bytes=limit))
    staging = runtime_of(context).staging
    copied: list[int] = []
    layout = WatchedDeltas(taking=lambda name: copied.append(staging.held_bytes))
    versions = publisher(str(place), layout=layout, context=context, **options)
    if versions._context is not context:
        staging = runtime_of(versions._context).staging
    for number in (1, 2, 3):
        versions.publish(number, _weights(number), background=background)
    versions.wait()
    return copied, versions


@pytest.mark.parametrize("background", [False, True])
def test_one_copy_and_a_limited_part_of_the_weights_are_in_memory(background: bool, tmp_path: Path) -> None:
    copied, versions = _publish(tmp_path, background, 2 * _ARRAY_BYTES)
    assert len(copied) == 3 * _COUNT
    assert 0 < max(copied) <= _ENCODED_BYTES + _ARRAY_BYTES
    assert versions._publications.held.nbytes == _COUNT * _ARRAY_BYTES
    versions.close()
    assert same_value(load(str(tmp_path), 3), _weights(3))


def test_without_options_the_copied_part_has_a_limit(tmp_path: Path) -> None:
    with publisher(str(tmp_path)) as versions:
        assert versions._context.memory.save_bytes == 256 << 20


def test_the_copy_is_in_a_mapped_file_without_a_name(tmp_path: Path) -> None:
    directory = tmp_path / "base"
    copied, versions = _publish(tmp_path / "versions", True, None, base_directory=directory)
    nbytes = _COUNT * _ARRAY_BYTES
    assert max(copied) <= nbytes + (32 << 20)  # memory of small arrays is allocated in units of 32 MiB
    assert _deleted_bytes(directory) == nbytes == versions._publications.held.nbytes
    assert list(directory.iterdir()) == []
    versions.close()
    del versions
    assert base_of(str(tmp_path / "versions"), 3) == 2
    assert same_value(load(str(tmp_path / "versions"), 3), _weights(3))


def test_a_base_directory_without_room_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with publisher(str(tmp_path / "versions"), base_directory=tmp_path / "file") as versions:
        with pytest.raises(StorageError, match=r"file: cannot create a file of \d+ bytes .*base_directory="):
            versions.publish(1, _weights(1))
        assert versions.latest is None


def test_a_full_disk_of_the_base_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reservation, a write to the mapped file would end the process."""

    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with publisher(str(tmp_path / "versions"), base_directory=tmp_path / "base") as versions:
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", reserve)
            with pytest.raises(StorageFullError, match=r"base: cannot create a file of .*Free space"):
                versions.publish(1, _weights(1))
        versions.publish(1, _weights(1))
    assert same_value(load(str(tmp_path / "versions"), 1), _weights(1))


_SPEC = ArraySpec((4, 6), "float32")
_VERSIONS = [BaseVersion(f"v{number:06d}", f"{number:016x}", "", number) for number in range(9)]


def _plan(*boxes: Box, name: str = "w") -> WritePlan:
    tree = TreeMetadata(Node("dict", (name,), (LEAF,)), (ArrayRecord(_SPEC),))
    return WritePlan(tree, (WriteItem(0, _SPEC, boxes),), 0, 1, "")


class _Base:
    """A base of which the reads are counted. Element (i, j) is 10 i + j."""

    def __init__(self) -> None:
        self.read: list[Box] = []
        self.lacks = False
        self.error: Exception | None = None

    def __call__(self, boxes: Sequence[tuple[TreePath, ArraySpec, Box]], buffers: Sequence[HostArray]) -> list[bool]:
        if self.error is not None:
            raise self.error
        elements = np.add.outer(10 * np.arange(4), np.arange(6)).astype(np.float32)
        for (_, _, box), buffer in zip(boxes, buffers, strict=True):
            buffer[...] = elements[box.slices]
            self.read.append(box)
        return [not self.lacks] * len(boxes)


@pytest.fixture(params=["memory", "file"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> HeldWeights:
    """A copy that holds nothing yet."""
    return HeldWeights(in_host_memory if request.param == "memory" else in_files_of(str(tmp_path)))


_TOP, _BOTTOM = Box((0, 0), (2, 6)), Box((2, 0), (4, 6))
_LEFT = Box((0, 0), (4, 3))


def test_only_boxes_that_are_not_held_are_read(held: HeldWeights) -> None:
    base = _Base()
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    assert base.read == [_TOP]
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    assert base.read == [_TOP]
    held.replace(("w",), [np.zeros((2, 6), np.float32)])
    held.committed(2, _VERSIONS[2].save_id)
    held.hold(_plan(_TOP), _VERSIONS[2], base)
    assert base.read == [_TOP]
    elements = held.elements(("w",), _SPEC, Box((1, 2), (2, 5)))
    assert elements is not None and not elements.any()
    held.hold(_plan(_LEFT), _VERSIONS[2], base)  # another sharding
    assert base.read == [_TOP, _LEFT]
    elements = held.elements(("w",), _SPEC, Box((3, 1), (4, 3)))
    assert elements is not None and elements.tolist() == [[31, 32]]
    assert held.elements(("w",), _SPEC, Box((3, 1), (4, 4))) is None
    assert held.nbytes == 4 * 3 * 4


def test_everything_is_read_again_after_a_publish_that_failed(held: HeldWeights) -> None:
    base = _Base()
    held.hold(_plan(_TOP, _BOTTOM), _VERSIONS[1], base)
    held.replace(("w",), [np.zeros((2, 6), np.float32)] * 2)
    held.hold(_plan(_TOP, _BOTTOM), _VERSIONS[1], base)
    assert base.read == [_TOP, _BOTTOM] * 2
    elements = held.elements(("w",), _SPEC, Box((2, 0), (4, 1)))
    assert elements is not None and elements.tolist() == [[20], [30]]


def test_everything_is_read_if_another_version_was_committed(held: HeldWeights) -> None:
    base = _Base()
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    held.replace(("w",), [np.zeros((2, 6), np.float32)])
    held.committed(2, "0" * 16)
    held.hold(_plan(_TOP), _VERSIONS[2], base)
    assert base.read == [_TOP, _TOP]


def test_a_full_version_reads_nothing_and_is_held(held: HeldWeights) -> None:
    base = _Base()
    held.hold(_plan(_TOP), None, base)
    held.replace(("w",), [np.full((2, 6), 5, np.float32)])
    held.committed(1, _VERSIONS[1].save_id)
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    assert base.read == []
    elements = held.elements(("w",), _SPEC, _TOP)
    assert elements is not None and (elements == 5).all()


def test_arrays_that_the_version_lacks_are_not_held(held: HeldWeights) -> None:
    base = _Base()
    base.lacks = True
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    assert held.elements(("w",), _SPEC, _TOP) is None
    assert held.elements(("v",), _SPEC, _TOP) is None
    held.replace(("w",), [np.zeros((2, 6), np.float32)])
    held.committed(2, _VERSIONS[2].save_id)
    assert held.elements(("w",), _SPEC, _TOP) is not None
    assert held.elements(("w",), ArraySpec((4, 6), "int32"), _TOP) is None


def test_nothing_is_held_of_a_version_that_cannot_be_read(held: HeldWeights) -> None:
    base = _Base()
    held.hold(_plan(_TOP), _VERSIONS[1], base)
    base.error = CorruptCheckpointError("damaged")
    with pytest.raises(CorruptCheckpointError):
        held.hold(_plan(_TOP), _VERSIONS[2], base)
    assert held.nbytes == 0
    base.error = None
    held.hold(_plan(_TOP), _VERSIONS[2], base)
    assert base.read == [_TOP, _TOP]


@pytest.mark.parametrize("shape", [(), (0, 3), (700_000,), (3, 300_000)])
def test_pieces_are_the_bytes_in_row_major_order(shape: tuple[int, ...]) -> None:
    spec = ArraySpec(shape, "int32")
    elements = np.arange(spec.size, dtype=np.int32).reshape(shape)
    boxes = [Box.whole(shape)]
    if len(shape) == 2 and shape[0]:
        boxes = [Box((0, 150_000), (3, 300_000)), Box((0, 0), (3, 150_000))]
    tree = TreeMetadata(LEAF, (ArrayRecord(spec),))
    held = HeldWeights(in_host_memory)
    held.hold(WritePlan(tree, (WriteItem(0, spec, tuple(boxes)),), 0, 1, ""), None, _Base())
    held.replace((), [elements[box.slices] if shape else elements for box in boxes])
    pieces = held.pieces(())
    assert pieces is not None
    data = [bytes(piece) for piece in pieces]
    assert b"".join(data) == elements.tobytes()
    assert max(map(len, data)) <= 1 << 20


def test_an_array_that_is_not_held_as_a_whole_has_no_pieces() -> None:
    held = HeldWeights(in_host_memory)
    held.hold(_plan(_TOP), None, _Base())
    assert held.pieces(("w",)) is None
