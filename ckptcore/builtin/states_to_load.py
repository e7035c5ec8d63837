"""The state to ask a checkpoint for: as it was stored, with the types of the state that the object has now."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ckptcore.model import AbstractArray

__all__ = ["state_to_load"]


class _Nothing:
    __slots__ = ()


_NOTHING: Final = _Nothing()
"""The object has nothing at this place now."""

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
"""Values that say themselves what they are, and come back so."""

_IN_BYTES: Final = re.compile(r"u?int[1-7]|float4_.*")
"""Elements of frameworks that are smaller than a byte, or several in one: stored as bytes, which does not tell the dtype."""


def state_to_load(own: object, stored: Any, *, array: Callable[[AbstractArray], object] = lambda stored: stored) -> Any:
    """An abstract state with the structure of `stored`, whatever structure the object's own state has.

    For `flatten_to_load` of a `LazyCheckpointableHandler`. A checkpoint does not tell all types. Where the own state has
    something at the same place, it does: the array of which framework, which subclass of dict. Shapes and dtypes are those that
    are stored. Where it has nothing, arrays come back as `array` asks, and containers as Python's.

    Args:
        own: the state of the object now.
        stored: what is stored, in Python's own containers: `AbstractArray` for arrays, and values.
        array: makes the abstract leaf for an array that the own state does not have; a NumPy array unless given.
    """
    if isinstance(stored, AbstractArray):
        return _array(own, stored, array)
    if isinstance(stored, dict):
        return _mapping(own, stored, array)
    if isinstance(stored, list | tuple):
        return _sequence(own, stored, array)
    if stored is None or isinstance(own, (_Nothing, *_PLAIN, dict, list, tuple)) or _is_array(own):
        return stored
    return own  # a leaf that only its own handler can build


def _array(own: object, stored: AbstractArray, array: Callable[[AbstractArray], object]) -> object:
    if isinstance(own, np.ndarray | np.generic):
        return stored
    if not _is_array(own):
        return array(stored)
    # The object's own arrays are left to its setter: they may be the arrays of other objects too. Those that cannot make
    # others like themselves are asked for as they are.
    make = getattr(own, "new_empty", None)
    if make is not None:
        name = _element_name(own)
        if name == stored.dtype.name or _IN_BYTES.fullmatch(name):
            return make(stored.shape)
        dtype = _dtype_beside(own, stored.dtype.name)
        return array(stored) if dtype is None else make(stored.shape, dtype=dtype)
    return own if _is_like(own, stored) else _of_namespace(own, stored)


def _element_name(own: Any) -> str:
    """The name of a dtype, without the framework that some put before it."""
    return str(own.dtype).rpartition(".")[2]


def _dtype_beside(own: Any, name: str) -> object | None:
    """The dtype of another name: where dtypes are no NumPy ones, the module that has their class has them all."""
    kind = type(own.dtype)
    found = getattr(sys.modules.get(kind.__module__), name, None)
    return found if isinstance(found, kind) else None


def _is_like(own: Any, stored: AbstractArray) -> bool:
    # A dtype that is not NumPy's, such as of random keys, says nothing of how it is stored.
    return not isinstance(own.dtype, np.dtype) or (tuple(own.shape) == stored.shape and own.dtype == stored.dtype)


def _of_namespace(own: Any, stored: AbstractArray) -> object:
    """An array of the framework and at the place of another, by the array API standard; the other where there is none."""
    try:
        return own.__array_namespace__().empty(stored.shape, dtype=stored.dtype, device=own.device)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # No such framework; or it has no such dtype, cannot divide this shape over the devices, or has let go of the array.
        return own


def _is_array(own: object) -> bool:
    return hasattr(own, "shape") and hasattr(own, "dtype")


def _mapping(own: object, stored: dict[Any, Any], array: Callable[[AbstractArray], object]) -> object:
    if not isinstance(own, dict):
        # A container of another type is taken apart by its own handler.
        if not isinstance(own, (_Nothing, *_PLAIN, list)) and not _is_array(own):
            return own
        own = {}
    children = {key: state_to_load(own.get(key, _NOTHING), child, array=array) for key, child in stored.items()}
    if type(own) is dict or not isinstance(own, type(stored)):
        return OrderedDict(children) if isinstance(stored, OrderedDict) else children
    made = copy.copy(own)  # with what an instance carries beside its items
    made.clear()
    made.update(children)
    return made


def _sequence(own: object, stored: list[Any] | tuple[Any, ...], array: Callable[[AbstractArray], object]) -> object:
    if not isinstance(own, list | tuple):
        if not isinstance(own, (_Nothing, *_PLAIN, dict)) and not _is_array(own):
            return own
        own = type(stored)()
    known = [*own[: len(stored)], *[_NOTHING] * (len(stored) - len(own))]
    children = [state_to_load(now, child, array=array) for now, child in zip(known, stored, strict=True)]
    if isinstance(stored, tuple):
        return type(own)(children) if isinstance(own, tuple) and not hasattr(own, "_fields") else tuple(children)
    if type(own) is list or not isinstance(own, list):
        return children
    made = copy.copy(own)
    made[:] = children
    return made
