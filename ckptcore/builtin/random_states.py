"""Generators of random numbers of NumPy and of the Python language, restored so that they go on bit for bit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptcore.builtin.stateful import state_to_load
from ckptcore.errors import TreeMismatchError
from ckptcore.protocols import CheckpointableHandler, Priority

if TYPE_CHECKING:
    import random

__all__ = ["NumpyGeneratorHandler", "NumpyRandomStateHandler", "PythonRandomHandler", "random_state_handler"]


class NumpyGeneratorHandler:
    """`numpy.random.Generator`: the state of its bit generator, of any kind. Not which children it has spawned."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: np.random.Generator) -> object:
        """The state as NumPy gives it: a dict with the name of the bit generator, ints and arrays, which are copies."""
        return value.bit_generator.state

    def unflatten(self, like: np.random.Generator, state: object) -> object:
        """The state itself, for ``like.bit_generator.state``."""
        return state

    def restore(self, target: np.random.Generator, state: Any) -> None:
        """Set the state.

        Raises:
            TreeMismatchError: if the bit generator is of another kind.
        """
        _check_kind(type(target.bit_generator).__name__, state)
        target.bit_generator.state = state


class NumpyRandomStateHandler:
    """`numpy.random.RandomState`, NumPy's older generator."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: np.random.RandomState) -> object:
        """The state as a dict, with arrays that are copies."""
        return value.get_state(legacy=False)

    def unflatten(self, like: np.random.RandomState, state: object) -> object:
        """The state itself, for ``like.set_state``."""
        return state

    def restore(self, target: np.random.RandomState, state: Any) -> None:
        """Set the state.

        Raises:
            TreeMismatchError: if the bit generator is of another kind.
        """
        _check_kind(str(target.get_state(legacy=False)["bit_generator"]), state)
        target.set_state(state)


class PythonRandomHandler:
    """`random.Random`: the state of its Mersenne Twister."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: random.Random) -> object:
        """The version, the 625 words as an array, and the number that `gauss` holds back."""
        version, words, gauss_next = value.getstate()
        return {"version": version, "state": np.array(words, np.uint32), "gauss_next": gauss_next}

    def flatten_to_load(self, value: random.Random, stored: object) -> object:
        """As it is stored: `gauss` may hold a number back in the one and not in the other."""
        return state_to_load(self.flatten(value), stored)

    def unflatten(self, like: random.Random, state: object) -> object:
        """The state itself, as `flatten` gives it."""
        return state

    def restore(self, target: random.Random, state: Any) -> None:
        """Set the state."""
        target.setstate((state["version"], tuple(state["state"].tolist()), state["gauss_next"]))


def _check_kind(expected: str, state: Any) -> None:
    found = state["bit_generator"]
    if found != expected:
        difference = f"the state is one of {found}, the generator has {expected}"
        raise TreeMismatchError(
            f"{difference}; make the generator with {found}, as it was when it was saved", [difference]
        )


_GENERATOR: Final = NumpyGeneratorHandler()
_RANDOM_STATE: Final = NumpyRandomStateHandler()
_RANDOM: Final = PythonRandomHandler()


def random_state_handler(value_type: type) -> CheckpointableHandler | None:
    """The handler for generators of a type; None for other types, and for those without this state (`SystemRandom`)."""
    # Both modules cost time to import, and nobody has a generator of theirs before.
    if "numpy.random" in sys.modules:
        if issubclass(value_type, np.random.Generator):
            return _GENERATOR
        if issubclass(value_type, np.random.RandomState):
            return _RANDOM_STATE
    python = getattr(sys.modules.get("random"), "Random", None)
    if python is not None and issubclass(value_type, python):
        return _RANDOM if getattr(value_type, "getstate", None) is python.getstate else None
    return None
