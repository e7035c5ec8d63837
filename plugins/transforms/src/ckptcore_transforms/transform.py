"""Base class of this package's transforms, and validation of their arguments when a transform is created."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Final, Protocol, TypeAlias

from ckptcore.errors import TransformError, UnsupportedLeafError, converts_errors
from ckptcore.model.arrays import AbstractArray, name_of_dtype
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import Transform, TransformedTree, Transforms
from ckptcore_transforms.transformed import expect_transforms, is_transform
from ckptcore_transforms.tree_rewriter import NothingMatches, TreeRewriter


class TreeTransform(Transform, Protocol):
    """A transform of a `TreeRewriter`, which consecutive transforms of this package share."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check each argument by the text of its annotation. Annotations that are not in `_CHECKS` are not checked.

        A subclass whose arguments have other rules, such as infinite floats, uses another annotation or overrides this
        method.

        Raises:
            TypeError: if an argument has another type. The error names the transform and the argument.
        """
        for field in fields(self):  # type: ignore[arg-type]  # all subclasses are dataclasses
            check = _CHECKS.get(str(field.type).removesuffix(" | None"))
            if check is not None and (getattr(self, field.name) is not None or "None" not in str(field.type)):
                check(self, field.name)

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
        """Return the optional inverse. It changes all matching leaves, even those that `transform` did not create."""
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


@converts_errors
def naming(path: TreePath) -> Iterator[None]:
    """Convert a `ValueError` of the block to a `TransformError` that names the array at a path."""
    try:
        yield
    except ValueError as error:
        raise TransformError(f"{format_path(path)}: {error}") from error


def not_invertible(transform: Transform, reason: str) -> TransformError:
    """Return the error for a transform that is not invertible."""
    return TransformError(f"{transform.describe()}: this transform has no inverse, {reason}")


def _expect_pattern(transform: object, name: str) -> None:
    value = getattr(transform, name)
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return
    if not isinstance(value, str):
        raise _wrong(transform, name, "a str, or a compiled regular expression for str")


def _expect_text(transform: object, name: str) -> None:
    if not isinstance(getattr(transform, name), str):
        raise _wrong(transform, name, "a str")


def _expect_texts(transform: object, name: str) -> None:
    values = expect_sequence(transform, name, "a nonempty list of str")
    if not values or not all(isinstance(value, str) for value in values):
        raise _wrong(transform, name, "a nonempty list of str")


def expect_sequence(transform: object, name: str, expected: str) -> Sequence[object]:
    """Return a sequence argument, which must not be a str.

    Args:
        transform: the transform.
        name: name of the argument.
        expected: the expected value in words, for the error.

    Raises:
        TypeError: if the argument has another type.
    """
    values = getattr(transform, name)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise _wrong(transform, name, expected)
    return values


def _expect_int(transform: object, name: str) -> None:
    if not _is_int(getattr(transform, name)):
        raise _wrong(transform, name, "an integer")


def _expect_ints(transform: object, name: str, least: int = 0) -> None:
    values = getattr(transform, name)
    expected = f"a list of at least {least} integers" if least else "a list of integers"
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _wrong(transform, name, expected)
    given = list(values)
    if len(given) < least or not all(map(_is_int, given)):
        raise _wrong(transform, name, expected)


def _expect_number(transform: object, name: str) -> None:
    value = getattr(transform, name)
    try:
        is_number = not isinstance(value, str | bytes | bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        is_number = False
    if not is_number:
        raise _wrong(transform, name, "a finite number")


def _expect_callable(transform: object, name: str) -> None:
    if not callable(getattr(transform, name)):
        raise _wrong(transform, name, "a function")


def _expect_dtype(transform: object, name: str) -> None:
    """Replace a dtype argument such as ``jnp.bfloat16`` by its name."""
    try:
        dtype = name_of_dtype(AbstractArray((), getattr(transform, name)).dtype)
    except (TypeError, UnsupportedLeafError) as error:
        raise _wrong(transform, name, "a dtype of NumPy or ml_dtypes, or its name") from error
    object.__setattr__(transform, name, dtype)


DtypeName: TypeAlias = str
"""Name of a dtype. A transform accepts the dtype itself, too."""

Sizes: TypeAlias = Sequence[int]
"""At least one integer."""

_CHECKS: Final[Mapping[str, Callable[[object, str], None]]] = {
    "Pattern": _expect_pattern,
    "str": _expect_text,
    "Sequence[str]": _expect_texts,
    "int": _expect_int,
    "Sequence[int]": _expect_ints,
    "Sizes": partial(_expect_ints, least=1),
    "float": _expect_number,
    "Callable[[Any], Any]": _expect_callable,
    "Callable[[AbstractArray], AbstractArray]": _expect_callable,
    "DtypeName": _expect_dtype,
}
"""Checks of arguments, by the text of the annotations of transforms' fields. Other annotations are not checked."""


def _is_int(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        return False
    return not isinstance(value, bool)


def _wrong(transform: object, name: str, expected: str) -> TypeError:
    return TypeError(f"{type(transform).__name__}({name}={getattr(transform, name)!r}): expected {expected}")
