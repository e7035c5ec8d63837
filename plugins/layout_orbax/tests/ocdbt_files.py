"""Writers of database files for tests, and a limit of the memory that their readers may use."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from ckptcore_orbax.ocdbt.cursor import encode_varints


def put(directory: Path, key: str, data: bytes) -> None:
    """Write a file, and create its directories."""
    path = directory / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def encode_column(*numbers: int) -> bytes:
    """Return the encoded column of a node."""
    return encode_varints(np.array(numbers, np.uint64))


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Raise an AssertionError if the peak of traced memory reaches this many bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"the peak of memory was {peak} bytes"
