"""Amounts as people read them."""

from __future__ import annotations

__all__ = ["count", "size"]


def size(nbytes: int) -> str:
    """Bytes in decimal units, with three digits: ``999 B``, ``1.02 kB``, ``90.9 MB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        amount /= 1000
        if amount < 999.5:
            break
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 array``, ``1,200 arrays``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
