"""Numbers in the requested form: Python numbers and arrays without axes, converted where nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, HostValueHandler
from ckptcore.matching.options import Matching
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, ValueRecord
from ckptcore.protocols import LeafHandler

_NUMBER_TYPES: Final[dict[str, Callable[[Any], bool | int | float]]] = {"bool": bool, "int": int, "float": float}
"""The kinds of values that are numbers, and their types."""

_VALUE_CASTS: Final = (("int", "int"), ("int", "float"), ("float", "float"))
"""Pairs: the kind of a stored number, and a kind of array elements that can represent it if the value fits."""

_VALUES: Final = HostValueHandler()


def are_interchangeable(requested: LeafRecord, stored: LeafRecord) -> bool:
    """Return True if one is a Python number and the other an array without axes."""
    if isinstance(stored, ValueRecord):
        return isinstance(requested, ArrayRecord) and _is_number(stored) and is_scalar(requested)
    return isinstance(requested, ValueRecord) and _is_number(requested) and is_scalar(stored)


def number_difference(requested: LeafRecord, stored: LeafRecord) -> str | None:
    """Return why a stored leaf cannot become the requested one without loss; None if it can.

    A number becomes an array that represents it exactly: an int becomes an array of ints or floats, a float an
    array of floats, and a bool an array of bools. The element of a stored array is not read yet, so its dtype decides:
    ints become an int, floats a float, and bool a bool. Ints of up to 32 bits also become a float,
    which represents all of them.

    Args:
        requested, stored: interchangeable records.

    Raises:
        CorruptCheckpointError: if the stored value is not a number.
    """
    if isinstance(stored, ValueRecord) and isinstance(requested, ArrayRecord):
        if array_of_number(stored, requested.spec) is not None:
            return None
        if (stored.kind, sort_of_elements(requested.spec)) in _VALUE_CASTS:
            reason = f"cannot represent the stored {stored.kind} exactly: {_shown(stored)}"
            return f"value: {requested.spec} is requested, and {reason}"
        return f"kind: array {requested.spec} is requested, {stored.kind} is stored"
    assert isinstance(stored, ArrayRecord) and isinstance(requested, ValueRecord)  # they are interchangeable
    sort = sort_of_elements(stored.spec)
    if sort == requested.kind or (sort == "int" and requested.kind == "float" and stored.spec.nbytes <= 4):
        return None
    return f"kind: {requested.kind} is requested, array {stored.spec} is stored"


def array_of_number(stored: ValueRecord, spec: ArraySpec) -> HostArray | None:
    """Return a stored number as a new array without axes; None if the dtype cannot represent it exactly.

    Raises:
        CorruptCheckpointError: if the stored value is not a number.
    """
    number, sort = _VALUES.build(None, stored, ()), sort_of_elements(spec)
    if isinstance(number, bool):
        return np.array(number) if sort == "bool" else None
    if isinstance(number, int) and sort == "int":
        import ml_dtypes  # slow to import, as `ckptcore.model.arrays` says

        limits = ml_dtypes.iinfo(spec.numpy_dtype)  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
        return np.array(number, spec.numpy_dtype) if limits.min <= number <= limits.max else None
    if not isinstance(number, int | float) or sort != "float":
        return None
    try:
        wide = float(number)
    except OverflowError:  # an int larger than every float
        return None
    if isinstance(number, int) and wide != number:
        return None
    with np.errstate(all="ignore"):  # an overflow is found by the comparison below
        array = np.array(wide).astype(spec.numpy_dtype)
    # Compare texts: NaN is not equal to itself, and zero equals negative zero.
    return array if repr(float(array)) == repr(wide) else None


class NumberOfArray(HostValueHandler):
    """Builds the Python number that is requested from a stored array without axes."""

    def __init__(self, handler: LeafHandler, kind: str) -> None:
        """Build numbers of a kind (``bool``, ``int`` or ``float``) with a handler."""
        self._handler = handler
        self._kind = kind

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """See `LeafHandler.build`."""
        ((_, array),) = boxes
        return self._handler.build(abstract, _VALUES.describe(_NUMBER_TYPES[self._kind](array[()])), ())


class FloatOfInt(HostValueHandler):
    """Builds a float that is equal to the stored int; the int if there is none."""

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """See `LeafHandler.build`."""
        number: Any = super().build(abstract, stored, boxes)
        try:
            return float(number) if float(number) == number else number
        except OverflowError:
            return number


def _is_number(record: ValueRecord) -> bool:
    return record.kind in _NUMBER_TYPES


def is_scalar(record: ArrayRecord) -> bool:
    """Return True for a plain array without axes."""
    return record.spec.shape == () and record.kind in PLAIN_ARRAY_KINDS


def sort_of_elements(spec: ArraySpec) -> str | None:
    """Return the kind of the elements; None if they are complex or not numbers."""
    if spec.dtype == "bool":
        return "bool"
    if spec.dtype.startswith(("int", "uint")):
        return "int"
    return "float" if spec.dtype.startswith(("float", "bfloat")) else None


def _shown(stored: ValueRecord) -> str:
    """Format a number for a message. Python refuses to print ints of thousands of digits."""
    number = _VALUES.build(None, stored, ())
    if isinstance(number, int) and number.bit_length() > 128:
        return f"of {number.bit_length()} bits"
    return repr(number)


def with_casts_of_numbers(matching: Matching, requested: ArrayRecord, stored: ArrayRecord) -> Matching:
    """Also allow casts of arrays without axes that lose nothing, like those of Python numbers.

    Between ints, reading raises an error for a number that the requested dtype cannot represent.
    """
    if matching.cast != "error" or matching.values != "stored" or not (is_scalar(requested) and is_scalar(stored)):
        return matching
    sorts = sort_of_elements(stored.spec), sort_of_elements(requested.spec)
    if sorts not in _VALUE_CASTS:
        return matching
    return replace(matching, cast="narrowing" if sorts == ("int", "int") else "safe")
