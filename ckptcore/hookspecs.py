"""The hooks that plugins implement. `ckptcore.protocols` has the protocols of the objects that hooks return."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

import pluggy

from ckptcore.protocols import (
    AbstractLeaves,
    CheckpointableHandler,
    Collectives,
    ContainerHandler,
    Coordinator,
    Executor,
    FilesHandler,
    LayoutFactory,
    LeafHandler,
    StorageOpener,
)

__all__ = ["PROJECT_NAME", "HookSpecs", "hookimpl"]

PROJECT_NAME: Final = "ckptcore"
"""The name of the entry point group and of the pluggy project."""

_hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Decorator for a function or method of a plugin that implements a hook."""


class HookSpecs:
    """The hooks.

    The entry module of a plugin must not import a heavy library. A hook for types can use ``sys.modules.get("jax")``:
    before a library is imported, no values of its types exist.
    """

    @_hookspec
    def ckpt_leaf_handler(self, leaf_type: type, example: object) -> LeafHandler | None:
        """Return the handler for leaves of a type, abstract leaves included; None for unknown types.

        Called for values of a type until a plugin returns a handler, which is cached. `example` is a value of the type.
        """

    @_hookspec
    def ckpt_container_handler(self, value_type: type, example: object) -> ContainerHandler | None:
        """Return the handler that flattens containers of a type by one level; None for unknown types.

        Called for values of a type until a plugin returns a handler, which is cached. `example` is a value of the type.
        """

    @_hookspec
    def ckpt_checkpointable_handler(self, value_type: type, example: object) -> CheckpointableHandler | None:
        """Return the handler for stateful objects of a type, such as modules; None for unknown types.

        Called for values of a type until a plugin returns a handler, which is cached. `example` is a value of the type.
        """

    @_hookspec
    def ckpt_files_handler(self, value_type: type, example: object) -> FilesHandler | None:
        """Return the handler for objects of a type that write their own files; None for unknown types.

        Called for each object that is saved or loaded under a separate name. The result is not cached. `example`
        is the object.
        """

    @_hookspec
    def ckpt_frameworks(self) -> Mapping[str, AbstractLeaves]:  # type: ignore[empty-body]  # a specification has no body
        """Return frameworks by the name that users pass as ``framework=``. Two plugins must not return the same name.

        The function of a framework may import it.
        """

    @_hookspec
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:  # type: ignore[empty-body]  # a specification has no body
        """Return layouts by the name that users pass as ``layout=``. Two plugins must not return the same name."""

    @_hookspec
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:  # type: ignore[empty-body]  # a specification has no body
        """Return storages by URL scheme, without ``://``. Two plugins must not return the same scheme."""

    @_hookspec
    def ckpt_storage_for(self, scheme: str) -> StorageOpener | None:
        """Return an opener for a URL scheme that `ckpt_storages` of no plugin returns; None for other schemes.

        For a plugin that wraps a library whose schemes are unknown until the library is imported. The scheme is in
        lower case, without ``://``. Two plugins must not open the same scheme.
        """

    @_hookspec
    def ckpt_coordinator(self) -> Coordinator | None:
        """Return the coordinator of the job of this process, or None."""

    @_hookspec
    def ckpt_executor(self) -> Executor | None:
        """Return the workers of this process if it is a single controller, else None.

        Called by each operation that needs the workers, if its Context has no executor. Not called in a job of several
        processes.
        """

    @_hookspec
    def ckpt_collectives(self) -> Collectives | None:
        """Return the collectives of the job of this process, which send elements between processes, or None."""

    @_hookspec
    def ckpt_thread_settings(self) -> AbstractContextManager[None] | None:
        """Return a context manager that gives another thread the settings of this thread; None if there are none.

        The hook is called on the thread that starts a load. The context manager is entered on the thread that runs the
        load. It applies settings of the framework that affect loaded leaves, and turns off checks that would refuse the
        load itself.
        """
