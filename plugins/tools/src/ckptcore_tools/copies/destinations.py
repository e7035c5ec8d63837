"""Checks of destinations: writing a copy must not delete the source."""

from __future__ import annotations

from ckptcore.commit.location import Location
from ckptcore.commit.root import Root
from ckptcore.commit.stored_root import read_root
from ckptcore.errors import InvalidLocationError
from ckptcore.opening.checkpoint import Checkpoint


def refuse_destination(source: Location, destination: Location) -> None:
    """Refuse a destination that is the source, contains it, or is one of its checkpointables.

    A new directory inside the source is allowed.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if destination.identity == source.identity:
        raise InvalidLocationError(
            f"{source.display} is both source and destination. Give another destination. Nothing was written"
        )
    if source.is_within(destination):
        raise InvalidLocationError(
            f"{destination.display} contains the source, {source.display}, which would be deleted. Give another "
            "destination. Nothing was written"
        )
    if destination.is_within(source):
        existing = read_root(destination.store)
        if isinstance(existing, Root) and existing.role == "member":
            raise InvalidLocationError(
                f"{destination.display} is one of the checkpointables of the source, {source.display}, which would "
                "lose it. Give another destination. Nothing was written"
            )


def refuse_further(opened: Checkpoint, destination: Location) -> None:
    """Refuse a destination that is, or contains, another checkpoint that is read: a base, or a source of a transform.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if opened.derived is None:
        return
    first, *further = opened.derived.sources
    refuse_further(first, destination)
    for other in further:
        refuse_further(other, destination)
        if other.location.is_within(destination):
            raise InvalidLocationError(
                f"{destination.display} {'is' if other.location.identity == destination.identity else 'contains'} "
                f"{other.location.display}, which {first.location.display} reads arrays from. Give another "
                "destination. Nothing was written"
            )
