"""Applying: an open checkpoint as transforms make it, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import xxhash

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context
from ckptcore.derivations import Constant, walk
from ckptcore.errors import CheckpointError, TransformError, UnsupportedLeafError
from ckptcore.io.elements import bytes_of
from ckptcore.loading.derived import derive
from ckptcore.loading.opened import Opened, replaced_beside
from ckptcore.loading.tries import open_checkpoint
from ckptcore.protocols import DerivedArray
from ckptcore_transforms.drafts import Draft
from ckptcore_transforms.transform import Transform

__all__ = ["Transforms", "apply_transforms", "check_beside", "describe", "inverse"]

Transforms: TypeAlias = Sequence[Transform]
"""What a load is to change, in this order."""


_METHODS: Final = ("apply", "describe", "inverse")

_LONGEST: Final = 1200
"""Of what an error tells, in characters: names may be hostile, and of any length."""


def apply_transforms(opened: Opened, transforms: Transforms, context: Context) -> Opened:
    """A checkpoint as transforms make it; reads no array.

    Args:
        opened: what is stored.
        transforms: in the order in which they are applied.
        context: its bound on the memory of loads is also that of what is held beside the arrays that are made.

    Raises:
        TransformError: names the transform that does not fit what is stored.
        What opening further checkpoints does.
    """
    _expect_transforms(transforms)
    if not transforms:
        return opened

    def open_beside(location: LocationLike) -> Opened:
        return open_checkpoint(location, context)

    draft = Draft(opened, context.registry, open_beside)
    for number, transform in enumerate(transforms):
        try:
            transform.apply(draft)
        except Exception as error:
            if isinstance(error, CheckpointError) and not isinstance(error, TransformError | UnsupportedLeafError):
                raise  # about a further checkpoint, for which no transform is to blame
            raise TransformError(
                f"{opened.location.display}, transform {number + 1} of {len(transforms)} ({_cut(transform.describe())}): {_cut(str(error))}. "
                "Transforms are applied in order, each to what the ones before it made; IfPresent lets one match nothing"
            ) from error
    try:
        made = draft.finish()
    except TransformError as error:
        raise TransformError(f"{opened.location.display}, after {len(transforms)} transforms: {error}") from error
    return derive(
        opened,
        made.tree,
        made.derivations,
        values=made.values,
        beside=draft.beside,
        most_bytes=context.memory.load_bytes,
        told=_told(transforms, made.derivations.values()),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _told(transforms: Transforms, made: Iterable[DerivedArray]) -> str:
    """What ranks tell each other: what is done, and a digest of the elements that are not stored, which a line cannot show."""
    constants = {one: None for derivation in made for one in walk(derivation) if isinstance(one, Constant)}
    values = [one.value for one in constants if one.value.size > 1]
    if not values:
        return describe(transforms)
    digest = xxhash.xxh3_128()
    for value in values:
        digest.update(bytes_of(np.ascontiguousarray(value)))
    return f"{describe(transforms)}\nwith elements of {digest.hexdigest()}"


def check_beside(opened: Opened) -> None:
    """Make sure that further checkpoints that arrays were made of are still those that were opened.

    Raises:
        CorruptCheckpointError: if one was replaced, so that what was read may be of two.
    """
    if opened.derived is None:
        return
    first, *beside = opened.derived.below
    check_beside(first)
    for other in beside:
        if not other.mark.has_stayed_at(other.location):
            raise replaced_beside(other)


def describe(transforms: Transforms) -> str:
    """What transforms do, a line for each, before anything runs."""
    _expect_transforms(transforms)
    return "\n".join([f"{number}. {transform.describe()}" for number, transform in enumerate(transforms, 1)])


def inverse(transforms: Transforms) -> list[Transform]:
    """The transforms that take a tree back which transforms made.

    Raises:
        TransformError: names one that nothing takes back.
    """
    _expect_transforms(transforms)
    return [transform.inverse() for transform in reversed(transforms)]


def _expect_transforms(transforms: Transforms) -> None:
    """Refuse what is no list of transforms.

    Raises:
        TypeError
    """
    if isinstance(transforms, str | bytes) or not isinstance(transforms, Sequence):
        raise TypeError(
            f"transforms={transforms!r}: expected transforms in a list, as transforms=[Rename(...), Cast(...)]"
        )
    for transform in transforms:
        if isinstance(transform, type) or not all(callable(getattr(transform, name, None)) for name in _METHODS):
            raise TypeError(
                f"{transform!r} is no transform: expected what ckptcore_transforms has, such as Rename(...)"
            )
