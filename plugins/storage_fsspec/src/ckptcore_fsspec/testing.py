"""Storage sample of fsspec's memory file system for the matrix of all storages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ckptcore_testing import StorageSample


@contextmanager
def _open_memory(directory: Path) -> Iterator[str]:
    yield f"fsspec+memory://{uuid.uuid4().hex}/checkpoint"


SAMPLE: Final = StorageSample(
    scheme="fsspec+memory",
    open=_open_memory,
    costly=True,  # fsspec has its own tests, so the quick tests use only the first framework
    without_conditions="marker",
)
"""The memory file system of fsspec, which has no conditional puts."""
