"""Forms of paths and of values in which requested and stored leaves match although they are not equal."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, PLAIN_KINDS, VALUE_KINDS, HostValueHandler
from ckptcore.matching.options import Matching
from ckptcore.model.arrays import ArraySpec, Box, HostArray, sort_of_numbers
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, ValueRecord, unreadable_error
from ckptcore.model.tree import Attribute, Key, TreePath, is_name
from ckptcore.protocols import LeafHandler

_NUMBER_TYPES: Final[dict[str, Callable[[Any], bool | int | float]]] = {"bool": bool, "int": int, "float": float}
"""The kinds of values that are numbers, and their types."""

_VALUE_CASTS: Final = (("int", "int"), ("int", "float"), ("float", "float"))
"""Pairs: the kind of a stored number, and a kind of array elements that can represent it if the value fits."""

_VALUES: Final = HostValueHandler()


def plain_key(key: Key) -> Key:
    """Return the name of an attribute; return any other key unchanged."""
    return key.name if isinstance(key, Attribute) else key


def plain_path(path: TreePath) -> TreePath:
    """Return a path with each attribute replaced by its name."""
    return tuple([key.name if isinstance(key, Attribute) else key for key in path])


def text_path(path: TreePath) -> TreePath:
    """Return a path with each key converted to text."""
    return tuple(map(str, path))


def dotted_path(path: TreePath) -> TreePath:
    """Return a path with a single key: all keys joined by dots."""
    return (".".join(map(str, path)),)


PathForms: TypeAlias = tuple[Callable[[TreePath], TreePath], Callable[[TreePath], TreePath]]
"""Functions that convert a requested and a stored path to comparable forms: paths match if their forms are equal."""

PATH_FORMS: Final[Sequence[PathForms]] = ((plain_path, plain_path),)

FOREIGN_PATH_FORMS: Final[Sequence[PathForms]] = (
    (plain_path, plain_path),
    (text_path, text_path),
    (dotted_path, text_path),
)
"""Forms for keys that are compared as text, as in checkpoints of other software. Tried in order."""


def is_below(path: TreePath, others: Collection[TreePath]) -> bool:
    """Return True if a path is below one of the other paths. A path is not below itself."""
    return any(path[:length] in others for length in range(len(path)))


def find_paths(
    requested: Sequence[TreePath], stored: Mapping[TreePath, int], forms: Sequence[PathForms]
) -> list[int | None]:
    """Return the number of the stored leaf for each requested path; None if there is none.

    Equal paths match first, then paths with equal forms. A form that several leaves share matches nothing.
    """
    numbers = [stored.get(path) for path in requested]
    for of_requested, of_stored in forms:
        missing = [position for position, number in enumerate(numbers) if number is None]
        if not missing:
            break
        taken = {number for number in numbers if number is not None}
        stored_forms = [of_stored(path) for path in stored]
        requested_forms = [of_requested(requested[position]) for position in missing]
        times_stored, times_requested = Counter(stored_forms), Counter(requested_forms)
        free = {
            form: number
            for form, number in zip(stored_forms, stored.values(), strict=True)
            if number not in taken and times_stored[form] == 1
        }
        for position, form in zip(missing, requested_forms, strict=True):
            if times_requested[form] == 1:
                numbers[position] = free.get(form)
    return numbers


def are_interchangeable(requested: LeafRecord, stored: LeafRecord) -> bool:
    """Return True if one of the leaves is a Python number, and the other is an array without axes."""
    if isinstance(stored, ValueRecord):
        return isinstance(requested, ArrayRecord) and _is_number(stored) and is_scalar(requested)
    return isinstance(requested, ValueRecord) and _is_number(requested) and is_scalar(stored)


def number_difference(requested: LeafRecord, stored: LeafRecord) -> str | None:
    """Return why a stored leaf cannot become the requested leaf without loss; None if it can.

    A number becomes an array that represents it exactly: an int becomes an array of ints or floats, a float an
    array of floats, and a bool an array of bools. The element of a stored array is not read yet, so its dtype decides:
    ints become an int, floats a float, and bool a bool. Ints of up to 32 bits also become a float, which represents
    every such int.

    Args:
        requested, stored: interchangeable records.

    Raises:
        CorruptCheckpointError: if the stored value is not a number.
    """
    if isinstance(stored, ValueRecord) and isinstance(requested, ArrayRecord):
        if array_of_number(stored, requested.spec) is not None:
            return None
        if (stored.kind, sort_of_numbers(requested.spec.dtype)) in _VALUE_CASTS:
            reason = f"cannot represent the stored {stored.kind} exactly: {_shown(stored)}"
            return f"value: {requested.spec} is requested, and {reason}"
        return f"kind: array {requested.spec} is requested, {stored.kind} is stored"
    assert isinstance(stored, ArrayRecord) and isinstance(requested, ValueRecord)  # they are interchangeable
    sort = sort_of_numbers(stored.spec.dtype)
    if sort == requested.kind or (sort == "int" and requested.kind == "float" and stored.spec.nbytes <= 4):
        return None
    return f"kind: {requested.kind} is requested, array {stored.spec} is stored"


def array_of_number(stored: ValueRecord, spec: ArraySpec) -> HostArray | None:
    """Return a stored number as a new array without axes; None if the dtype cannot represent it exactly.

    Raises:
        CorruptCheckpointError: if the stored value is not a number.
    """
    number: Any = _VALUES.build(None, stored, ())
    kind, sort = type(number).__name__, sort_of_numbers(spec.dtype)
    if kind == sort == "bool":
        return np.array(number)
    if kind == sort == "int":
        import ml_dtypes  # slow to import, as `ckptcore.model.arrays` says

        limits = ml_dtypes.iinfo(spec.numpy_dtype)  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
        if limits.min <= number <= limits.max:
            return np.array(number, spec.numpy_dtype)
    elif (kind, sort) in _VALUE_CASTS:
        with contextlib.suppress(OverflowError), np.errstate(all="ignore"):  # an int may be larger than every float
            wide = float(number)
            array = np.array(wide).astype(spec.numpy_dtype)
            # Compare texts of floats: NaN is not equal to itself, and zero equals negative zero.
            if (kind == "float" or wide == number) and repr(float(array)) == repr(wide):
                return array
    return None


class NumberOfArray(HostValueHandler):
    """Builds a requested Python number from a stored array without axes."""

    def __init__(self, handler: LeafHandler, kind: str) -> None:
        """Build numbers of a kind (``bool``, ``int`` or ``float``) with a handler."""
        self._handler = handler
        self._kind = kind

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """See `LeafHandler.build`."""
        ((_, array),) = boxes
        return self._handler.build(abstract, _VALUES.describe(_NUMBER_TYPES[self._kind](array[()])), ())


class FloatOfInt(HostValueHandler):
    """Builds a float that is equal to the stored int, or the int itself if no float is equal to it."""

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


def _shown(stored: ValueRecord) -> str:
    """Format a number for a message. Python refuses to print ints of thousands of digits."""
    number = _VALUES.build(None, stored, ())
    if isinstance(number, int) and number.bit_length() > 128:
        return f"of {number.bit_length()} bits"
    return repr(number)


def with_casts_of_numbers(matching: Matching, requested: ArrayRecord, stored: ArrayRecord) -> Matching:
    """Return options that also allow lossless casts of arrays without axes, as for Python numbers.

    The values are not known yet. For a cast between ints, reading raises an error if the requested dtype cannot
    represent the number.
    """
    if matching.cast != "error" or matching.values != "stored" or not (is_scalar(requested) and is_scalar(stored)):
        return matching
    sorts = sort_of_numbers(stored.spec.dtype), sort_of_numbers(requested.spec.dtype)
    if sorts not in _VALUE_CASTS:
        return matching
    return replace(matching, cast="narrowing" if sorts == ("int", "int") else "safe")


def column_difference(requested: object, stored: ValueRecord, matching: Matching) -> str | None:
    """Return why a stored column cannot replace a requested list, tuple or dict; None if it can."""
    if matching.values == "stored" and not (isinstance(requested, dict) and any(map(is_name, requested))):
        return None  # the column need not be decoded
    value: Any = _VALUES.build(None, stored, ())
    if matching.values == "error" and not _has_types_of(requested, value):
        return f"kind: a {stored.kind} of other values is requested than is stored"
    lost = [key for key in requested if is_name(key) and key not in value] if isinstance(requested, dict) else []
    return f"missing: {lost[0]!r} is not stored" if lost else None


def _has_types_of(requested: object, stored: object) -> bool:
    """Return True if two values have the same structure, and plain values of the same types."""
    if isinstance(requested, dict) and isinstance(stored, dict):
        return requested.keys() == stored.keys() and all(
            _has_types_of(value, stored[key]) for key, value in requested.items()
        )
    if isinstance(requested, list | tuple) and isinstance(stored, list | tuple):
        return len(requested) == len(stored) and all(map(_has_types_of, requested, stored))
    return type(requested) is type(stored)


def is_plain_value(record: LeafRecord) -> bool:
    """Return True for a plain value that can be loaded in its stored form. Text stored as an array does not count."""
    if isinstance(record, ArrayRecord):
        return is_scalar(record) and sort_of_numbers(record.spec.dtype) in _NUMBER_TYPES
    return record.kind in PLAIN_KINDS


def are_plain(requested: ArrayRecord, stored: ArrayRecord) -> bool:
    """Return True if two arrays have no meaning beyond their elements, so that they can be adjusted."""
    return requested.kind in PLAIN_ARRAY_KINDS and stored.kind in PLAIN_ARRAY_KINDS


def is_of_form(requested: LeafRecord, stored: LeafRecord) -> bool:
    """Return True if one leaf is a plain value, and the other has a type with a plain form, such as a path.

    A conversion can then be tried. A caller, or an object that loads itself, requests the plain form if it does not
    know the type.
    """
    if not isinstance(requested, ValueRecord) or not isinstance(stored, ValueRecord) or unreadable_error(stored):
        return False
    if requested.kind not in PLAIN_KINDS:
        return stored.kind != "none"
    return stored.kind not in PLAIN_KINDS and requested.kind == VALUE_KINDS.get(type(stored.value))


def is_none(record: LeafRecord) -> bool:
    """Return True for None."""
    return isinstance(record, ValueRecord) and record.kind == "none"


def kind_difference(requested: LeafRecord, stored: LeafRecord) -> str | None:
    """Return why a stored leaf cannot be loaded as the requested leaf, by kind, shape and dtype; None if it can."""
    if isinstance(requested, ArrayRecord) and isinstance(stored, ArrayRecord):
        if requested.spec == stored.spec:
            is_data = stored.kind == PLAIN_ARRAY and requested.kind not in ("str", "bytes")
            if is_data or requested.kind in (stored.kind, *PLAIN_ARRAY_KINDS):
                return None
            return f"kind: {requested.kind} is requested, {stored.kind} is stored"
        if requested.kind == stored.kind != PLAIN_ARRAY and requested.kind in ("str", "bytes"):
            return None  # text of any length
        if requested.spec.shape != stored.spec.shape:
            stored_kind = "" if stored.kind in PLAIN_ARRAY_KINDS else f", the data of a {stored.kind},"
            return f"shape: {requested.spec} is requested, {stored.spec}{stored_kind} is stored"
        of_requested, of_stored = (f"{record.spec} ({record.kind})" for record in (requested, stored))
        return f"dtype: {of_requested} is requested, {of_stored} is stored; arrays of these kinds are not cast"
    if (error := unreadable_error(stored)) is not None:
        return f"kind: the stored leaf cannot be loaded: {str(error).removeprefix('it was saved as ')}"
    requested_kind, stored_kind = (
        record.kind
        if not isinstance(record, ArrayRecord) or record.kind in ("str", "bytes")
        else f"array {record.spec}"
        for record in (requested, stored)
    )
    if requested_kind == stored_kind:
        return None
    return f"kind: {requested_kind} is requested, {stored_kind} is stored"
