"""Holder: the record of the process that has a lock."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from typing import Final

from ckptcore.model.tree import JSON

__all__ = ["LONGEST_LEASE_SECONDS", "Holder", "check_lease_seconds", "decode_holder", "new_holder"]

LONGEST_LEASE_SECONDS: Final = 3600.0
"""The longest lease. A hostile record must not make anyone wait for years."""

_FORMAT: Final = "ckptcore hold"
_MOST_BYTES: Final = 4096
_MOST_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Holder:
    """The record of the process that has a lock.

    Attributes:
        hold_id: 16 hexadecimal digits that no other lock has.
        host: the name of the machine.
        pid: the process on that machine.
        since: when the lock was taken, ISO 8601 in UTC by the clock of that machine; for people to read only.
        lease_seconds: the lease expires so long after the last renewal; None for a locked directory.
        renewals: the number of renewals. It makes the bytes, and so the tag, differ.
        released: True if the lease was released or broken.
    """

    hold_id: str
    host: str
    pid: int
    since: str
    lease_seconds: float | None = None
    renewals: int = 0
    released: bool = False

    def encode(self) -> bytes:
        """Return the record as JSON."""
        document: dict[str, JSON] = {"format": _FORMAT, "version": 1, **asdict(self)}
        return json.dumps(document).encode() + b"\n"

    @property
    def is_here(self) -> bool:
        """True if this process is the holder, which is therefore alive."""
        return (self.host, self.pid) == (platform.node(), os.getpid())

    def describe(self) -> str:
        """Return the holder in words, for an error."""
        whose = "this process, " if self.is_here else ""
        return f"{whose}process {self.pid} on {self.host or 'a machine without a name'} since {self.since}"


def new_holder(lease_seconds: float | None = None) -> Holder:
    """Return this process as the holder of a new lock."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Holder(_new_id(), platform.node(), os.getpid(), now, lease_seconds)


def _new_id() -> str:
    return os.urandom(8).hex()


def decode_holder(data: bytes) -> Holder | None:
    """Parse a record, which may be hostile; None if it is invalid."""
    if len(data) > _MOST_BYTES:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return None
    try:
        holder = Holder(**{field.name: document[field.name] for field in fields(Holder)})
    except KeyError:
        return None
    return holder if _is_possible(holder) else None


def _is_possible(holder: Holder) -> bool:
    # Errors print the texts: they must not steer a terminal.
    return (
        all(_is_text(text) for text in (holder.hold_id, holder.host, holder.since))
        and all(type(number) is int and 0 <= number < 1 << 63 for number in (holder.pid, holder.renewals))
        and (holder.lease_seconds is None or _is_lease(holder.lease_seconds))
        and type(holder.released) is bool
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


def _is_lease(value: object) -> bool:
    # Excludes NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_LEASE_SECONDS


def check_lease_seconds(seconds: float) -> float:
    """Return the seconds, if a lease can be that long.

    Raises:
        ValueError
    """
    if not _is_lease(seconds):
        raise ValueError(
            f"lease_seconds={seconds!r}: expected more than 0 and at most {LONGEST_LEASE_SECONDS:.0f} seconds"
        )
    return float(seconds)
