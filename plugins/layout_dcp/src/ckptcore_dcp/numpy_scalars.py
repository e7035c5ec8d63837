"""NumPy scalars in pickles, such as a loss or a step that was not converted to a Python number."""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptcore_dcp.pickles import Call, Global, Value, builtin_value

__all__ = ["scalar_value"]

_MAKERS: Final = frozenset(Global(f"numpy.{package}.multiarray", "scalar") for package in ("core", "_core"))
_DTYPE: Final = Global("numpy", "dtype")
_CODES: Final = frozenset(
    ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"],
)


def scalar_value(call: Call) -> bool | int | float | complex | None:
    """Return the number in a pickled NumPy scalar, or None for other calls.

    The call is ``scalar(dtype, bytes)``. The dtype is ``dtype("f8", False, True)`` with a state
    that contains a version and ``<``, ``>`` or ``|`` (NumPy's `generic.__reduce__` and
    `dtype.__reduce__`).
    """
    if call.function not in _MAKERS or len(call.arguments) != 2:
        return None
    dtype, data = call.arguments
    if isinstance(data, Call) and not any(isinstance(argument, Call) for argument in data.arguments):
        data = builtin_value(data)
    if not isinstance(dtype, Call) or dtype.function != _DTYPE or not dtype.arguments or not isinstance(data, bytes):
        return None
    code, state = dtype.arguments[0], dtype.state
    order: Value = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    if not isinstance(code, str) or code not in _CODES or order not in ("<", ">", "|"):
        return None
    kind = np.dtype(f"{order}{code}")
    if len(data) != kind.itemsize:
        return None
    number = np.frombuffer(data, kind)[0].item()
    assert isinstance(number, bool | int | float | complex)  # the only types of these codes
    return number
