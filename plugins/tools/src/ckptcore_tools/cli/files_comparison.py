"""Two directories of files that an object wrote, compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptcore.errors import CorruptCheckpointError
from ckptcore.loading.opened import Opened
from ckptcore.loading.opening import open_files
from ckptcore.loading.tries import Tries
from ckptcore_tools.cli.documents import DifferenceDocument
from ckptcore_tools.cli.options import command_context

__all__ = ["FilesComparison"]

_PIECE_BYTES: Final = 1 << 24


class FilesComparison:
    """What the files of two checkpointables have in common, and how they differ."""

    def __init__(self, a: str, b: str) -> None:
        """Open both.

        Args:
            a, b: the locations of two checkpointables that are stored as files.

        Raises:
            What `ckptcore.metadata` does.
        """
        self._a, self._b = (Tries(place, command_context(), open_files).open() for place in (a, b))

    @property
    def files(self) -> int:
        """How many files both have."""
        return sum(key in self._b.objects for key in self._a.objects)

    @property
    def nbytes(self) -> int:
        """How many bytes of `a` `of_contents` compares."""
        return sum(self._a.objects[key].size for key in self._comparable())

    def of_names(self) -> Iterator[DifferenceDocument]:
        """Files that only one has, and those of another size."""
        for key, record in self._a.objects.items():
            other = self._b.objects.get(key)
            if other is None:
                yield {"path": key, "keys": [key], "kind": "only_in_a", "a": "file", "b": None}
            elif other.size != record.size:
                yield {"path": key, "keys": [key], "kind": "size", "a": record.size, "b": other.size}
        for key in self._b.objects:
            if key not in self._a.objects:
                yield {"path": key, "keys": [key], "kind": "only_in_b", "a": None, "b": "file"}

    def of_contents(self, progress: Callable[[int, int], None]) -> Iterator[DifferenceDocument]:
        """Files of one size with other bytes.

        Args:
            progress: called with bytes of `a` compared and bytes in all.

        Raises:
            CorruptCheckpointError: if a file is not what was written.
        """
        done, total = 0, self.nbytes
        for key in self._comparable():
            differing, nbytes = 0, self._a.objects[key].size
            for start in range(0, nbytes, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, nbytes)
                differing += int(
                    np.count_nonzero(_bytes(self._a, key, start, stop) != _bytes(self._b, key, start, stop))
                )
                done += stop - start
                progress(done, total)
            if differing:
                yield {
                    "path": key,
                    "keys": [key],
                    "kind": "bytes",
                    "a": None,
                    "b": None,
                    "differing": differing,
                    "elements": nbytes,
                }

    def _comparable(self) -> list[str]:
        theirs = self._b.objects
        return [key for key, own in self._a.objects.items() if key in theirs and theirs[key].size == own.size]


def _bytes(opened: Opened, key: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(opened.store.get(key, start, stop), np.uint8)
    if data.size != stop - start:
        raise CorruptCheckpointError(
            f"{opened.location.display}: {key} ends at byte {start + data.size}, where {stop} are expected",
            key=key, start=start + data.size, stop=stop,
        )  # fmt: skip
    return data
