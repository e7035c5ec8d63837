"""Objects that write files of their own and read them, by a method for each that takes a directory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

from ckptcore.builtin.signatures import required_names
from ckptcore.errors import PluginError
from ckptcore.protocols import Continuation, FilesHandler, Priority

__all__ = ["SavesToDirectoryAsyncHandler", "SavesToDirectoryHandler", "files_handler"]


class SavesToDirectoryHandler:
    """Objects with ``save(directory)`` and ``load(directory)``: `ckptcore.protocols.StatefulCheckpointable`."""

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Let it save itself; a function that it returns is the rest of its work.

        Raises:
            PluginError: if it returns something to await, which nobody would.
        """
        rest = value.save(directory)
        if inspect.isawaitable(rest):
            if inspect.iscoroutine(rest):
                rest.close()
            raise PluginError(
                f"{type(value).__qualname__}.save returned {type(rest).__name__}, expected None or a function that does the "
                "rest; write it as `async def save` and load as `async def load`, or give "
                "Context(plugins=PluginOptions(handlers={type: SavesToDirectoryAsyncHandler()}))"
            )
        return rest if callable(rest) else None

    def load(self, like: Any, directory: Path) -> object:
        """Let it load itself: the object, restored in place."""
        like.load(directory)
        return like


class SavesToDirectoryAsyncHandler:
    """Objects with ``async save(directory)``, which returns what is to be awaited in the background, and ``async load``.

    This is how objects save themselves with Orbax: its ``StatefulCheckpointable``. A `directory` to save to has
    ``await_creation()``, which gives the path; one to load from is a path.
    """

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Run the first phase on the thread of the caller, and leave what it returns to the continuation.

        Both run in one event loop, which stands still between them.

        Raises:
            PluginError: if it returns nothing to await and leaves tasks running; the continuation raises it for its tasks.
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
