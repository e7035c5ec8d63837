"""Objects with methods to save and load their state."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority

if TYPE_CHECKING:
    import random

__all__ = [
    "GetStateHandler",
    "NumpyGeneratorHandler",
    "NumpyRandomStateHandler",
    "PythonRandomHandler",
    "StateDictHandler",
    "StateTreeHandler",
    "random_state_handler",
    "required_names",
    "state_handler",
    "state_to_load",
    "takes_only",
]

_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def required_names(value_type: type, name: str) -> tuple[str, ...] | None:
    """The parameters that a method must be given, without ``self``; None if there is no such method of instances.

    Raises:
        ValueError: if the method is not written in Python and does not tell.
    """
    method = getattr(value_type, name, None)
    if method is None or not callable(method):
        return None
    if isinstance(inspect.getattr_static(value_type, name, None), staticmethod | classmethod):
        return None
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return None  # not even ``self``
    if parameters[0].kind in _BY_POSITION:
        parameters = parameters[1:]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if any(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in required):
        return None
    return tuple([parameter.name for parameter in required])


def takes_only(value_type: type, name: str, count: int) -> bool:
    """Whether a method can be called with `count` arguments by position; one that does not tell is believed to."""
    method = getattr(value_type, name, None)
    if method is None or not callable(method):
        return False
    if isinstance(inspect.getattr_static(value_type, name, None), staticmethod | classmethod):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # not written in Python
    try:
        signature.bind(*[None] * (count + 1))
    except TypeError:
        return False
    return True


class _Nothing:
    __slots__ = ()


_NOTHING: Final = _Nothing()
"""The object has nothing at this place now."""

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
"""Values that say themselves what they are, and come back so."""

_IN_BYTES: Final = r"u?int[1-7]|float4_.*"
"""Dtypes of frameworks with elements below one byte: their arrays are stored as bytes, without the dtype."""


def state_to_load(own: object, stored: Any, *, array: Callable[[AbstractArray], object] = lambda stored: stored) -> Any:
    """An abstract state with the structure of `stored`, whatever structure the object's own state has.

    For `CheckpointableHandler.flatten_to_load`. A checkpoint does not tell all types. Where the own state has
    something at the same place, it does: the array of which framework, which subclass of dict. Shapes and dtypes are
    those that are stored. Where it has nothing, arrays come back as `array` asks, and containers as Python's.

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
    # The object's own arrays are left to its setter: they may be the arrays of other objects too. Those that cannot
    # make others like themselves are asked for as they are.
    make = getattr(own, "new_empty", None)
    if make is not None:
        name = _element_name(own)
        if name == stored.dtype.name or re.fullmatch(_IN_BYTES, name):
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
    """Convert to the framework and device of another array, by the array API standard, if it implements that."""
    try:
        return own.__array_namespace__().empty(stored.shape, dtype=stored.dtype, device=own.device)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # No such framework; or it has no such dtype, cannot divide this shape over the devices, or has let go of the
        # array.
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


class StateDictHandler(CheckpointableHandler):
    """Objects with ``state_dict()`` and ``load_state_dict(state)``: data loaders, schedulers, metrics.

    Each process has a state of its own. What is loaded has the structure that was saved, also where the object is new
    and has another state as yet. ``load(location, obj)`` gives the state; ``load_into`` gives it to the object.
    """

    priority = Priority.PROTOCOL
    per_process = True

    def flatten(self, value: Any) -> object:
        """The state dict."""
        return value.state_dict()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places."""
        return state_to_load(value.state_dict(), stored)

    def unflatten(self, like: Any, state: object) -> object:
        """The state itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Load the state dict."""
        target.load_state_dict(state)


class GetStateHandler(CheckpointableHandler):
    """Objects with ``get_state()`` and ``set_state(state)``: iterators over data. A state may be a tree, or bytes.

    Otherwise as `StateDictHandler`.
    """

    priority = Priority.PROTOCOL
    per_process = True

    def flatten(self, value: Any) -> object:
        """The state."""
        return value.get_state()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places."""
        return state_to_load(value.get_state(), stored)

    def unflatten(self, like: Any, state: object) -> object:
        """The state itself, for ``like.set_state``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the state."""
        target.set_state(state)


class StateTreeHandler(CheckpointableHandler):
    """Objects with ``get_state_tree()`` and ``set_state_tree(tree)``: models with their optimizer and metrics.

    These setters pass over what they do not know, without a word. So a load asks for exactly the variables that the
    object has, and the difference is told. Two may be there later: variables of an optimizer that made no step, which
    is built; and metrics, which are started anew where the object has none yet.

    Every process is taken to hold the same arrays, or shards of them.
    """

    priority = Priority.PROTOCOL

    def flatten(self, value: Any) -> object:
        """The tree of its variables.

        Raises:
            UnsupportedLeafError: if it is to have an optimizer and has none yet.
        """
        if getattr(value, "optimizer", value) is None:
            raise UnsupportedLeafError(
                f"a {type(value).__qualname__} without an optimizer gives no state tree; compile it first, or save "
                "its weights"
            )
        return value.get_state_tree()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """The tree of its variables, those of its optimizer too, with the metrics that are stored."""
        tree = self.flatten(value)
        if not isinstance(stored, dict) or not isinstance(tree, dict):
            return tree
        optimizer = getattr(value, "optimizer", None)
        if stored.get(_OPTIMIZER) and not getattr(optimizer, "built", True):
            optimizer.build(value.trainable_variables)  # type: ignore[union-attr]  # None has nothing that is False
            tree = value.get_state_tree()
        if stored.get(_METRICS):
            tree = {**tree, _METRICS: state_to_load(tree.get(_METRICS), stored[_METRICS])}
        return tree

    def unflatten(self, like: Any, state: object) -> object:
        """The tree itself, for ``like.set_state_tree``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the variables."""
        target.set_state_tree(state)


_OPTIMIZER: Final = "optimizer_variables"
_METRICS: Final = "metrics_variables"

_PROTOCOLS: Final[tuple[tuple[str, str, CheckpointableHandler], ...]] = (
    # First, because such a model may have a state dict too, from the framework below it, without its optimizer.
    ("get_state_tree", "set_state_tree", StateTreeHandler()),
    ("state_dict", "load_state_dict", StateDictHandler()),
    ("get_state", "set_state", GetStateHandler()),
)
"""How a state is got, how it is set, and who does it, in the order of precedence."""


def state_handler(value_type: type) -> CheckpointableHandler | None:
    """The handler for objects of a type that has the methods of one of the protocols; None for other types."""
    for getter, setter, handler in _PROTOCOLS:
        if takes_only(value_type, getter, 0) and takes_only(value_type, setter, 1):
            return handler
    return None


class NumpyGeneratorHandler(CheckpointableHandler):
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


class NumpyRandomStateHandler(CheckpointableHandler):
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


class PythonRandomHandler(CheckpointableHandler):
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
    # Both modules are slow to import, and no value is a generator of theirs before they are imported.
    if "numpy.random" in sys.modules:
        if issubclass(value_type, np.random.Generator):
            return _GENERATOR
        if issubclass(value_type, np.random.RandomState):
            return _RANDOM_STATE
    python = getattr(sys.modules.get("random"), "Random", None)
    if python is not None and issubclass(value_type, python):
        return _RANDOM if getattr(value_type, "getstate", None) is python.getstate else None
    return None
