"""Objects with methods to save and load their state."""

from __future__ import annotations

import copy
import enum
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptcore.errors import (
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.model import PARTS, AbstractArray
from ckptcore.protocols import (
    CheckpointableHandler,
    Priority,
)

if TYPE_CHECKING:
    import random


_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def required_parameters(value_type: type, name: str) -> tuple[str, ...] | None:
    """Return the required positional parameters of a method, without ``self``.

    Return None if instances have no such method, if it requires keyword-only arguments, or if it has no signature.
    """
    method = _method_of_instances(value_type, name)
    if method is None:
        return None
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return None  # not written in Python
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


def accepts_arguments(value_type: type, name: str, count: int) -> bool:
    """Return True if a method can be called with `count` positional arguments, or if its signature is unknown."""
    method = _method_of_instances(value_type, name)
    if method is None:
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


def _method_of_instances(value_type: type, name: str) -> Callable[..., object] | None:
    """Return a method that takes an instance; None if there is no such method, or if it is static or a class method."""
    method = getattr(value_type, name, None)
    is_static = isinstance(inspect.getattr_static(value_type, name, None), staticmethod | classmethod)
    return method if callable(method) and not is_static else None


class _Missing:
    __slots__ = ()


_MISSING: Final = _Missing()
"""Placeholder for the object's value if a value is stored at a path where the object has none."""

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that a checkpoint stores with their type."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""The text of an integer of 64 bits, as other libraries write it for a key."""

_IN_BYTES: Final = r"u?int[1-7]|float4_.*"
"""Pattern of framework dtypes with elements smaller than a byte. Arrays of such a dtype are stored as bytes,
and the dtype is not stored."""


def state_to_load(own: object, stored: Any, *, array: Callable[[AbstractArray], object] = lambda stored: stored) -> Any:
    """Return an abstract state with the structure of `stored`, for `CheckpointableHandler.flatten_to_load`.

    A checkpoint does not store all types. If the object's own state has a value at the same path, that value determines
    the type, such as the framework of an array or the subclass of a dict. Otherwise `array` returns the abstract leaf
    of an array, and containers load as built-in types. Shapes and dtypes come from
    the checkpoint, if the framework can make such an array.

    Args:
        own: the current state of the object.
        stored: the stored state in Python's containers, with `AbstractArray` for arrays.
        array: returns the abstract leaf for an array that is not in the object's state; by default a NumPy array.
    """
    if isinstance(stored, AbstractArray):
        return _array(own, stored, array)
    if isinstance(stored, dict):
        return _mapping(own, stored, array)
    if isinstance(stored, list | tuple):
        return _sequence(own, stored, array)
    if isinstance(own, enum.Enum):
        return own if stored is not None else None  # tested first, because a member may also be an int or a str
    if stored is None or isinstance(own, (_Missing, *_PLAIN, dict, list, tuple)) or _is_array(own):
        return stored
    return own  # a leaf that only its handler can build


def _array(own: object, stored: AbstractArray, array: Callable[[AbstractArray], object]) -> object:
    if isinstance(own, np.ndarray | np.generic):
        return AbstractArray(stored.shape, stored.dtype)
    if not _is_array(own):
        return array(stored)
    # Do not reuse the object's own arrays: its setter copies into them, and other objects may share them. If the
    # framework cannot make a similar array, return the array itself as the abstract leaf.
    make = getattr(own, "new_empty", None)
    if make is not None:
        name = _element_name(own)
        if name == stored.dtype.name or re.fullmatch(_IN_BYTES, name):
            return make(stored.shape)
        dtype = _dtype_of_same_module(own, stored.dtype.name)
        return array(stored) if dtype is None else make(stored.shape, dtype=dtype)
    return own if _is_like(own, stored) else _of_namespace(own, stored)


def _element_name(own: Any) -> str:
    """Return the name of a dtype without the prefix of its framework."""
    return str(own.dtype).rpartition(".")[2]


def _dtype_of_same_module(own: Any, name: str) -> object | None:
    """Return the dtype called `name` from the module that defines the dtypes of an array; None for dtypes of NumPy."""
    kind = type(own.dtype)
    dtype = getattr(sys.modules.get(kind.__module__), name, None)
    return dtype if isinstance(dtype, kind) else None


def _is_like(own: Any, stored: AbstractArray) -> bool:
    # Accept a dtype of another library, such as the dtype of random keys: it says nothing about the stored form.
    return not isinstance(own.dtype, np.dtype) or (tuple(own.shape) == stored.shape and own.dtype == stored.dtype)


def _of_namespace(own: Any, stored: AbstractArray) -> object:
    """Make an array with the framework and device of `own` by the array API standard. If that fails, return `own`."""
    try:
        return own.__array_namespace__().empty(stored.shape, dtype=stored.dtype, device=own.device)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # The framework does not implement the standard, lacks the dtype, cannot divide the shape over its devices, or
        # has deleted the array.
        return own


def _is_array(own: object) -> bool:
    return hasattr(own, "shape") and hasattr(own, "dtype")


def _mapping(own: object, stored: dict[Any, Any], array: Callable[[AbstractArray], object]) -> object:
    if not isinstance(own, dict):
        # The object has another container type here, or an array that is stored as its parts. The handler of that value
        # takes it apart.
        if not isinstance(own, (_Missing, *_PLAIN, list)) and (PARTS in stored or not _is_array(own)):
            return own
        own = {}
    keys = _keys_like(own, stored)
    children = {key: state_to_load(own.get(key, _MISSING), stored[text], array=array) for key, text in keys.items()}
    if type(own) is dict or not isinstance(own, type(stored)):
        return OrderedDict(children) if isinstance(stored, OrderedDict) else children
    result = copy.copy(own)  # keeps attributes of the instance
    result.clear()
    result.update(children)
    return result


def _keys_like(own: dict[Any, Any], stored: dict[Any, Any]) -> dict[Any, Any]:
    """Map each key to request to its stored key. Some formats have only text keys, but the object may have integers."""
    of_text = {str(key): key for key in own if not isinstance(key, str)}
    if not of_text:
        return {key: key for key in stored}
    all_integers = all(type(key) is int for key in own)

    def requested(key: Any) -> Any:
        if not isinstance(key, str) or key in own:
            return key
        own_key = int(key) if all_integers and _INTEGER.fullmatch(key) else of_text.get(key, key)
        return key if own_key in stored else own_key

    return {requested(key): key for key in stored}


def _sequence(own: object, stored: list[Any] | tuple[Any, ...], array: Callable[[AbstractArray], object]) -> object:
    if not isinstance(own, list | tuple):
        if not isinstance(own, (_Missing, *_PLAIN, dict)) and not _is_array(own):
            return own
        own = type(stored)()
    known = [*own[: len(stored)], *[_MISSING] * (len(stored) - len(own))]
    children = [state_to_load(now, child, array=array) for now, child in zip(known, stored, strict=True)]
    if isinstance(stored, tuple):
        return type(own)(children) if isinstance(own, tuple) and not hasattr(own, "_fields") else tuple(children)
    if type(own) is list or not isinstance(own, list):
        return children
    result = copy.copy(own)
    result[:] = children
    return result


def undo_by(get: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], None]:
    """Copy the present state, and return a function that puts the copy back, for `CheckpointableHandler.undo`.

    Args:
        get: returns the state of an object.
        put: sets the state. Not called if the state is unchanged.
    """
    before = _copied(get())

    def undo() -> None:
        # An object that refused a state has usually changed nothing, and may refuse its own state as well.
        if not _are_equal(get(), before):
            put(before)

    return undo


