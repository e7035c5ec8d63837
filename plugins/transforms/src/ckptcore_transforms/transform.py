"""Base class of this package's transforms, and validation of their arguments when a transform is created."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptcore.errors import TransformError, UnsupportedLeafError
from ckptcore.loading.transformed import expect_transforms, is_transform
from ckptcore.model.arrays import AbstractArray, name_of_dtype
from ckptcore.protocols import Transform, TransformedTree, Transforms
from ckptcore_transforms.tree_rewriter import NothingMatches, TreeRewriter


class TreeTransform(Transform, Protocol):
    """A transform of a `TreeRewriter`, which consecutive transforms of this package share."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Change the tree."""
        rewriter = TreeRewriter.of(tree)
        self.rewrite(rewriter)
        return rewriter

    def rewrite(self, tree: TreeRewriter) -> None:
        """Change the leaves of a tree.

        Raises:
            TransformError, ValueError: if a leaf is missing or does not fit.
        """
        ...

    def inverse(self) -> Transform:
        """Return the reverse transform.

        Raises:
            TransformError: if the transform is not invertible.
        """
        ...


@dataclass(frozen=True, slots=True)
class IfPresent(Transform):
    """Makes a transform optional: matching nothing is not an error.

    Attributes:
        transform: the transform.
    """

    transform: Transform

    def __post_init__(self) -> None:
        if not is_transform(self.transform):
            raise TypeError(f"IfPresent({self.transform!r}): expected a transform")

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Apply the transform if it matches."""
        rewriter = TreeRewriter.of(tree)
        before = dict(rewriter.leaves)
        try:
            return self.transform.apply(rewriter)
        except NothingMatches:
            rewriter.leaves = before
            return rewriter

    def describe(self) -> str:
        """Describe the transform."""
        return f"{self.transform.describe()}, if present"

    def inverse(self) -> Transform:
        """Return the optional inverse. It changes all matching leaves, also if `transform` created none of them."""
        return IfPresent(_inverse(self.transform))


def inverse(transforms: Transforms) -> list[Transform]:
    """Return transforms that reverse a list of transforms.

    Raises:
        TransformError: names a transform that is not invertible.
    """
    expect_transforms(transforms)
    return [_inverse(transform) for transform in reversed(transforms)]


def _inverse(transform: Transform) -> Transform:
    if not hasattr(transform, "inverse"):
        raise not_invertible(transform, f"because {type(transform).__name__} has no method inverse")
    inverted: Transform = transform.inverse()
    return inverted


def not_invertible(transform: Transform, reason: str) -> TransformError:
    """Return the error for a transform that is not invertible."""
    return TransformError(f"{transform.describe()}: this transform has no inverse, {reason}")


def expect_pattern(transform: object, name: str) -> None:
    """Check that an argument is a pattern.

    Args:
        transform: the transform.
        name: name of the argument.

    Raises:
        TypeError: if the argument has another type. The error names the transform and argument.
    """
    value = getattr(transform, name)
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return
    if not isinstance(value, str):
        raise _wrong(transform, name, "a str, or a compiled regular expression for str")


def expect_text(transform: object, name: str) -> None:
    """Check that an argument is a str. See `expect_pattern`."""
    if not isinstance(getattr(transform, name), str):
        raise _wrong(transform, name, "a str")


def expect_texts(transform: object, name: str) -> None:
    """Check that an argument is a nonempty sequence of str. See `expect_pattern`."""
    values = expect_sequence(transform, name, "a nonempty list of str")
    if not values or not all(isinstance(value, str) for value in values):
        raise _wrong(transform, name, "a nonempty list of str")


def expect_sequence(transform: object, name: str, expected: str) -> Sequence[object]:
    """Return a sequence argument, which must not be a str. See `expect_pattern`."""
    values = getattr(transform, name)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise _wrong(transform, name, expected)
    return values


def expect_int(transform: object, name: str) -> None:
    """Check that an argument is an integer. See `expect_pattern`."""
    if not _is_int(getattr(transform, name)):
        raise _wrong(transform, name, "an integer")


def expect_ints(transform: object, name: str, *, least: int = 0) -> None:
    """Check that an argument is a sequence of at least `least` integers. See `expect_pattern`."""
    values = getattr(transform, name)
    expected = f"a list of at least {least} integers" if least else "a list of integers"
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _wrong(transform, name, expected)
    given = list(values)
    if len(given) < least or not all(map(_is_int, given)):
        raise _wrong(transform, name, expected)


def expect_number(transform: object, name: str) -> None:
    """Check that an argument is a finite real number. See `expect_pattern`."""
    value = getattr(transform, name)
    try:
        is_number = not isinstance(value, str | bytes | bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        is_number = False
    if not is_number:
        raise _wrong(transform, name, "a finite number")


def expect_callable(transform: object, name: str) -> None:
    """Check that an argument is callable. See `expect_pattern`."""
    if not callable(getattr(transform, name)):
        raise _wrong(transform, name, "a function")


def expect_dtype(transform: object, name: str) -> str:
    """Return the name of a dtype argument such as ``jnp.bfloat16``. See `expect_pattern`."""
    try:
        return name_of_dtype(AbstractArray((), getattr(transform, name)).dtype)
    except (TypeError, UnsupportedLeafError) as error:
        raise _wrong(transform, name, "a dtype of NumPy or ml_dtypes, or its name") from error


def _is_int(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        return False
    return not isinstance(value, bool)


def _wrong(transform: object, name: str, expected: str) -> TypeError:
    return TypeError(f"{type(transform).__name__}({name}={getattr(transform, name)!r}): expected {expected}")
