"""Holds on bases: an update keeps its bases from being deleted until it has committed.

An update pins a base, waits while a deletion of it is announced, checks that the base exists, and commits. A deletion
announces itself, looks for pins, then for checkpoints that refer to the base, and only then removes it. So at least one
of two concurrent operations sees the other (see `ckptcore.commit.steps`). On storage with real directories the
announcement is a claim next to the base, like that of a save: the next save removes it if the process is killed. On
other storage it is a lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from ckptcore.commit.clocks import SYSTEM_CLOCK
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.holding import Hold
from ckptcore.commit.location import Location
from ckptcore.commit.rename import hold_beside, is_claimed_beside
from ckptcore.commit.steps import StepHolds
from ckptcore.errors import CheckpointReferredError, SaveLostError, StorageError
from ckptcore.protocols import AtomicDirectories

__all__ = ["announced_deletion", "pinned_bases"]

_CHANGE_SECONDS: Final = 180.0
"""Seconds that an update waits for a save or a deletion that changes its base."""

_PIN_SECONDS: Final = 90.0
"""Seconds that a deletion waits for a leased pin: longer than the lease of a killed process takes to expire."""

_FIRST_POLL_SECONDS: Final = 0.01
_LAST_POLL_SECONDS: Final = 2.0


@contextmanager
def pinned_bases(bases: Sequence[Location], conditions: Conditions) -> Iterator[None]:
    """Keep the bases of an update from being deleted. A base in a directory that cannot be written is not kept.

    Args:
        bases: the locations; whether each base exists is to be checked inside the block.
        conditions: of the Context.

    Raises:
        CheckpointNotFoundError, SaveLostError: one is being deleted or replaced.
    """
    with ExitStack() as held:
        for base in bases:
            holds = StepHolds(conditions.open(base).parent, base.display)
            try:
                for name in (base.name, _pin_name(base)):
                    held.enter_context(holds.pin(name))
                _await_change(base)
            except StorageError:
                continue  # only the check before the commit protects it
        yield


def _await_change(base: Location) -> None:
    """Wait while a save to a base or a deletion of it is running. Without real directories, pins wait for leases."""
    if not isinstance(base.parent, AtomicDirectories):
        return
    deadline = SYSTEM_CLOCK.now() + _CHANGE_SECONDS
    pause = _FIRST_POLL_SECONDS
    while is_claimed_beside(base, base.parent):
        if SYSTEM_CLOCK.now() >= deadline:
            raise SaveLostError(
                f"the base {base.display} is being deleted or replaced (waited {_CHANGE_SECONDS:.0f} seconds); save "
                "with another base, or save all arrays. Nothing was written"
            )
        SYSTEM_CLOCK.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)


@contextmanager
def announced_deletion(location: Location, conditions: Conditions) -> Iterator[None]:
    """Announce the deletion of a checkpoint, so that later updates of it wait. The checkpoint stays visible.

    Args:
        location: of the checkpoint.
        conditions: of the Context.

    Raises:
        CheckpointReferredError: an update that refers to the checkpoint is being saved.
        StorageError: the storage failed, or the directory around the checkpoint cannot be written.
    """
    holds = StepHolds(conditions.open(location).parent, location.display)
    if isinstance(location.parent, AtomicDirectories):
        with hold_beside(location, location.parent):
            if holds.is_pinned(_pin_name(location)):
                raise _being_referred(location)
            yield
    else:
        with _intend(holds, location):
            yield


def _intend(holds: StepHolds, location: Location) -> Hold:
    deadline = SYSTEM_CLOCK.now() + _PIN_SECONDS
    while (intent := holds.intend_deletion(_pin_name(location))) is None:
        if SYSTEM_CLOCK.now() >= deadline or holds.is_pinned_here(_pin_name(location)):
            raise _being_referred(location)
        SYSTEM_CLOCK.sleep(_LAST_POLL_SECONDS)
    return intent


def _being_referred(location: Location) -> CheckpointReferredError:
    return CheckpointReferredError(
        f"an update that refers to {location.display} is being saved: wait until it is committed, and delete it first. "
        "Nothing was deleted"
    )


def _pin_name(base: Location) -> str:
    """Return the name of the pin of an update. Differs from a reader's pin, which `ckptcore.delete` ignores."""
    return f"{base.name}.base"