def _copied(state: Any) -> Any:
    """Return a copy of a state. The copy shares values that cannot be copied."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _copied(child)) for key, child in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    if state_handler(type(state)) is not None:
        return state  # an object in the state of another object has an `undo` of its own
    try:
        return copy.deepcopy(state)
    except (TypeError, RuntimeError):  # a lock, or a tensor computed with gradients: no load changes such values
        return state


def _are_equal(state: Any, other: Any) -> bool:
    """Return True if two states are certainly equal."""
    if type(state) is not type(other):
        return False
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_are_equal(state[key], other[key]) for key in state)
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(_are_equal, state, other))
    try:
        if _is_array(state):
            return np.array_equal(np.asarray(state), np.asarray(other))
        return bool(state == other)
    except (TypeError, ValueError, RuntimeError):  # arrays of some devices, or a type with an unusual comparison
        return False


class StateDictHandler(CheckpointableHandler):
    """Objects with ``state_dict()`` and ``load_state_dict(state)``: data loaders, schedulers, metrics.

    Each process has its own state. A load returns the state with the structure that was saved, even if the object is
    new and its state has another structure. ``load(location, obj)`` returns the state; ``load_into`` loads it into the
    object.
    """

    priority = Priority.PROTOCOL
    per_process = True

    _getter = "state_dict"
    _setter = "load_state_dict"

    def flatten(self, value: Any) -> object:
        """Return the state."""
        return getattr(value, self._getter)()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the stored state, with the types of the object's own state."""
        return state_to_load(getattr(value, self._getter)(), stored)

    def unflatten(self, like: Any, state: object) -> object:
        """Return the state, which the program passes to the setter."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the state."""
        getattr(target, self._setter)(state)

    def undo(self, target: Any) -> Callable[[], None]:
        """Return a function that sets a copy of the present state."""
        return undo_by(getattr(target, self._getter), getattr(target, self._setter))


