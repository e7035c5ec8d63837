"""Files of hand-made databases, and a limit of memory for reading them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from ckptcore_orbax.ocdbt.cursor import encode_varints


def put(directory: Path, key: str, data: bytes) -> None:
    """Write a file, and make its directories."""
    path = directory / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def encode_column(*numbers: int) -> bytes:
    """Return a column of numbers of a node."""
    return encode_varints(np.array(numbers, np.uint64))


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Fail if more bytes are allocated at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak} bytes were taken at most"
