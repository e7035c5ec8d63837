"""Arguments of transforms: those that mean nothing are refused where a transform is made, and not when a checkpoint is loaded."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model.arrays import AbstractArray, name_of_dtype

__all__ = [
    "expect_callable",
    "expect_dtype",
    "expect_int",
    "expect_ints",
    "expect_number",
    "expect_pattern",
    "expect_sequence",
    "expect_text",
    "expect_texts",
]


def expect_pattern(transform: object, name: str) -> None:
    """Refuse what is no pattern.

    Args:
        transform: whose argument it is.
        name: of the argument.

    Raises:
        TypeError
    """
    value = getattr(transform, name)
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return
    if not isinstance(value, str):
        raise _wrong(transform, name, "text, or a regular expression of text")


def expect_text(transform: object, name: str) -> None:
    """Refuse what is no text; see `expect_pattern`."""
    if not isinstance(getattr(transform, name), str):
        raise _wrong(transform, name, "text")


def expect_texts(transform: object, name: str) -> None:
    """Refuse what is no list of texts, or has none; see `expect_pattern`."""
    values = expect_sequence(transform, name, "several texts in a list")
    if not values or not all(isinstance(value, str) for value in values):
        raise _wrong(transform, name, "several texts in a list")


def expect_sequence(transform: object, name: str, expected: str) -> Sequence[object]:
    """What is in a sequence that is no text; see `expect_pattern`."""
    values = getattr(transform, name)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise _wrong(transform, name, expected)
    return values


def expect_int(transform: object, name: str) -> None:
    """Refuse what is no whole number; see `expect_pattern`."""
    if not _is_int(getattr(transform, name)):
        raise _wrong(transform, name, "a whole number")


def expect_ints(transform: object, name: str, *, least: int = 0) -> None:
    """Refuse what is no list of whole numbers, or has fewer than that; see `expect_pattern`."""
    values = getattr(transform, name)
    told = f"at least {least} whole numbers in a list" if least else "whole numbers in a list"
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _wrong(transform, name, told)
    given = list(values)
    if len(given) < least or not all(map(_is_int, given)):
        raise _wrong(transform, name, told)


def expect_number(transform: object, name: str) -> None:
    """Refuse what is no finite real number; see `expect_pattern`."""
    value = getattr(transform, name)
    try:
        is_number = not isinstance(value, str | bytes | bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        is_number = False
    if not is_number:
        raise _wrong(transform, name, "a finite number")


def expect_callable(transform: object, name: str) -> None:
    """Refuse what cannot be called; see `expect_pattern`."""
    if not callable(getattr(transform, name)):
        raise _wrong(transform, name, "a function")


def expect_dtype(transform: object, name: str) -> str:
    """The name of a dtype that may be given otherwise, as ``jnp.bfloat16``; see `expect_pattern`."""
    try:
        return name_of_dtype(AbstractArray((), getattr(transform, name)).dtype)
    except (TypeError, UnsupportedLeafError) as error:
        raise _wrong(transform, name, "a dtype of NumPy or ml_dtypes, or its name") from error


def _is_int(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(value, bool)


def _wrong(transform: object, name: str, expected: str) -> TypeError:
    return TypeError(f"{type(transform).__name__}({name}={getattr(transform, name)!r}): expected {expected}")