class GetStateHandler(StateDictHandler):
    """Objects with ``get_state()`` and ``set_state(state)``: iterators over data. A state is a tree or bytes.

    In all other respects it is equal to `StateDictHandler`.
    """

    _getter = "get_state"
    _setter = "set_state"


class StateTreeHandler(CheckpointableHandler):
    """Objects with ``get_state_tree()`` and ``set_state_tree(tree)``: models with their optimizer and metrics.

    ``set_state_tree`` silently ignores unknown variables. So a load requests exactly the variables of the object, and
    reports differences. There are two exceptions for variables that a new object may lack: the load builds the
    variables of an optimizer that has made no step, and it loads metrics as they are stored.

    Every process is assumed to hold the same arrays, or shards of them.
    """

    priority = Priority.PROTOCOL

    def flatten(self, value: Any) -> object:
        """Return the tree of its variables.

        Raises:
            UnsupportedLeafError: the optimizer is missing.
        """
        if getattr(value, "optimizer", value) is None:
            raise UnsupportedLeafError(
                f"a {type(value).__qualname__} without an optimizer has no state tree; compile it first, or save the "
                "list get_weights(), which set_weights takes"
            )
        return value.get_state_tree()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the tree of its variables, including the variables of its optimizer, with the stored metrics."""
        tree = self.flatten(value)
        if not isinstance(stored, dict) or not isinstance(tree, dict):
            return tree
        optimizer = getattr(value, "optimizer", None)
        if stored.get(_OPTIMIZER) and not getattr(optimizer, "built", True):
            optimizer.build(value.trainable_variables)  # type: ignore[union-attr]  # None has no attribute `built`
            tree = value.get_state_tree()
        if stored.get(_METRICS):
            tree = {**tree, _METRICS: state_to_load(tree.get(_METRICS), stored[_METRICS])}
        return tree

    def unflatten(self, like: Any, state: object) -> object:
        """Return the tree, for ``like.set_state_tree``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the variables."""
        target.set_state_tree(state)

    def may_refuse(self, target: Any, request: object) -> bool:
        """Return False: a load requests exactly the variables of the object."""
        return False


_OPTIMIZER: Final = "optimizer_variables"
_METRICS: Final = "metrics_variables"

_PROTOCOLS: Final[tuple[tuple[str, str, CheckpointableHandler], ...]] = (
    # Tried first: such a model may also have the state dict of its framework, which lacks the optimizer.
    ("get_state_tree", "set_state_tree", StateTreeHandler()),
    ("state_dict", "load_state_dict", StateDictHandler()),
    ("get_state", "set_state", GetStateHandler()),
)
"""Getter, setter and handler of each protocol, in the order of precedence."""


def state_handler(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for objects with the methods of a protocol; None for other types."""
    for getter, setter, handler in _PROTOCOLS:
        if accepts_arguments(value_type, getter, 0) and accepts_arguments(value_type, setter, 1):
            return handler
    return None


