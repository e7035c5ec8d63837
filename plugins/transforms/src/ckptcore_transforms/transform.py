"""Transform: a change of a stored tree as it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptcore.errors import TransformError
from ckptcore_transforms.drafts import Draft, NothingMatches

__all__ = ["IfPresent", "Transform", "not_invertible"]


class Transform(Protocol):
    """A change of a tree. Immutable; reads no elements.

    Those of this package are its subclasses, so that a list of several kinds has a type; others need not be.
    """

    __slots__ = ()

    def apply(self, draft: Draft) -> None:
        """Change the leaves of a tree, and how its arrays are made.

        Raises:
            TransformError, ValueError: if the tree does not have what is changed, or it does not fit.
        """
        ...

    def describe(self) -> str:
        """What it does, in a line for a person."""
        ...

    def inverse(self) -> Transform:
        """What takes a tree that it made back to what it was.

        Raises:
            TransformError: if nothing does.
        """
        ...


@dataclass(frozen=True, slots=True)
class IfPresent(Transform):
    """A transform, where there is something for it: elsewhere that it matches nothing is an error.

    Attributes:
        transform: what is done.
    """

    transform: Transform

    def __post_init__(self) -> None:
        if isinstance(self.transform, type) or not hasattr(self.transform, "apply"):
            raise TypeError(f"IfPresent({self.transform!r}): expected a transform")

    def apply(self, draft: Draft) -> None:
        """See `Transform`."""
        before, beside = dict(draft.leaves), len(draft.beside)
        try:
            self.transform.apply(draft)
        except NothingMatches:
            draft.leaves = before
            del draft.beside[beside:]

    def describe(self) -> str:
        """See `Transform`."""
        return f"{self.transform.describe()}, if there is any"

    def inverse(self) -> Transform:
        """See `Transform`: what is there is taken back, also if something else has made it."""
        return IfPresent(self.transform.inverse())


def not_invertible(transform: Transform, reason: str) -> TransformError:
    """What to raise where nothing takes a tree back."""
    return TransformError(f"{transform.describe()}: this cannot be undone, {reason}")
