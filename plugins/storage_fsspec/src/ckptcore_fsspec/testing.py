"""The sample that puts fsspec into the matrix of all storages: its memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ckptcore_testing import StorageSample

__all__ = ["SAMPLE"]


@contextmanager
def _open_memory(directory: Path) -> Iterator[str]:
    yield f"fsspec+memory://{uuid.uuid4().hex}/checkpoint"


SAMPLE: Final = StorageSample(
    scheme="fsspec+memory",
    open=_open_memory,
    costly=True,  # tests of its own try it, so that the first framework is enough in the quick ones
    without_conditions="marker",
)
"""The memory of this process, through fsspec: a storage without conditional puts."""
