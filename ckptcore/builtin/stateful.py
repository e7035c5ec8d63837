"""Objects with methods to save and load their state."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority

__all__ = [
    "AwaitedLater",
    "DirectoryToAwait",
    "GetStateHandler",
    "StateDictHandler",
    "StateTreeHandler",
    "path_for_others",
    "required_names",
    "run",
    "run_first_phase",
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


T = TypeVar("T")

_LAST_TURNS: Final = 10
"""Turns of the event loop in which tasks may end that have nothing left to wait for."""

_TASKS_TOLD: Final = 5


class DirectoryToAwait:
    """A directory, where an object expects one that may not be there yet. This one is."""

    def __init__(self, path: Any) -> None:
        self._path = path

    @property
    def path(self) -> Any:
        """Where it is."""
        return self._path

    def __truediv__(self, name: Any) -> DirectoryToAwait:
        return DirectoryToAwait(self._path / name)

    async def await_creation(self) -> Any:
        """Its path, at once."""
        return self._path


class AwaitedLater:
    """A continuation that awaits what a first phase returned, in the event loop of that phase.

    One that is not called in the end closes the coroutine and the loop.
    """

    def __init__(self, loop: _Loop, rest: Awaitable[object]) -> None:
        self._loop = loop
        self._rest: Awaitable[object] | None = rest

    def __call__(self) -> None:
        """Await it. The thread is blocked until it is done.

        Raises:
            PluginError: if tasks of either phase go on after it.
        """
        rest, self._rest = self._rest, None
        if rest is not None:
            self._loop.run_last(lambda: rest)

    def __del__(self) -> None:
        # A save that fails elsewhere drops its continuations, which is no fault of whoever wrote the coroutine.
        if self._rest is not None:
            if inspect.iscoroutine(self._rest):
                self._rest.close()
            self._loop.drop()


def path_for_others(directory: Path) -> Any:
    """A path of etils where that is imported: objects that save themselves asynchronously are written for it."""
    make = getattr(sys.modules.get("etils.epath"), "Path", Path)
    return make(directory)


def run(begin: Callable[[], Awaitable[T]]) -> T:
    """Await what `begin` gives, in an event loop of its own, on this thread unless a loop runs in it already.

    Blocks until it is done. The event loop that a thread has set as its own stays as it is.

    Raises:
        PluginError: if tasks go on after it: what they do would be lost.
    """
    return _Loop().run_last(begin)


def run_first_phase(begin: Callable[[], Awaitable[object]]) -> AwaitedLater | None:
    """Await what `begin` gives as `run` does. Where that is something to await itself, the continuation awaits it.

    Tasks of the first phase wait until the continuation is called, and go on then.

    Raises:
        PluginError: if there is nothing to await, and tasks go on nevertheless.
    """
    loop = _Loop()
    rest = loop.run(begin)
    if inspect.isawaitable(rest):
        return AwaitedLater(loop, rest)
    loop.end()
    return None


class _Loop:
    """An event loop that threads may run one after the other. It ends with the first error."""

    def __init__(self) -> None:
        # Not asyncio.run, which takes away the event loop that the thread has.
        self._loop = asyncio.new_event_loop()

    def run(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` gives."""
        try:
            return _where_no_loop_runs(lambda: self._loop.run_until_complete(_awaited(begin)))
        except BaseException:
            _where_no_loop_runs(self._stop)
            raise

    def run_last(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` gives, and end.

        Raises:
            PluginError: as `end`.
        """
        result = self.run(begin)
        self.end()
        return result

    def end(self) -> None:
        """Wait for its threads, and close it.

        Raises:
            PluginError: if tasks are left. They are cancelled.
        """
        if left := _where_no_loop_runs(self._stop):
            more = f" and {len(left) - _TASKS_TOLD} more" if len(left) > _TASKS_TOLD else ""
            raise PluginError(
                f"tasks were still running when the object said that it was done: {', '.join(left[:_TASKS_TOLD])}{more}; what "
                "they do would be lost, so they were cancelled. Await them, or return from the first phase a coroutine that does"
            )

    def drop(self) -> None:
        """Close it, whatever is left in it. Runs nothing."""
        self._loop.set_exception_handler(lambda loop, context: None)  # which would be told of the tasks that are left
        self._loop.close()

    def _stop(self) -> list[str]:
        loop = self._loop
        try:
            left = loop.run_until_complete(_cancel_what_is_left())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            return left
        finally:
            loop.close()


async def _awaited(begin: Callable[[], Awaitable[T]]) -> T:
    return await begin()


async def _cancel_what_is_left() -> list[str]:
    """The coroutines of those tasks of this loop that go on, which are cancelled."""
    for _ in range(_LAST_TURNS):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # Who has cancelled a task himself wants nothing more of it.
    left = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks if not task.cancelling())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return left


def _where_no_loop_runs(work: Callable[[], T]) -> T:
    """Do something in this thread, or in another one if an event loop runs in this. Blocks until it is done."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def work_there() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            result.set_exception(error)

    thread = threading.Thread(target=work_there, name="ckptcore-await")
    thread.start()
    thread.join()
    return result.result()


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


class StateDictHandler:
    """Objects with ``state_dict()`` and ``load_state_dict(state)``: data loaders, schedulers, metrics.

    Each process has a state of its own. What is loaded has the structure that was saved, also where the object is new and
    has another state as yet. ``load(location, obj)`` gives the state; ``load_into`` gives it to the object.
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


class GetStateHandler:
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


class StateTreeHandler:
    """Objects with ``get_state_tree()`` and ``set_state_tree(tree)``: models with their optimizer and metrics.

    These setters pass over what they do not know, without a word. So a load asks for exactly the variables that the object
    has, and the difference is told. Two may be there later: variables of an optimizer that made no step, which is built;
    and metrics, which are started anew where the object has none yet.

    Every process is taken to hold the same arrays, or shards of them.
    """

    priority = Priority.PROTOCOL
    per_process = False

    def flatten(self, value: Any) -> object:
        """The tree of its variables.

        Raises:
            UnsupportedLeafError: if it is to have an optimizer and has none yet.
        """
        if getattr(value, "optimizer", value) is None:
            raise UnsupportedLeafError(
                f"a {type(value).__qualname__} without an optimizer gives no state tree; compile it first, or save its weights"
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
