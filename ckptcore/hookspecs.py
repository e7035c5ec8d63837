"""The hooks by which plugins offer what they have. `ckptcore.protocols` says what the objects do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pluggy

from ckptcore.protocols import (
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
"""Marks a plugin's function or method as the implementation of a hook."""


class HookSpecs:
    """Each hook, with what calls it and when.

    A plugin's entry module imports no heavy library: a type hook can ask ``sys.modules.get("jax")``, because no value
    of a library's type exists before the library was imported.
    """

    @_hookspec
    def ckpt_leaf_handler(self, leaf_type: type, example: object) -> LeafHandler | None:
        """The handler for leaves of a type, also of abstract ones; None for the types of others.

        Asked once per type and Context; `example` is one value of the type.
        """

    @_hookspec
    def ckpt_container_handler(self, value_type: type, example: object) -> ContainerHandler | None:
        """The handler that takes containers of a type apart by one level; None for the types of others.

        Asked once per type and Context; `example` is one value of the type.
        """

    @_hookspec
    def ckpt_checkpointable_handler(self, value_type: type, example: object) -> CheckpointableHandler | None:
        """The handler for objects of a type that are more than a container; None for the types of others.

        Asked once per type and Context; `example` is one value of the type.
        """

    @_hookspec
    def ckpt_files_handler(self, value_type: type, example: object) -> FilesHandler | None:
        """The handler for objects of a type that write files of their own; None for the types of others.

        Asked about what has a name of its own in ``save_checkpointables``, once per type and Context; `example` is one
        value of the type.
        """

    @_hookspec
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:  # type: ignore[empty-body]  # a specification has no body
        """Layouts by the name users give as ``layout=``. A name that two plugins give is an error."""

    @_hookspec
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:  # type: ignore[empty-body]  # a specification has no body
        """Storages by URL scheme, without ``://``. A scheme that two plugins give is an error."""

    @_hookspec
    def ckpt_storage_for(self, scheme: str) -> StorageOpener | None:
        """Return an opener for URLs of a scheme that no plugin names in `ckpt_storages`; None if it cannot open them.

        For a plugin that opens what a library opens whose schemes it does not know before it imports it. Asked with the
        scheme in lower case, without ``://``; answers of two plugins for one scheme are an error.
        """

    @_hookspec
    def ckpt_coordinator(self) -> Coordinator | None:
        """The coordinator of the job this process is part of, if this plugin knows of one."""

    @_hookspec
    def ckpt_executor(self) -> Executor[Any, Any] | None:
        """The workers of the single controller that this process is, if this plugin knows of some.

        Asked at the first save or load of a Context that was given none, and not in a job of several processes.
        """

    @_hookspec
    def ckpt_collectives(self) -> Collectives | None:
        """The collectives of the job this process is part of, over which elements are sent, if this plugin has some."""
