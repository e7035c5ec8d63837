"""A directory as a read store, to pass to a layout's inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptcore.errors import ObjectNotFoundError
from ckptcore.model import ChunkRead
from ckptcore.protocols import StorageAddress


@dataclass
class Directory:
    """A directory as a `ReadStore` that counts requests. It does not read chunks."""

    path: Path
    gets: int = 0
    address: StorageAddress | None = None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.gets += 1
        try:
            with (self.path / key).open("rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else stop - start)
        except FileNotFoundError as error:
            raise ObjectNotFoundError(key) from error

    def size(self, key: str) -> int:
        return (self.path / key).stat().st_size

    def list_names(self, prefix: str = "") -> Sequence[str]:
        return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in (self.path / prefix).iterdir())

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        raise NotImplementedError
