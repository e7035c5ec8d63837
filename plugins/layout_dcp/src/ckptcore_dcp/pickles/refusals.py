"""Errors about a pickle: they say where in the object, what was expected and what to do."""

from __future__ import annotations

from ckptcore.errors import CorruptCheckpointError

__all__ = ["cut_short", "malformed"]


def malformed(key: str, position: int, found: str) -> CorruptCheckpointError:
    """The error for what no pickle of data holds, near ``position`` (bytes) of the bytes that were given."""
    return CorruptCheckpointError(
        f"{key} holds a pickle that cannot be read, near byte {position}: {found}; the file is damaged or holds "
        "something else than data; restore it or save the checkpoint again",
        key=key,
        start=position,
    )


def cut_short(key: str, position: int, stop: int) -> CorruptCheckpointError:
    """The error for a pickle of which bytes ``position`` to ``stop`` are needed and not all there.

    Its ``stop`` is beyond the bytes that were given: who reads only a part of an object can tell that more of it is
    needed.
    """
    return CorruptCheckpointError(
        f"{key} holds a pickle that ends too early: bytes {position} to {stop} were expected and are not there; the "
        "file is cut short or damaged; restore it or save the checkpoint again",
        key=key,
        start=position,
        stop=stop,
    )
