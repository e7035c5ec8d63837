"""Validation of the arguments of transforms, when a transform is created and not when a checkpoint is loaded."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model.arrays import AbstractArray, name_of_dtype


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
