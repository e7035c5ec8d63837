"""Objects that write their own files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from ckptcore.builtin.stateful import required_parameters
from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    PluginError,
    UnsupportedLeafError,
)
from ckptcore.model.metadata import check_key
from ckptcore.model.tree import JSON
from ckptcore.protocols import (
    Continuation,
    FilesHandler,
    Priority,
)

_EMPTY: Final = "empty_directories"

_MAX_PARTS: Final = 1 << 17
"""Maximum number of directories on the paths of all empty directories together. Without this limit, each path in a
small hostile root could create hundreds of directories."""

_MAX_DEPTH: Final = 200


def state_of_files(empty: Sequence[str]) -> JSON:
    """Return the state that records empty directories, because the keys of files do not show them.

    Raises:
        UnsupportedLeafError: there are too many directories, or a directory is too deep.
    """
    if not empty:
        return None
    if (problem := _problem(empty)) is not None:
        raise UnsupportedLeafError(
            f"the object wrote empty directories, and {problem}; write fewer, or a file into each"
        )
    return {_EMPTY: list(empty)}


def empty_directories(state: JSON) -> Sequence[str]:
    """Return the empty directories of a state, which may be hostile.

    Raises:
        CorruptCheckpointError: the state is invalid.
    """
    if state is None:
        return ()
    names = state.get(_EMPTY, []) if isinstance(state, dict) else None
    if not isinstance(names, list):
        raise CorruptCheckpointError(f"the table of files is {str(state)[:80]!r}; load another checkpoint")
    keys = []
    for key in names:
        if not isinstance(key, str):
            raise CorruptCheckpointError(
                f"the name of an empty directory is {str(key)[:80]!r}, not text; load another checkpoint"
            )
        try:
            keys.append(check_key(key))
        except InvalidLocationError as error:
            raise CorruptCheckpointError(f"an empty directory has an invalid name: {error}") from error
    if (problem := _problem(keys)) is not None:
        raise CorruptCheckpointError(f"the list of empty directories is invalid: {problem}; load another checkpoint")
    return keys


def _problem(empty: Sequence[str]) -> str | None:
    depths = [key.count("/") + 1 for key in empty]
    if max(depths, default=0) > _MAX_DEPTH:
        return f"one of them is {max(depths)} directories deep, where {_MAX_DEPTH} are allowed"
    if sum(depths) > _MAX_PARTS:
        return f"their paths have {sum(depths)} directories, where {_MAX_PARTS} are allowed"
    return None


class SavesToDirectoryHandler:
    """Objects with ``save(directory)`` and ``load(directory)``: `ckptcore.protocols.StatefulCheckpointable`."""

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Save the object. If its ``save`` returns a function, that function is the continuation.

        Raises:
            PluginError: ``save`` returns an awaitable, which this handler does not await.
        """
        rest = value.save(directory)
        if inspect.isawaitable(rest):
            if inspect.iscoroutine(rest):
                rest.close()
            package = _async_handler("an object whose save returns an awaitable").__module__.partition(".")[0]
            raise PluginError(
                f"{type(value).__qualname__}.save returned {type(rest).__name__}, expected None or a function that "
                "does the rest. Write it as `async def save` and `async def load`, or pass "
                "Context(plugins=PluginOptions(handlers={type: SavesToDirectoryAsyncHandler()})) with the handler of "
                f"{package}"
            )
        return rest if callable(rest) else None

    def load(self, like: Any, directory: Path) -> object:
        """Load the object in place, and return it."""
        like.load(directory)
        return like


_FILES: Final = SavesToDirectoryHandler()


def files_handler(value_type: type) -> FilesHandler | None:
    """Return the handler for types whose `save` and `load` require one parameter, called ``directory``; otherwise None.

    The name of the parameter matters, because many classes have a `save` and a `load` of another kind. Also return None
    if only one of the two methods is asynchronous.

    Raises:
        MissingDistributionError: both methods are asynchronous, and the distribution for such objects is not installed.
    """
    if any(required_parameters(value_type, name) != ("directory",) for name in ("save", "load")):
        return None
    is_async = [inspect.iscoroutinefunction(inspect.unwrap(getattr(value_type, name))) for name in ("save", "load")]
    if is_async[0] is not is_async[1]:
        return None
    return _async_handler(f"the asynchronous {value_type.__qualname__}.save")() if is_async[0] else _FILES


def _async_handler(purpose: str) -> type[FilesHandler]:
    """Return the type of the handler for objects whose `save` and `load` are coroutines.

    Raises:
        MissingDistributionError: the distribution of the handler is not installed.
    """
    from ckptcore.distributions import import_name  # only asynchronous objects need it

    return cast(type[FilesHandler], import_name("SavesToDirectoryAsyncHandler", purpose=purpose))
