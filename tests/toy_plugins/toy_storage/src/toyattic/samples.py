"""Samples of the toy storage for the conformance matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptcore_testing import StorageSample


@contextmanager
def open_directory(directory: Path) -> Iterator[str]:
    """Yield a location in a new database."""
    yield f"toy://{directory / 'attic.sqlite'}/run/checkpoint"


ATTIC = StorageSample(scheme="toy", open=open_directory)
