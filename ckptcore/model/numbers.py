"""Floats as JSON that brings back the same bits, which JSON has no numbers for where they are not finite."""

from __future__ import annotations

import math
import struct
from typing import Final

from ckptcore.model.tree import JSON

__all__ = ["float_from_json", "float_to_json"]

_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_NAN_BITS: Final = "nan:"
"""Followed by the 64 bits of a NaN in hexadecimal, its sign first."""


def float_to_json(number: float) -> JSON:
    """A number, or its name. A NaN that is not `math.nan` keeps its sign and payload."""
    if math.isfinite(number):
        return number
    if not math.isnan(number):
        return "inf" if number > 0 else "-inf"
    bits = struct.pack(">d", number)
    return "nan" if bits == struct.pack(">d", math.nan) else f"{_NAN_BITS}{bits.hex()}"


def float_from_json(value: JSON) -> float:
    """The float that `float_to_json` gave as JSON.

    Raises:
        ValueError: if `value` is no such JSON.
        OverflowError: if it is an int beyond all floats.
    """
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (number := _NOT_FINITE.get(value)) is not None:
        return number
    if isinstance(value, str) and value.startswith(_NAN_BITS) and len(value) == len(_NAN_BITS) + 16:
        (number,) = struct.unpack(">d", bytes.fromhex(value[len(_NAN_BITS) :]))
        if math.isnan(number):
            return float(number)
    raise ValueError(value)
