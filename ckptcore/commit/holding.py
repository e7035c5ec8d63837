"""Holds: what every hold can do, and what it says about its holder."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Final, Literal, Protocol, Self, TypeAlias

from ckptcore.model.tree import JSON

__all__ = [
    "ADMINISTRATION",
    "LONGEST_LEASE_SECONDS",
    "Hold",
    "Holder",
    "HoldsOfSteps",
    "Purpose",
    "check_lease_seconds",
    "decode_holder",
    "new_holder",
]

ADMINISTRATION: Final = ".ckptcore"
"""The directory beside the steps in which holds stand."""

Purpose: TypeAlias = Literal["pins", "deleting"]
"""Why a step is held, and the directory in which such holds stand: a reader needs it; it is being deleted."""


class Hold(Protocol):
    """Something that this process holds until it is closed, or dies. Any thread.

    A child that was forked holds nothing of what its parent holds: there `check` raises and `close` does nothing.
    """

    def check(self) -> None:
        """Do nothing while this is held; at most one small request to the storage, mostly.

        Raises:
            SaveLostError: it was taken over, removed or closed, or belongs to the parent of this process. For ever.
            StorageError: the storage failed, so it cannot be known.
        """
        ...

    def close(self) -> None:
        """Let it go; again is no error. What the storage fails to let go is logged, and loses its force by itself."""
        ...

    def __enter__(self) -> Self:
        """Itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let it go."""
        ...


class HoldsOfSteps(Protocol):
    """How steps are held in one kind of storage. Any thread; kept, because it may remember what it saw."""

    def take(self, purpose: Purpose, name: str) -> Hold:
        """Hold a step; others see it from when this returns. Many may hold one step.

        Raises:
            StorageError
        """
        ...

    def living(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """The steps, or of these the one called `name`, that the living hold; removes what it meets of the dead.

        Raises:
            StorageError
        """
        ...


LONGEST_LEASE_SECONDS: Final = 3600.0
"""The longest lease. A hostile record must not make anyone wait for years."""

_FORMAT: Final = "ckptcore hold"
_MOST_BYTES: Final = 4096
_MOST_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds something.

    Attributes:
        hold_id: 16 hexadecimal digits that no other hold has.
        host: the name of the holder's machine.
        pid: the holder's process there.
        since: from when on, ISO 8601 in UTC by the clock of that machine; only for people to read.
        lease_seconds: after how long without a renewal it is dead; None where a lock tells.
        renewals: how often it was renewed. It makes the bytes, and so the tag, differ each time.
        released: whether it was let go, or taken from a holder that was dead.
    """

    hold_id: str
    host: str
    pid: int
    since: str
    lease_seconds: float | None = None
    renewals: int = 0
    released: bool = False

    def encode(self) -> bytes:
        """As JSON."""
        document: dict[str, JSON] = {"format": _FORMAT, "version": 1, **asdict(self)}
        return json.dumps(document).encode() + b"\n"

    @property
    def is_here(self) -> bool:
        """True if this process is the holder, which is therefore alive."""
        return (self.host, self.pid) == (platform.node(), os.getpid())

    def describe(self) -> str:
        """In words, for an error."""
        whose = "this process, " if self.is_here else ""
        return f"{whose}process {self.pid} on {self.host or 'a machine without a name'} since {self.since}"


def new_holder(lease_seconds: float | None = None) -> Holder:
    """This process, as the holder of something new."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Holder(_new_id(), platform.node(), os.getpid(), now, lease_seconds)


def _new_id() -> str:
    return os.urandom(8).hex()


def decode_holder(data: bytes) -> Holder | None:
    """The holder that these bytes name; None where they name none that can be. They may be hostile."""
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


def check_lease_seconds(seconds: float) -> float:
    """The seconds themselves, if a lease can be that long.

    Raises:
        ValueError
    """
    if not _is_lease(seconds):
        raise ValueError(
            f"lease_seconds={seconds!r}: expected more than 0 and at most {LONGEST_LEASE_SECONDS:.0f} seconds"
        )
    return float(seconds)


def _is_possible(holder: Holder) -> bool:
    # An error prints the texts: they must not steer a terminal.
    return (
        all(_is_text(text) for text in (holder.hold_id, holder.host, holder.since))
        and all(type(number) is int and 0 <= number < 1 << 63 for number in (holder.pid, holder.renewals))
        and (holder.lease_seconds is None or _is_lease(holder.lease_seconds))
        and type(holder.released) is bool
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


def _is_lease(value: object) -> bool:
    # NaN is not either.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_LEASE_SECONDS
