"""The coordinator of a job that is one process."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.errors import PluginError

__all__ = ["SingleProcess"]


class SingleProcess:
    """Agrees with itself at once."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    def gather(self, key: str, payload: bytes) -> Sequence[bytes]:
        """The payload, as the only one."""
        return [payload]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """The payload itself."""
        if payload is None:
            raise PluginError(f"the only process is the leader, and broadcast {key!r} without a payload")
        return payload
