"""Numbers of Python in the place of arrays without axes, and the other way round: other software stores one as the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.model.arrays import ArraySpec, HostArray
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, ValueRecord

__all__ = ["are_interchangeable", "array_of", "difference_of", "value_of"]

_TYPES: Final[dict[str, Callable[[Any], bool | int | float]]] = {"bool": bool, "int": int, "float": float}
"""The kinds of values that are numbers, and what makes them of an element."""

_TRIED: Final = (("int", "int"), ("int", "float"), ("float", "float"))
"""The kinds of numbers that may become elements of a kind, if they hold them."""

_ARRAYS: Final = (PLAIN_ARRAY, "numpy.scalar")
"""The kinds of arrays that mean nothing beyond their elements."""

_VALUES: Final = HostValueHandler()


def are_interchangeable(asked: LeafRecord, stored: LeafRecord) -> bool:
    """Whether one is a number of Python and the other an array without axes. What is lost between them `difference_of` tells."""
    if isinstance(stored, ValueRecord):
        return isinstance(asked, ArrayRecord) and _is_number(stored) and _is_scalar(asked)
    return isinstance(asked, ValueRecord) and _is_number(asked) and _is_scalar(stored)


def difference_of(asked: LeafRecord, stored: LeafRecord) -> str | None:
    """Why what is stored cannot become what is asked for without loss; None if it can. The two are interchangeable.

    A number becomes an array that holds it exactly: an int one of ints or floats, a float one of floats, a bool one of bools.
    An array becomes a number by its dtype alone, because its element is not read yet: ints an int, floats a float, bool a bool,
    and ints that every float holds (of up to 32 bits) a float too.

    Raises:
        CorruptCheckpointError: if the stored number is none.
    """
    if isinstance(stored, ValueRecord) and isinstance(asked, ArrayRecord):
        if array_of(stored, asked.spec) is not None:
            return None
        if (stored.kind, _sort(asked.spec)) in _TRIED:
            return f"value: {asked.spec} is asked for, and cannot hold exactly the {stored.kind} that is stored: {_told(stored)}"
        return f"kind: array {asked.spec} is asked for, {stored.kind} is stored"
    assert isinstance(stored, ArrayRecord) and isinstance(asked, ValueRecord)  # they are interchangeable
    sort = _sort(stored.spec)
    if sort == asked.kind or (sort == "int" and asked.kind == "float" and stored.spec.nbytes <= 4):
        return None
    return f"kind: {asked.kind} is asked for, array {stored.spec} is stored"


def array_of(stored: ValueRecord, spec: ArraySpec) -> HostArray | None:
    """A new array without axes that holds a stored number exactly; None if no array of this dtype does.

    Raises:
        CorruptCheckpointError: if the stored number is none.
    """
    number, sort = _VALUES.build(None, stored, ()), _sort(spec)
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
    except OverflowError:  # an int beyond all floats
        return None
    if isinstance(number, int) and wide != number:
        return None
    with np.errstate(all="ignore"):  # where it overflows, it is not what is stored
        array = np.array(wide).astype(spec.numpy_dtype)
    # By their texts: NaN is not equal to itself, and the zero of either sign is to the other.
    return array if repr(float(array)) == repr(wide) else None


def value_of(array: HostArray, kind: str) -> ValueRecord:
    """The number of a kind, ``bool``, ``int`` or ``float``, that an array without axes holds."""
    record = _VALUES.describe(_TYPES[kind](array[()]))
    assert isinstance(record, ValueRecord)  # numbers are not stored as arrays
    return record


def _is_number(record: ValueRecord) -> bool:
    return record.kind in _TYPES


def _is_scalar(record: ArrayRecord) -> bool:
    return record.spec.shape == () and record.kind in _ARRAYS


def _sort(spec: ArraySpec) -> str | None:
    """The kind of number that the elements are; None if they are none, or complex."""
    if spec.dtype == "bool":
        return "bool"
    if spec.dtype.startswith(("int", "uint")):
        return "int"
    return "float" if spec.dtype.startswith(("float", "bfloat")) else None


def _told(stored: ValueRecord) -> str:
    """A number for a message: Python refuses to print ints of thousands of digits."""
    number = _VALUES.build(None, stored, ())
    if isinstance(number, int) and number.bit_length() > 128:
        return f"of {number.bit_length()} bits"
    return repr(number)
