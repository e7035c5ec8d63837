"""Destinations: where a checkpoint may be written that is made of another one, which stays as it is."""

from __future__ import annotations

from ckptcore.commit.location import Location
from ckptcore.commit.root import Root
from ckptcore.commit.target import read_root
from ckptcore.errors import InvalidLocationError
from ckptcore.loading.checkpoint import Checkpoint

__all__ = ["refuse_destination", "refuse_further"]


def refuse_destination(source: Location, destination: Location) -> None:
    """Refuse a place where what is replaced is the source, or has it or a part of it inside.

    A place inside the source, beside what it has, is none of these.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if destination.identity == source.identity:
        raise InvalidLocationError(
            f"{source.display} cannot be written into itself; give another location, and delete the source then"
        )
    if source.lies_in(destination):
        raise InvalidLocationError(
            f"{destination.display} is around the source, {source.display}, which would be deleted with what is "
            "replaced there; give another location. Nothing was written"
        )
    if destination.lies_in(source):
        there = read_root(destination.store)
        if isinstance(there, Root) and there.role == "member":
            raise InvalidLocationError(
                f"{destination.display} is one of the checkpointables of the source, {source.display}, and would be "
                "lost from it; give another location. Nothing was written"
            )


def refuse_further(opened: Checkpoint, destination: Location) -> None:
    """Refuse a place where what is replaced has, or is, a further checkpoint that is read: a base, or one that a transform names.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if opened.derived is None:
        return
    first, *further = opened.derived.sources
    refuse_further(first, destination)
    for other in further:
        refuse_further(other, destination)
        if other.location.lies_in(destination):
            raise InvalidLocationError(
                f"{destination.display} {'is' if other.location.identity == destination.identity else 'is around'} "
                f"{other.location.display}, which has arrays of {first.location.display} and would be replaced while "
                "they are read; give another location. Nothing was written"
            )
