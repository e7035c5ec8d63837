"""Sets and deques: collections that are stored as lists, with the elements that the checkpoint has."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ckptcore.builtin.stateful import state_to_load
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.protocols import CheckpointableHandler, Priority

_IN_SETS: Final = (type(None), bool, int, float, complex, str, bytes, np.generic)


class DequeHandler(CheckpointableHandler):
    """`collections.deque` and subclasses. A load keeps the ``maxlen`` of the requested deque."""

    priority = Priority.EXACT
    is_object = False

    def flatten(self, value: deque[Any]) -> object:
        """Return the elements as a list."""
        return list(value)

    def flatten_to_load(self, value: deque[Any], stored: object) -> object:
        """Return the stored elements, with the types of the own ones.

        Raises:
            TreeMismatchError: no list is stored, or one that is longer than ``maxlen``.
        """
        elements = _expect_list(value, stored)
        if value.maxlen is not None and len(elements) > value.maxlen:
            difference = f"{len(elements)} elements are stored, a deque of at most {value.maxlen} is requested"
            raise TreeMismatchError(f"{difference}; request one with maxlen={len(elements)} or more", [difference])
        return state_to_load(list(value), list(elements))

    def unflatten(self, like: deque[Any], state: Any) -> object:
        """Return a deque with the attributes of `like` and the loaded elements."""
        result = copy.copy(like)
        getattr(result, "__dict__", {}).update(getattr(like, "__dict__", {}))  # which `copy` of a deque leaves out
        self.restore(result, state)
        return result

    def restore(self, target: deque[Any], state: Any) -> None:
        """Replace the elements."""
        target.clear()
        target.extend(state)


class SetHandler(CheckpointableHandler):
    """`set` and subclasses, of numbers, text, bytes and None, and tuples of these."""

    priority = Priority.EXACT
    is_object = False

    def flatten(self, value: set[Any]) -> object:
        """Return the elements as a sorted list, which is equal on all processes.

        Raises:
            UnsupportedLeafError: an element is of another type.
        """
        for element in value:
            _expect_plain(element)
        try:
            return sorted(value)
        except TypeError:  # elements of several types
            return sorted(value, key=lambda element: (type(element).__qualname__, repr(element)))

    def flatten_to_load(self, value: set[Any], stored: object) -> object:
        """Return the stored elements."""
        return state_to_load([], list(_expect_list(value, stored)))

    def unflatten(self, like: set[Any], state: Any) -> object:
        """Return a set with the attributes of `like` and the loaded elements."""
        result = copy.copy(like)
        self.restore(result, state)
        return result

    def restore(self, target: set[Any], state: Any) -> None:
        """Replace the elements."""
        target.clear()
        target.update(state)


_DEQUES: Final = DequeHandler()
_SETS: Final = SetHandler()


def growing_handler(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for collections of a type, or None."""
    if issubclass(value_type, deque):
        return _DEQUES
    return _SETS if issubclass(value_type, set) else None


def _expect_list(value: object, stored: object) -> Sequence[Any]:
    if isinstance(stored, list | tuple):
        return stored
    difference = f"a {type(value).__qualname__} is requested, a {type(stored).__qualname__} is stored"
    raise TreeMismatchError(f"{difference}; request what is stored", [difference])


def _expect_plain(element: object) -> None:
    if type(element) is tuple:
        for child in element:
            _expect_plain(child)
    elif type(element) not in _IN_SETS and not isinstance(element, np.generic):
        raise UnsupportedLeafError(
            f"a set with a {type(element).__module__}.{type(element).__qualname__} is not stored, only one of numbers, "
            "text, bytes and None, and tuples of these: save a list of its elements"
        )
