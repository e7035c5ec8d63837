"""Writes and reads need little memory in addition to the arrays, for all shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

MIB = 1 << 20

# Runs in a new process, so that the peak of its memory can be measured.
PROGRAM = """
import resource
import sys
import numpy as np
from ckptcore.io.memory import allocate
from ckptcore.io.reader import ObjectReader
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.threads import IOThreads
from ckptcore.model import ArraySegment, ArraySpec, Box, ObjectRecord, ChunkRead
from ckptcore.protocols import StorageCapabilities

SIZE = 192 << 20


class Writer:
    def write_at(self, offset, data):
        pass

    def finish(self):
        pass


class Reader:
    def get_into(self, ranges):
        for start, buffer in ranges:
            np.frombuffer(buffer, np.uint8)[...] = 3


class Storage:
    capabilities = StorageCapabilities()

    def open_writer(self, key, size=None):
        return Writer()

    def open_reader(self, key):
        return Reader()


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def write(array):
    box = Box.whole(array.shape)
    recorder = ObjectRecorder(Storage(), IOThreads(4))
    recorder.write("x", [ArraySegment(box, array.itemsize, lambda: [(box, array)], lambda: None)])
    assert recorder.objects[0].size == SIZE


def read(columns):
    rows, width = SIZE // 8192, 8192 // columns
    targets = []
    for number in range(columns):
        box = Box((0, number * width), (rows, (number + 1) * width))
        targets.append((number, box, allocate(ArraySpec(box.shape, "uint8"))))
    reader = ObjectReader(Storage(), {"x": ObjectRecord("x", SIZE)}, IOThreads(4))
    tile = ChunkRead("x", 0, Box.whole((rows, 8192)), 1, tuple(targets))
    assert sorted(reader.read_chunks([tile])) == list(range(columns))
    assert all((array == 3).all() for _, _, array in targets)


what = sys.argv[1]
if what == "read columns":
    before = peak() + SIZE
    read(4)
else:
    array = allocate(ArraySpec((SIZE // 4096, 1024), "float32"))
    array[...] = 1
    if what == "write big endian":
        array = array.view(">f4")
    elif what == "write transposed":
        array = array.T
    before = peak()
    write(array)
print(peak() - before)
"""


@pytest.mark.parametrize("what", ["write", "write big endian", "write transposed", "read columns"])
def test_the_peak_of_memory_is_small(what: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 48 * MIB
