"""The one typed wrapper around pluggy: who handles this type, this layout name, this URL scheme."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, cast

import pluggy

from ckptcore.builtin import BuiltinPlugin
from ckptcore.distributions import install_hint
from ckptcore.errors import PluginConflictError, PluginError, UnknownPluginError
from ckptcore.hookspecs import PROJECT_NAME, HookSpecs
from ckptcore.protocols import (
    CheckpointableHandler,
    Collectives,
    ContainerHandler,
    Coordinator,
    Executor,
    FilesHandler,
    Layout,
    LayoutFactory,
    LeafHandler,
    StorageOpener,
)

__all__ = ["Dispatch", "FailedPlugin", "Handler", "PluginInfo", "Plugins", "installed_plugins"]

logger = logging.getLogger("ckptcore.plugins")

Handler: TypeAlias = LeafHandler | ContainerHandler | CheckpointableHandler | FilesHandler
"""What handles a type."""

T = TypeVar("T")

_IN_TREES: Final = {
    "ckpt_leaf_handler": "leaf",
    "ckpt_container_handler": "container",
    "ckpt_checkpointable_handler": "checkpointable",
}
_AS_FILES: Final = {"ckpt_files_handler": "files"}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Who handles a type: exactly one of the four, or nobody.

    Attributes:
        leaf, container, checkpointable, files: the handler.
    """

    leaf: LeafHandler | None = None
    container: ContainerHandler | None = None
    checkpointable: CheckpointableHandler | None = None
    files: FilesHandler | None = None


@dataclass(frozen=True, slots=True)
class FailedPlugin:
    """An installed plugin that could not be imported.

    Attributes:
        name: of its entry point.
        distribution: name and version of its distribution.
        reason: the error.
    """

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """An installed plugin and what it offers.

    Attributes:
        name: of its entry point.
        distribution: name and version of its distribution.
        hooks: the hooks it implements.
        layouts, storages: the names and URL schemes it offers.
        failed_layouts: of its layouts those that cannot be made, by name, each with its error.
    """

    name: str
    distribution: str
    hooks: tuple[str, ...]
    layouts: tuple[str, ...]
    storages: tuple[str, ...]
    failed_layouts: Mapping[str, str] = field(default_factory=dict)


