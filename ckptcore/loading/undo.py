"""Objects that are restored before a load changes anything else, and their states before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptcore.errors import CheckpointError, TargetUndefinedError, TreeMismatchError
from ckptcore.events import logger_named
from ckptcore.opening.checkpoint import Source
from ckptcore.tree.shapes import LiveObject

logger = logger_named("ckptcore.loading")


class Undo:
    """Restores objects that may refuse their states, and puts the old states back if one of them does."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._before: dict[int, tuple[object, Callable[[], None] | None]] = {}
        self._changed: dict[int, str] = {}

    def add(self, found: LiveObject) -> None:
        """Keep the present state of an object; if the load is repeated, the first one."""
        if id(found.node.like) not in self._before:
            self._before[id(found.node.like)] = found.node.like, found.undo()

    def restore(self, found: LiveObject, leaves: Sequence[object], source: Source) -> None:
        """Restore an object that was added.

        Args:
            found: the object.
            leaves: the leaves of the whole value.
            source: the location of the checkpoint, for errors.

        Raises:
            TreeMismatchError: it refused the state.
        """
        self._changed[id(found.node.like)] = found.name
        try:
            found.restore(leaves)
        except CheckpointError:
            raise
        except Exception as error:
            reason = f"refused its stored state: {type(error).__name__}: {error}"
            raise TreeMismatchError(
                f"{source}: {found.name}, {reason}. Create it with the options that it had when it was saved; or put "
                "PLACEHOLDER in its place to load everything else",
                [f"{found.name}: {reason}"],
            ) from error

    def run(self, cause: Exception) -> None:
        """Put all states back, because a load failed before it changed anything else.

        Raises:
            TargetUndefinedError: an object changed whose old state cannot be put back.
        """
        kept = []
        for key, (_, undo) in reversed(self._before.items()):
            name = self._changed.get(key)
            try:
                if undo is not None:
                    undo()
                elif name is not None:
                    kept.append(name)
            except Exception as error:  # of the object: the others are still put back, and the caller names this one
                logger.warning("the old state of an object cannot be put back: %s", name, exc_info=error)
                kept.append(str(name))
        self._before.clear()
        self._changed.clear()
        if kept:
            raise TargetUndefinedError(
                f"{cause}. The load stopped after it changed {', '.join(kept)}, whose old state cannot be put back: "
                "create new objects before loading again. Nothing else was changed"
            ) from cause
