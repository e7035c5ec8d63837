"""A load strategy that reads through a cache directory."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ckptcore.model import Box, HostArray, ReadPlan
from ckptcore.protocols import ReadBoxes, StagedLoad

T = TypeVar("T")


class CacheDirectory:
    """A cache that reads each box of a save once from its checkpoint, and later from a file in a directory.

    Attributes:
        directory: the directory of the files.
        hits: the number of boxes that were read from the cache.
    """

    def __init__(self, directory: Path) -> None:
        """Use a directory, which other processes may use, too."""
        self.directory = directory
        self.hits = 0

    def run(self, load: StagedLoad[T]) -> T:
        """See `ckptcore.protocols.ReadStrategy`."""
        return load.run_here(self.read)

    def read(
        self, content_id: str | None, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes
    ) -> Iterator[int]:
        """See `ckptcore.protocols.ReadThrough`."""
        if content_id is None:  # not cached, because other software may replace the file
            yield from read_stored(plan, buffers)
            return
        missing = []
        for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
            try:
                data = self._file(content_id, item.leaf, item.box).read_bytes()
            except FileNotFoundError:
                missing.append(number)
                continue
            buffer.reshape(-1).view("u1")[:] = memoryview(data)
            self.hits += 1
            yield number
        rest = ReadPlan(plan.tree, tuple(plan.items[number] for number in missing))
        for position in read_stored(rest, [buffers[number] for number in missing]):
            number = missing[position]
            self._keep(self._file(content_id, plan.items[number].leaf, plan.items[number].box), buffers[number])
            yield number

    def _file(self, content_id: str, leaf: int, box: Box) -> Path:
        key = hashlib.sha256(repr((content_id, leaf, box.start, box.stop)).encode()).hexdigest()
        return self.directory / key

    def _keep(self, file: Path, buffer: HostArray) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(f".{uuid.uuid4().hex}")
        half.write_bytes(buffer.tobytes())
        os.replace(half, file)