class Plugins:
    """The plugins in force: those installed, and those of a Context before them. Any thread."""

    def __init__(
        self,
        manager: pluggy.PluginManager,
        *,
        failed: Sequence[FailedPlugin] = (),
        handlers: Mapping[type, Handler] | None = None,
        distributions: Mapping[str, str] | None = None,
        wrap_leaf: Callable[[LeafHandler], LeafHandler] | None = None,
    ) -> None:
        self._distributions = dict(distributions or {})
        self._manager = manager
        self._handlers = dict(handlers or {})
        self._dispatch: dict[type, Dispatch] = {}
        self._offers: dict[str, Mapping[str, tuple[str, Callable[..., object]]]] = {}
        self._wrap_leaf = wrap_leaf
        self.failed = tuple(failed)

    def having(self, plugins: Sequence[object], handlers: Mapping[type, Handler]) -> Plugins:
        """These plugins with more of them, and with handlers by type that come before all others."""
        if not plugins and not handlers:
            return self
        manager = _new_manager()
        for name, plugin in self._manager.list_name_plugin():
            if plugin is not None:
                manager.register(plugin, name)
        for plugin in plugins:
            manager.register(plugin)
        manager.check_pending()
        return Plugins(
            manager,
            failed=self.failed,
            handlers={**self._handlers, **handlers},
            distributions=self._distributions,
        )

    def wrapping(self, wrap_leaf: Callable[[LeafHandler], LeafHandler]) -> Plugins:
        """These plugins, with what `wrap_leaf` makes of a handler in the place of every handler of leaves."""
        return Plugins(
            self._manager,
            failed=self.failed,
            handlers=self._handlers,
            distributions=self._distributions,
            wrap_leaf=wrap_leaf,
        )

    def dispatch(self, value: object) -> Dispatch:
        """Who handles values of this one's type within a tree: never as files. Cached by type.

        Raises:
            PluginConflictError: if two plugins are equally sure of it.
        """
        value_type = type(value)
        found = self._dispatch.get(value_type)
        if found is None:
            found = self._find(value_type, value, _IN_TREES)
            if found.leaf is not None and self._wrap_leaf is not None:
                found = Dispatch(leaf=self._wrap_leaf(found.leaf))
            if found != Dispatch():  # a type that nobody handles may be registered with a framework later
                self._dispatch[value_type] = found
        return found

    def dispatch_named(self, value: object) -> Dispatch:
        """Who handles a value that has a name of its own in a checkpoint: perhaps as files.

        Raises:
            PluginConflictError: if two plugins are equally sure of it.
        """
        value_type = type(value)
        files = self._find(value_type, value, _AS_FILES)
        if files.files is None:
            return self.dispatch(value)
        if self._given(value_type) is not None:
            return files
        tree = self.dispatch(value)
        handler = tree.leaf or tree.container or tree.checkpointable
        return files if handler is None or files.files.priority >= handler.priority else tree

    def _given(self, value_type: type) -> Handler | None:
        """The handler that a Context gives for a type or the nearest of its bases."""
        claims = [claimed for claimed in self._handlers if issubclass(value_type, claimed)]
        if not claims:
            return None
        return self._handlers[next((claimed for claimed in value_type.__mro__ if claimed in claims), claims[0])]

    def _find(self, value_type: type, example: object, hooks: Mapping[str, str]) -> Dispatch:
        given = self._given(value_type)
        if given is not None:
            dispatch = _as_dispatch(given)
            return dispatch if any(getattr(dispatch, kind) is not None for kind in hooks.values()) else Dispatch()
        candidates: list[tuple[int, str, Dispatch]] = []
        for hook, kind in hooks.items():
            arguments = {"leaf_type": value_type, "value_type": value_type, "example": example}
            for name, handler in _answers(getattr(self._manager.hook, hook), arguments):
                candidates.append((handler.priority, name, Dispatch(**{kind: handler})))
        if not candidates:
            return Dispatch()
        highest = max(priority for priority, _, _ in candidates)
        best = [(name, dispatch) for priority, name, dispatch in candidates if priority == highest]
        if len(best) > 1:
            names = " and ".join(sorted(name for name, _ in best))
            raise PluginConflictError(
                f"the plugins {names} both claim {_type_name(value_type)} with priority {highest}; "
                "give Context(plugins=PluginOptions(handlers={type: handler})) the one to use, or uninstall one of them"
            )
        return best[0][1]

    def layout(self, layout: str | Layout) -> Layout:
        """The layout of this name; a layout object is itself.

        Raises:
            UnknownPluginError: if no installed plugin has it.
            PluginConflictError: if two have.
            PluginError: if its plugin cannot make it: most often it imports what is not installed.
        """
        if not isinstance(layout, str):
            return layout
        factories = self._named("ckpt_layouts", "layout")
        if layout not in factories:
            raise UnknownPluginError(
                f"no installed plugin has a layout {layout!r}{_brought_by(layout=layout)}; there are "
                f"{', '.join(sorted(factories))}{self._failures()}"
            )
        plugin_name, factory = factories[layout]
        try:
            return cast(LayoutFactory, factory)()
        except Exception as error:
            raise PluginError(
                f"the plugin {plugin_name} cannot make its layout {layout!r}: {_reason(error)}; install what it needs, or "
                "another version of it"
            ) from error

    def layouts(self) -> Sequence[Layout]:
        """Every layout that can be made, sorted by name. `failed_layouts` tells of the others.

        Raises:
            PluginConflictError: if two plugins have one of the same name.
        """
        return [layout for layout in _made(self._layout_factories()).values() if not isinstance(layout, Exception)]

    def failed_layouts(self) -> Mapping[str, str]:
        """The layouts that cannot be made, by name, each with its error: most often they import what is not installed.

        Raises:
            PluginConflictError: if two plugins have one of the same name.
        """
        return _failures_of(_made(self._layout_factories()))

    def _layout_factories(self) -> Mapping[str, object]:
        return {name: factory for name, (_, factory) in self._named("ckpt_layouts", "layout").items()}

    def storage(self, scheme: str) -> StorageOpener:
        """What opens URLs of a scheme.

        Raises:
            UnknownPluginError: if no installed plugin does.
            PluginConflictError: if two do.
        """
        openers = self._named("ckpt_storages", "URL scheme")
        if scheme in openers:
            return cast(StorageOpener, openers[scheme][1])
        found = _answers(self._manager.hook.ckpt_storage_for, {"scheme": scheme})
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise PluginConflictError(
                f"the plugins {names} both open {scheme}:// locations, which no plugin names as its own; uninstall one"
            )
        if not found:
            raise UnknownPluginError(
                f"no installed plugin opens {scheme}:// locations{_brought_by(scheme=scheme)}; there are "
                f"{', '.join(f'{known}://' for known in sorted(openers))}. `{install_hint(scheme='az')}` brings those that "
                f"fsspec opens, such as az:// and https://{self._failures()}"
            )
        return cast(StorageOpener, found[0][1])

    def coordinator(self) -> Coordinator:
        """The coordinator of the job this process is part of.

        Raises:
            PluginConflictError: if plugins other than the built-in one know of two jobs.
        """
        found = _answers(self._manager.hook.ckpt_coordinator, {})
        several = [(name, coordinator) for name, coordinator in found if coordinator.size > 1]
        if len(several) > 1:
            names = " and ".join(name for name, _ in several)
            raise PluginConflictError(
                f"this process is part of several jobs: of {names}; give Context(job=JobOptions(coordinator=...)) the one that saves"
            )
        return cast(Coordinator, (several or found)[0][1])

    def executor(self) -> Executor[Any, Any] | None:
        """The workers of the single controller that this process is; None where it is none.

        Raises:
            PluginConflictError: if two plugins know of some.
        """
        found = _answers(self._manager.hook.ckpt_executor, {})
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise PluginConflictError(
                f"this process is the controller of the workers of several plugins: of {names}; give Context(job=JobOptions(executor=...)) the one to use"
            )
        return cast(Executor[Any, Any], found[0][1]) if found else None

    def collectives(self) -> Collectives | None:
        """The collectives of the job this process is part of; None where no plugin has some.

        Raises:
            PluginConflictError: if several have.
        """
        found = _answers(self._manager.hook.ckpt_collectives, {})
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise PluginConflictError(
                f"this process is part of several jobs: of {names}; give Context(job=JobOptions(collectives=...)) those to send over"
            )
        return cast(Collectives, found[0][1]) if found else None

    def describe(self) -> Sequence[PluginInfo]:
        """What is installed, sorted by name; the distribution of a plugin that a Context added is not known."""
        found = []
        for name, plugin in self._manager.list_name_plugin():
            if plugin is None:
                continue
            hooks = tuple(sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ()))
            layouts: Mapping[str, object] = getattr(plugin, "ckpt_layouts", dict)() if "ckpt_layouts" in hooks else {}
            storages: Mapping[str, object] = (
                getattr(plugin, "ckpt_storages", dict)() if "ckpt_storages" in hooks else {}
            )
            found.append(
                PluginInfo(
                    name,
                    self._distributions.get(name, ""),
                    hooks,
                    tuple(sorted(layouts)),
                    tuple(sorted(storages)),
                    _failures_of(_made(layouts)),
                )
            )
        return sorted(found, key=lambda info: info.name)

    def _named(self, hook_name: str, what: str) -> Mapping[str, tuple[str, Callable[..., object]]]:
        """What plugins offer by name, each with the name of its plugin. Asked for once: every checkpoint that is opened looks here twice."""
        known = self._offers.get(hook_name)
        if known is not None:
            return known
        offers: dict[str, tuple[str, Callable[..., object]]] = {}
        for plugin_name, mapping in _answers(getattr(self._manager.hook, hook_name), {}):
            for name, offered in mapping.items():
                if name in offers:
                    raise PluginConflictError(
                        f"the plugins {offers[name][0]} and {plugin_name} both offer the {what} {name!r}; uninstall one"
                    )
                offers[name] = (plugin_name, offered)
        self._offers[hook_name] = offers
        return offers

    def _failures(self) -> str:
        if not self.failed:
            return ""
        return "; these failed to load: " + "; ".join(f"{plugin.name} ({plugin.reason})" for plugin in self.failed)


