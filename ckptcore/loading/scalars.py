"""Numbers in place of arrays without axes, and the other way round: other software stores one as the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, ValueRecord
from ckptcore.protocols import LeafHandler

__all__ = ["NumberOfArray", "are_interchangeable", "array_of", "difference_of"]

_TYPES: Final[dict[str, Callable[[Any], bool | int | float]]] = {"bool": bool, "int": int, "float": float}
"""The kinds of values that are numbers, and their types."""

_TRIED: Final = (("int", "int"), ("int", "float"), ("float", "float"))
"""Kinds of numbers, and the kinds of elements that they may become if the value fits."""

_ARRAYS: Final = (PLAIN_ARRAY, "numpy.scalar")
"""The kinds of arrays that have no meaning beyond their elements."""

_VALUES: Final = HostValueHandler()


def are_interchangeable(asked: LeafRecord, stored: LeafRecord) -> bool:
    """Return True if one is a Python number and the other an array without axes. See `difference_of`."""
    if isinstance(stored, ValueRecord):
        return isinstance(asked, ArrayRecord) and _is_number(stored) and _is_scalar(asked)
    return isinstance(asked, ValueRecord) and _is_number(asked) and _is_scalar(stored)


def difference_of(asked: LeafRecord, stored: LeafRecord) -> str | None:
    """Return why the stored leaf cannot become the one that is asked for without loss; None if it can.

    A number becomes an array that has it exactly: an int one of ints or floats, a float one of floats, a bool one of
    bools. An array becomes a number by its dtype alone, because its element is not read yet: ints an int, floats a
    float, bool a bool, and ints of up to 32 bits, which are all floats, also a float.

    Args:
        asked, stored: interchangeable records.

    Raises:
        CorruptCheckpointError: if the stored number is not a number.
    """
    if isinstance(stored, ValueRecord) and isinstance(asked, ArrayRecord):
        if array_of(stored, asked.spec) is not None:
            return None
        if (stored.kind, _sort(asked.spec)) in _TRIED:
            shown = _shown(stored)
            return (
                f"value: {asked.spec} is asked for, and cannot hold exactly the {stored.kind} that is stored: {shown}"
            )
        return f"kind: array {asked.spec} is asked for, {stored.kind} is stored"
    assert isinstance(stored, ArrayRecord) and isinstance(asked, ValueRecord)  # they are interchangeable
    sort = _sort(stored.spec)
    if sort == asked.kind or (sort == "int" and asked.kind == "float" and stored.spec.nbytes <= 4):
        return None
    return f"kind: {asked.kind} is asked for, array {stored.spec} is stored"


def array_of(stored: ValueRecord, spec: ArraySpec) -> HostArray | None:
    """Return a new array without axes that has a stored number exactly; None if no array of this dtype does.

    Raises:
        CorruptCheckpointError: if the stored number is not a number.
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
    except OverflowError:  # an int larger than every float
        return None
    if isinstance(number, int) and wide != number:
        return None
    with np.errstate(all="ignore"):  # an overflow is found by the comparison below
        array = np.array(wide).astype(spec.numpy_dtype)
    # Compare texts: NaN is not equal to itself, and zero equals negative zero.
    return array if repr(float(array)) == repr(wide) else None


class NumberOfArray(HostValueHandler):
    """Builds the Python number that is asked for from a stored array without axes."""

    def __init__(self, handler: LeafHandler, kind: str) -> None:
        """`handler` builds numbers of this kind: ``bool``, ``int`` or ``float``."""
        self._handler = handler
        self._kind = kind

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """See `LeafHandler.build`."""
        ((_, array),) = boxes
        return self._handler.build(abstract, _VALUES.describe(_TYPES[self._kind](array[()])), ())


def _is_number(record: ValueRecord) -> bool:
    return record.kind in _TYPES


def _is_scalar(record: ArrayRecord) -> bool:
    return record.spec.shape == () and record.kind in _ARRAYS


def _sort(spec: ArraySpec) -> str | None:
    """Return the kind of number of the elements; None if they are complex or no numbers."""
    if spec.dtype == "bool":
        return "bool"
    if spec.dtype.startswith(("int", "uint")):
        return "int"
    return "float" if spec.dtype.startswith(("float", "bfloat")) else None


def _shown(stored: ValueRecord) -> str:
    """Return a number for a message. Python refuses to print ints of thousands of digits."""
    number = _VALUES.build(None, stored, ())
    if isinstance(number, int) and number.bit_length() > 128:
        return f"of {number.bit_length()} bits"
    return repr(number)
