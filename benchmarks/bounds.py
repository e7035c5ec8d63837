"""Bounds: verified work of ckptcore in a few lines of Python without it, for rows in which another library is faster.

The programs read the root as an open checkpoint does, hash what they return with the same blocks, and create the same
results. They check nothing else: no hostile sizes, no replaced checkpoint, no links, no error that names an array.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from xxhash import xxh3_64_intdigest

import ckptcore
from benchmarks.alternating import Case, Contender, compare, huge
from benchmarks.dcp_metadata import write_single_chunks
from benchmarks.local import Clearing, load_and_copy
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.slices import SETTLED_SECONDS, open_and_read, open_with_safetensors
from benchmarks.states import small_state

_FAST = ckptcore.Context(durability="none")
_BLOCK = 1 << 16
"""Bytes of a block of checkpoints of at most 1 GiB, and of a slice."""
_WIDTH = 1024


def rows(setting: Setting) -> Iterator[Row]:
    """Measure slices, a load and a save of small arrays, the metadata of a DCP checkpoint, and fresh memory."""
    for case in (*_slices(setting), _small(setting), _saved(setting), _metadata(setting), _fresh_memory(setting)):
        yield from compare(case, setting.rounds)


def _slices(setting: Setting) -> Iterator[Case]:
    path, arrays = setting.directory / "slices", setting.count(48, least=8)
    state = {f"layers.{number}.weight": np.full((_WIDTH, _WIDTH), number, np.float32) for number in range(arrays)}
    ckptcore.save(path, state, context=_FAST)
    time.sleep(SETTLED_SECONDS)
    read = _Verified(path)
    wanted = [(name, 16 * number) for number, name in enumerate(state)]
    for some in (wanted[:1], wanted):
        yield Case(
            f"bounds: open, {len(some)} slices",
            [
                Contender("ckptcore.open", open_and_read(path, _FAST, some)),
                Contender("safe_open, get_slice", partial(open_with_safetensors, path, some)),
                Contender("plain Python, verified", partial(read.slices, some)),
            ],
        )


def _small(setting: Setting) -> Case:
    path, state = setting.directory / "small", small_state(setting.count(1000))
    ckptcore.save(path, state, context=_FAST)
    file, read = setting.directory / "small.safetensors", _Verified(path)
    safetensors.torch.save_file(state, file)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return Case(
        f"bounds: load {len(state)} small",
        [
            Contender("ckptcore.load", lambda: ckptcore.load(path, target)),
            Contender("load_file, pages copied", lambda: load_and_copy(file)),
            Contender("plain Python, verified", read.tensors),
        ],
    )


def _saved(setting: Setting) -> Case:
    state = small_state(setting.count(1000))
    ours, theirs, plain = (setting.directory / name for name in ("saved", "saved.safetensors", "saved-plain"))
    clear = Clearing(ours, theirs, plain)
    return Case(
        f"bounds: save {len(state)} small",
        [
            Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FAST), clear),
            Contender("save_file", lambda: safetensors.torch.save_file(state, theirs), clear),
            Contender("plain Python, with checksums", lambda: _save_plainly(plain, state), clear),
        ],
        writes=True,
    )


def _save_plainly(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file, and a root with names, shapes and checksums, into a directory that is then renamed."""
    header: dict[str, Any] = {}
    parts, position = [b"", b""], 0
    for name, tensor in state.items():
        array = tensor.numpy()
        bounds = [position, position + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": bounds}
        parts.append(array.tobytes())
        position = bounds[1]
    parts[1] = json.dumps(header, separators=(",", ":")).encode()
    parts[0] = len(parts[1]).to_bytes(8, "little")
    data = b"".join(parts)
    sums = [xxh3_64_intdigest(data[start : start + _BLOCK]) for start in range(0, len(data), _BLOCK)]
    shapes = [entry["shape"] for entry in header.values()]
    root = json.dumps({"names": list(state), "shapes": shapes, "checksums": sums}).encode()
    hidden = path.with_name(f".{path.name}")
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(data)
    (hidden / "checkpoint.json").write_bytes(root)
    hidden.rename(path)


def _metadata(setting: Setting) -> Case:
    path = setting.directory / "single"
    write_single_chunks(path, setting.count(100_000, least=1000))
    return Case(
        "bounds: metadata of DCP",
        [
            Contender("ckptcore.metadata", lambda: ckptcore.metadata(path)),
            Contender("FileSystemReader.read_metadata", lambda: FileSystemReader(path).read_metadata()),
            Contender("plain Python", partial(_names_of_pickle, path / ".metadata")),
        ],
    )


def _fresh_memory(setting: Setting) -> Case:
    """Fault in memory as a load into new arrays does, without reading anything.

    The same number of faults of huge pages took between 0.03 and 2.8 s of the system per 256 MiB, depending on the
    moment, and small pages 0.14 to 0.23 s.
    """
    nbytes = setting.count(1 << 28, least=1 << 22)
    return Case(
        "bounds: fresh memory",
        [
            Contender("huge pages, as ckptcore.load", lambda: _touch(huge(nbytes))),
            Contender("small pages, as load_file", lambda: _touch(_small_pages(nbytes))),
        ],
    )


def _small_pages(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _touch(pages: memoryview) -> None:
    pages[:: mmap.PAGESIZE] = bytes(len(range(0, len(pages), mmap.PAGESIZE)))


class _Verified:
    """The tables of a checkpoint with one file of safetensors, read before anything is measured."""

    def __init__(self, path: Path) -> None:
        self._root, self._file = path / "checkpoint.json", path / "model.safetensors"
        self._known, data = self._root.read_bytes(), self._file.read_bytes()
        self._sums = [xxh3_64_intdigest(data[start : start + _BLOCK]) for start in range(0, len(data), _BLOCK)]
        self._begin = 8 + int.from_bytes(data[:8], "little")
        self._header = json.loads(data[8 : self._begin])
        self._scratch = memoryview(bytearray(2 * _BLOCK))

    def slices(self, wanted: list[tuple[str, int]]) -> None:
        """Create 16 rows of each array, from whole blocks that are verified before they are copied."""
        self._expect_root()
        descriptor = os.open(self._file, os.O_RDONLY)
        for name, row in wanted:
            start = self._begin + self._header[name]["data_offsets"][0] + row * 4 * _WIDTH
            result = np.empty((16, _WIDTH), np.float32)
            first, stop = start // _BLOCK * _BLOCK, -(-(start + result.nbytes) // _BLOCK) * _BLOCK
            os.fstat(descriptor)
            blocks = self._scratch[: os.preadv(descriptor, [self._scratch[: stop - first]], first)]
            self._verify(blocks, first // _BLOCK)
            result.data.cast("B")[:] = blocks[start - first : start - first + result.nbytes]
        os.close(descriptor)
        self._expect_root()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, from one verified read."""
        json.loads(self._root.read_bytes())
        data = memoryview(self._file.read_bytes())
        self._verify(data, 0)
        results = {}
        for name, entry in self._header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                array = np.empty(entry["shape"], np.float32)
                array.data.cast("B")[:] = data[self._begin + start : self._begin + stop]
                results[name] = torch.from_numpy(array)
        self._expect_root()
        return results

    def _expect_root(self) -> None:
        assert self._root.read_bytes() == self._known

    def _verify(self, data: memoryview, first: int) -> None:
        for number, start in enumerate(range(0, len(data), _BLOCK), first):
            assert xxh3_64_intdigest(data[start : start + _BLOCK]) == self._sums[number]


def _names_of_pickle(file: Path) -> dict[str, Any]:
    """Return the nested dict of the tensors that a regular expression finds in the pickle."""
    tree: dict[str, Any] = {}
    for name in re.findall(rb"\x8c.(model\.layers\.\d+\.weight)\x94", file.read_bytes(), re.DOTALL):
        *steps, last = name.decode().split(".")
        branch = tree
        for step in steps:
            branch = branch.setdefault(step, {})
        branch[last] = ckptcore.AbstractArray((8, 64), "float32", "torch")
    return tree