def _answers(caller: Any, arguments: Mapping[str, object]) -> list[tuple[str, Any]]:
    """Each plugin's answer to a hook with the plugin's name; those that answer None left out."""
    answers = []
    for implementation in caller.get_hookimpls():
        answer = implementation.function(*[arguments[name] for name in implementation.argnames])
        if answer is not None:
            answers.append((implementation.plugin_name, answer))
    return answers


def _as_dispatch(handler: Handler) -> Dispatch:
    if hasattr(handler, "describe"):
        return Dispatch(leaf=cast(LeafHandler, handler))
    if hasattr(handler, "restore"):
        return Dispatch(checkpointable=cast(CheckpointableHandler, handler))
    if hasattr(handler, "unflatten"):
        return Dispatch(container=cast(ContainerHandler, handler))
    if hasattr(handler, "save") and hasattr(handler, "load"):
        return Dispatch(files=handler)
    raise PluginError(
        f"Context(plugins=PluginOptions(handlers=...)) holds {handler!r}, which is no handler of leaves, containers, checkpointables or files"
    )


def _made(factories: Mapping[str, object]) -> Mapping[str, Layout | Exception]:
    """The layouts of these factories, sorted by name; in place of one that cannot be made the error."""
    made: dict[str, Layout | Exception] = {}
    for name, factory in sorted(factories.items()):
        try:
            made[name] = cast(LayoutFactory, factory)()
        except Exception as error:  # noqa: BLE001  # one that is broken must not hide what the others can read
            made[name] = error
    return made


