"""Comparison of the files of two checkpointables, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import ConsistentRead, open_files
from ckptcore_tools.differences import Difference
from ckptcore_tools.elements import Distance

_FILE_SLICE_BYTES: Final = 1 << 24


class FilesComparison:
    """Comparison of the files of two checkpointables."""

    def __init__(self, a: str, b: str, context: Context) -> None:
        """Open both.

        Args:
            a, b: the locations of two checkpointables that are stored as files.
            context: options.

        Raises:
            CheckpointError: see `ckptcore.metadata`.
        """
        self._a, self._b = (ConsistentRead(location, context, open_files).open() for location in (a, b))

    @property
    def files(self) -> int:
        """Number of files that both have."""
        return sum(key in self._b.objects for key in self._a.objects)

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(self._a.objects[key].size for key in self._comparable())

    def structure_differences(self) -> Iterator[Difference]:
        """Yield files that only one side has, and files of different sizes."""
        for key, record in self._a.objects.items():
            other = self._b.objects.get(key)
            if other is None:
                yield Difference(key, (key,), "only_in_a", a="file")
            elif other.size != record.size:
                yield Difference(key, (key,), "size", record.size, other.size)
        for key in self._b.objects:
            if key not in self._a.objects:
                yield Difference(key, (key,), "only_in_b", b="file")

    def content_differences(self, add_progress: Callable[[int], None]) -> Iterator[Difference]:
        """Yield files of equal size with different bytes.

        Args:
            add_progress: called with the bytes of `a` that were compared.

        Raises:
            CorruptCheckpointError: if a file is damaged.
        """
        for key in self._comparable():
            differing, nbytes = 0, self._a.objects[key].size
            for start in range(0, nbytes, _FILE_SLICE_BYTES):
                stop = min(start + _FILE_SLICE_BYTES, nbytes)
                differing += int(
                    np.count_nonzero(_bytes(self._a, key, start, stop) != _bytes(self._b, key, start, stop))
                )
                add_progress(stop - start)
            if differing:
                yield Difference(key, (key,), "bytes", elements=nbytes, distance=Distance(differing, None))

    def _comparable(self) -> list[str]:
        theirs = self._b.objects
        return [key for key, own in self._a.objects.items() if key in theirs and theirs[key].size == own.size]


def _bytes(opened: Checkpoint, key: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(opened.store.get(key, start, stop), np.uint8)
    if data.size != stop - start:
        raise CorruptCheckpointError(
            f"{opened.location.display}: {key} ends at byte {start + data.size}, expected at least {stop} bytes",
            key=key, start=start + data.size, stop=stop,
        )  # fmt: skip
    return data
