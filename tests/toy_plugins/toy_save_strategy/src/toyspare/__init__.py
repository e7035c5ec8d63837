"""A save strategy that writes a second copy of every object to another storage before the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import ckptcore
from ckptcore.protocols import SaveCommit, StorageBackend

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SpareCopies(ckptcore.PlainSave):
    """A strategy that commits a save only after all its objects are also in a second storage.

    A failed save leaves no copies.

    Attributes:
        storage: the second storage. Copies have the same keys as in the checkpoint.
    """

    storage: StorageBackend

    def begin(self, save: Any) -> SaveCommit:
        """See `ckptcore.protocols.SaveStrategy`."""
        return _SpareCommit(super().begin(save), self.storage)


class _SpareCommit:
    """A commit that makes the copies before the commit of a plain save."""

    commit_meaning = ""

    def __init__(self, plain: SaveCommit, second: StorageBackend) -> None:
        self._plain = plain
        self._second = second
        self._copied: list[str] = []

    @property
    def meaning(self) -> str:
        return self._plain.meaning

    @property
    def store(self) -> StorageBackend:
        return self._plain.store

    def claim(self) -> None:
        self._plain.claim()

    def commit(self, payloads: Sequence[object]) -> None:
        if payloads:  # only the leader gets payloads, after all ranks have written
            for key in self.store.list():
                if not key.startswith("checkpoint."):  # skip the root, which is still a claim
                    self._copied.append(key)
                    self._copy(key, self.store.size(key))
        self._plain.commit(payloads)

    def _copy(self, key: str, size: int) -> None:
        writer = self._second.open_writer(key, size)
        try:
            for start in range(0, size, _PIECE_BYTES):
                writer.write_at(start, self.store.get(key, start, min(start + _PIECE_BYTES, size)))
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def settle(self, error: Exception | None) -> None:
        self._plain.settle(error)

    def abort(self) -> None:
        self._plain.abort()
        self._second.delete(self._copied)