def _failures_of(made: Mapping[str, Layout | Exception]) -> Mapping[str, str]:
    return {name: _reason(error) for name, error in made.items() if isinstance(error, Exception)}


def _brought_by(*, layout: str = "", scheme: str = "") -> str:
    """Return how to install a layout or a URL scheme of this project, as a part of a message; empty if it has no such."""
    hint = install_hint(layout=layout, scheme=scheme)
    return f"; install it with {hint}" if hint else ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _type_name(value_type: type) -> str:
    return f"{value_type.__module__}.{value_type.__qualname__}"


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(HookSpecs)
    return manager


@functools.cache
def installed_plugins() -> Plugins:
    """The built-in plugins and every installed one, found once per process by the entry point group ``ckptcore``."""
    import importlib.metadata  # costs more to import than the rest of this module

    manager = _new_manager()
    manager.register(BuiltinPlugin(), "builtin")
    distributions = {"builtin": f"ckptcore {importlib.metadata.version('ckptcore')}"}
    failed = []
    for entry_point in importlib.metadata.entry_points(group=PROJECT_NAME):
        described = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else ""
        try:
            if entry_point.name in distributions:
                raise PluginConflictError(
                    f"{distributions[entry_point.name]} has a plugin of the name {entry_point.name!r} too; uninstall one"
                )
            manager.register(entry_point.load(), entry_point.name)
            distributions[entry_point.name] = described
        except Exception as error:  # noqa: BLE001  # whatever a broken plugin raises must not take the others with it
            failed.append(FailedPlugin(entry_point.name, described, _reason(error)))
            logger.warning("the plugin %s of %s failed to load: %s", entry_point.name, described, error)
    manager.check_pending()
    return Plugins(manager, failed=failed, distributions=distributions)
