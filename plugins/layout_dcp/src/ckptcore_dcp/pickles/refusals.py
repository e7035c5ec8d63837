"""Errors about pickles, with the position, the problem and the remedy."""

from __future__ import annotations

from ckptcore.errors import CorruptCheckpointError

__all__ = ["cut_short", "malformed"]


def malformed(key: str, position: int, found: str) -> CorruptCheckpointError:
    """Return the error for invalid content near byte ``position`` of the data."""
    return CorruptCheckpointError(
        f"{key} contains a pickle that cannot be read, near byte {position}: {found}; the file is damaged or contains "
        "something other than data; restore it or save the checkpoint again",
        key=key,
        start=position,
    )


def cut_short(key: str, position: int, stop: int) -> CorruptCheckpointError:
    """Return the error for a pickle that lacks some of bytes ``position`` to ``stop``.

    Its ``stop`` is beyond the data, so a caller that passed only a part of an object can read more.
    """
    return CorruptCheckpointError(
        f"{key} contains a pickle that ends too early: bytes {position} to {stop} are missing; the "
        "file is cut short or damaged; restore it or save the checkpoint again",
        key=key,
        start=position,
        stop=stop,
    )