class _RandomHandler(CheckpointableHandler):
    """A random generator, with its state as a dict."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the generator's own state.

        Raises:
            TreeMismatchError: the stored state is of another type of bit generator. The keys of the two states differ,
                so a load that allows differences would mix the states.
        """
        own: Any = self.flatten(value)
        expected = own.get("bit_generator", "another one")  # a bit generator of another library may have no name
        kind = stored.get("bit_generator") if isinstance(stored, dict) else None
        if isinstance(kind, str) and kind != expected:
            difference = f"the state is one of {kind}, the generator has {expected}"
            raise TreeMismatchError(f"{difference}. Create the generator with {kind}, as it was saved", [difference])
        return own

    def unflatten(self, like: Any, state: object) -> object:
        """Return the state, in the form of `flatten`."""
        return state

    def undo(self, target: Any) -> Callable[[], None]:
        """Return a function that sets the present state."""
        state = self.flatten(target)
        return lambda: self.restore(target, state)


class NumpyGeneratorHandler(_RandomHandler):
    """`numpy.random.Generator`: the state of its bit generator. The number of spawned children is not saved."""

    def flatten(self, value: np.random.Generator) -> object:
        """Return the state in NumPy's form: a dict with the name of the bit generator, ints, and copies of arrays."""
        return value.bit_generator.state

    def restore(self, target: np.random.Generator, state: Any) -> None:
        """Set the state."""
        target.bit_generator.state = state


class NumpyRandomStateHandler(_RandomHandler):
    """`numpy.random.RandomState`, NumPy's older generator."""

    def flatten(self, value: np.random.RandomState) -> object:
        """Return the state as a dict with copies of arrays."""
        return value.get_state(legacy=False)

    def restore(self, target: np.random.RandomState, state: Any) -> None:
        """Set the state."""
        target.set_state(state)


class PythonRandomHandler(_RandomHandler):
    """`random.Random`: the state of its Mersenne Twister."""

    def flatten(self, value: random.Random) -> object:
        """Return the version, the 625 words as an array, and the cached number of `gauss`."""
        version, words, gauss_next = value.getstate()
        return {"version": version, "state": np.array(words, np.uint32), "gauss_next": gauss_next}

    def flatten_to_load(self, value: random.Random, stored: object) -> object:
        """Return the stored state, because only one of the two states may have a cached number of `gauss`."""
        return state_to_load(self.flatten(value), stored)

    def restore(self, target: random.Random, state: Any) -> None:
        """Set the state."""
        target.setstate((state["version"], tuple(state["state"].tolist()), state["gauss_next"]))


_GENERATOR: Final = NumpyGeneratorHandler()
_RANDOM_STATE: Final = NumpyRandomStateHandler()
_RANDOM: Final = PythonRandomHandler()


def random_state_handler(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for random generators of a type; None for other types.

    Also return None for subclasses of `random.Random` with their own ``getstate``, such as `SystemRandom`, which has no
    state.
    """
    # Do not import the modules: it is slow, and values of their types exist only if they are already imported.
    if "numpy.random" in sys.modules:
        if issubclass(value_type, np.random.Generator):
            return _GENERATOR
        if issubclass(value_type, np.random.RandomState):
            return _RANDOM_STATE
    python = getattr(sys.modules.get("random"), "Random", None)
    if python is not None and issubclass(value_type, python):
        return _RANDOM if getattr(value_type, "getstate", None) is python.getstate else None
    return None
