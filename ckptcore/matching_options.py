"""Matching: which differences between what a load asks for and what is stored are allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["EXACT", "Matching", "Missing", "Sequences", "Unexpected"]

Unexpected = Literal["error", "ignore"]
"""What becomes of stored leaves that are not asked for."""

Missing = Literal["error", "placeholder", "keep"]
"""What becomes of leaves that are asked for and not stored."""

Sequences = Literal["exact", "either"]
"""Whether a list may be asked for where a tuple is stored, and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which differences between an abstract tree and the stored one a load allows. By itself it allows none.

    Whatever is allowed is told in a `ckptcore.LoadReport`, if the load is given one. Differences that are not allowed are errors, all
    of them listed at once.

    Attributes:
        unexpected: stored leaves that are not asked for: ``"error"``, or ``"ignore"``: they are not read.
        missing: leaves that are asked for and not stored: ``"error"``; ``"placeholder"``: `ckptcore.PLACEHOLDER` comes in their places;
            ``"keep"``: the abstract tree's own values do, or with ``load_into`` stay: the very same objects. An abstract leaf without
            elements (`ckptcore.AbstractArray`, ``jax.ShapeDtypeStruct``, a tensor on the meta device) has none to keep, and is an error.
        sequences: ``"exact"``: a list is stored where one is asked for, and a tuple where a tuple is; ``"either"``: either may be in the
            place of the other, and what is asked for is built. Formats of other software that do not tell one from the other are not
            held to it.
    """

    unexpected: Unexpected = "error"
    missing: Missing = "error"
    sequences: Sequences = "exact"

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ValueError: names the option and what it may be.
        """
        for name, allowed in _CHOICES.items():
            given = getattr(self, name)
            if given not in allowed:
                raise ValueError(f"Matching({name}={given!r}): expected one of {', '.join(map(repr, allowed))}")


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "unexpected": get_args(Unexpected),
    "missing": get_args(Missing),
    "sequences": get_args(Sequences),
}

EXACT: Final = Matching()
"""What is asked for is what is stored."""
