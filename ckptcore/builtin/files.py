"""Objects that write files of their own, and the layout of these files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ckptcore.builtin.stateful import required_names
from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    PluginError,
    UnsupportedLeafError,
)
from ckptcore.model import Receipt, TreeMetadata
from ckptcore.model.objects import check_key
from ckptcore.model.tree import JSON
from ckptcore.planning import ChunkTable
from ckptcore.protocols import (
    ChunkIndex,
    Continuation,
    FilesHandler,
    Layout,
    Priority,
    Snapshot,
    WriteStore,
)

__all__ = [
    "FilesLayout",
    "SavesToDirectoryAsyncHandler",
    "SavesToDirectoryHandler",
    "empty_directories",
    "files_handler",
    "state_of_files",
]

_EMPTY: Final = "empty_directories"

_MOST_PARTS: Final = 1 << 17
"""Directories on the ways to all empty ones: a few bytes of a hostile root make one on the disk of who loads it."""

_MOST_DEEP: Final = 200


class FilesLayout(Layout):
    """Stores no tree. The core chooses it for objects that write files of their own; it has no public name."""

    name = "files"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse every leaf."""
        if tree.leaves:
            raise UnsupportedLeafError(
                "files of an object hold no arrays and no values of a tree; choose another layout"
            )

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Nothing is left to write."""
        return None

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Nothing is left to write: what `state_of_files` gave to the one process that wrote is kept."""
        return receipts[0].state

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return an empty index: there are no arrays."""
        return ChunkTable(tree, {"files": [], "leaf": [], "file": [], "offset": []})


def state_of_files(empty: Sequence[str]) -> JSON:
    """The state of files among which there are these empty directories: no file tells of them.

    Raises:
        UnsupportedLeafError: if they are too many, or too deep.
    """
    if not empty:
        return None
    if (problem := _problem(empty)) is not None:
        raise UnsupportedLeafError(
            f"the object wrote empty directories, and {problem}; write fewer, or a file into each"
        )
    return {_EMPTY: list(empty)}


def empty_directories(state: JSON) -> Sequence[str]:
    """The empty directories that a state tells of. It may be hostile.

    Raises:
        CorruptCheckpointError: if it is no such state.
    """
    if state is None:
        return ()
    found = state.get(_EMPTY, []) if isinstance(state, dict) else None
    if not isinstance(found, list):
        raise CorruptCheckpointError(f"the state of the layout 'files' is {str(state)[:80]!r}; load another checkpoint")
    keys = []
    for key in found:
        if not isinstance(key, str):
            raise CorruptCheckpointError(f"an empty directory is called {str(key)[:80]!r}; load another checkpoint")
        try:
            keys.append(check_key(key))
        except InvalidLocationError as error:
            raise CorruptCheckpointError(f"an empty directory is listed that cannot be: {error}") from error
    if (problem := _problem(keys)) is not None:
        raise CorruptCheckpointError(f"empty directories are listed, and {problem}; load another checkpoint")
    return keys


def _problem(empty: Sequence[str]) -> str | None:
    depths = [key.count("/") + 1 for key in empty]
    if max(depths, default=0) > _MOST_DEEP:
        return f"one of them is {max(depths)} directories deep, where {_MOST_DEEP} are allowed"
    if sum(depths) > _MOST_PARTS:
        return f"there are {sum(depths)} directories on the ways to them, where {_MOST_PARTS} are allowed"
    return None


class SavesToDirectoryHandler:
    """Objects with ``save(directory)`` and ``load(directory)``: `ckptcore.protocols.StatefulCheckpointable`."""

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Let it save itself; a function that it returns is the rest of its work.

        Raises:
            PluginError: if it returns an awaitable, which this handler would not await.
        """
        rest = value.save(directory)
        if inspect.isawaitable(rest):
            if inspect.iscoroutine(rest):
                rest.close()
            raise PluginError(
                f"{type(value).__qualname__}.save returned {type(rest).__name__}, expected None or a function that "
                "does the rest; write it as `async def save` and load as `async def load`, or give "
                "Context(plugins=PluginOptions(handlers={type: SavesToDirectoryAsyncHandler()}))"
            )
        return rest if callable(rest) else None

    def load(self, like: Any, directory: Path) -> object:
        """Let it load itself: the object, restored in place."""
        like.load(directory)
        return like


class SavesToDirectoryAsyncHandler:
    """Objects with ``async save(directory)``, which returns an awaitable for the background, and ``async load``.

    This is how objects save themselves with Orbax: its ``StatefulCheckpointable``. A `directory` to save to has
    ``await_creation()``, which gives the path; one to load from is a path.
    """

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Run the first phase on the thread of the caller, and leave what it returns to the continuation.

        Both run in one event loop, which does not run between them.

        Raises:
            PluginError: if it returns nothing to await and leaves tasks running; the continuation raises it for its
                tasks.
        """
        from ckptcore.builtin.awaiting import DirectoryToAwait, path_for_others, run_first_phase  # imports asyncio

        return run_first_phase(lambda: value.save(DirectoryToAwait(path_for_others(directory))))

    def load(self, like: Any, directory: Path) -> object:
        """Run both phases of the load: the object, restored in place."""
        from ckptcore.builtin.awaiting import path_for_others, run  # imports asyncio

        async def both() -> None:
            rest = await like.load(path_for_others(directory))
            if inspect.isawaitable(rest):
                await rest

        run(both)
        return like


_PLAIN: Final = SavesToDirectoryHandler()
_ASYNC: Final = SavesToDirectoryAsyncHandler()


def files_handler(value_type: type) -> FilesHandler | None:
    """The handler for objects of a type whose `save` and `load` take just a parameter called ``directory``; or None.

    Many classes have methods of these names that do something else; the name of the parameter tells.
    """
    for name in ("save", "load"):
        try:
            if required_names(value_type, name) != ("directory",):
                return None
        except (TypeError, ValueError):
            return None
    is_async = [inspect.iscoroutinefunction(inspect.unwrap(getattr(value_type, name))) for name in ("save", "load")]
    if is_async[0] is not is_async[1]:
        return None
    return _ASYNC if is_async[0] else _PLAIN
