"""Places to copy from and to, and what stands at them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from ckptcore.commit.location import open_directory
from ckptcore.context import Context
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of

_numbers = itertools.count()
_NAMES: Final = "place"


def new_place(scheme: str, directory: Path) -> str:
    """A URL at which nothing stands yet."""
    name = f"{_NAMES}-{next(_numbers)}"
    return f"file://{directory}/{name}/step" if scheme == "file" else f"memory://{directory.name}-{name}/step"


def store_at(location: str) -> StorageBackend:
    """The storage, opened at a location."""
    return open_directory(location, runtime_of(Context()).storages)


def objects_at(location: str) -> dict[str, bytes]:
    """Every object below a location."""
    store = store_at(location)
    return {key: store.get(key) for key in store.list()}
