"""Plugins: handlers by type, layouts by name, storages by URL scheme. Only this module uses pluggy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, cast

import pluggy

from ckptcore.builtin import BuiltinPlugin
from ckptcore.errors import PluginConflictError, PluginError, UnknownPluginError
from ckptcore.events import logger_named
from ckptcore.hookspecs import PROJECT_NAME, HookSpecs
from ckptcore.installed import entry_points, version_of
from ckptcore.model.arrays import AbstractArray, ArraySpec, name_of_dtype
from ckptcore.model.metadata import ArrayRecord
from ckptcore.other_libraries import LAYOUTS, did_you_mean
from ckptcore.protocols import (
    AbstractLeaves,
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

logger = logger_named("ckptcore.plugins")

Handler: TypeAlias = LeafHandler | ContainerHandler | CheckpointableHandler | FilesHandler
"""An object that handles the values of a type."""

_IN_TREES: Final = {
    "ckpt_leaf_handler": "leaf",
    "ckpt_container_handler": "container",
    "ckpt_checkpointable_handler": "checkpointable",
}
_AS_FILES: Final = {"ckpt_files_handler": "files"}
_PROTOCOLS: Final[Mapping[str, type]] = {
    "leaf": LeafHandler,
    "container": ContainerHandler,
    "checkpointable": CheckpointableHandler,
}
"""Protocols with default methods. Handlers must inherit from them."""

_STATE_METHODS: Final = (
    ("state_dict", "load_state_dict"),
    ("get_state", "set_state"),
    ("get_state_tree", "set_state_tree"),
)
"""Methods that return the state of an object, each with the method that restores it."""


class Dispatch(NamedTuple):
    """The handler of a type: at most one of the four is set.

    Attributes:
        leaf, container, checkpointable, files: the handler.
        has_parts: True if the leaf handler implements `parts_handler`, for leaves that are not one array.
    """

    leaf: LeafHandler | None = None
    container: ContainerHandler | None = None
    checkpointable: CheckpointableHandler | None = None
    files: FilesHandler | None = None
    has_parts: bool = False


@dataclass(frozen=True, slots=True)
class FailedPlugin:
    """An installed plugin that could not be imported.

    Attributes:
        name: the name of its entry point.
        distribution: name and version of its distribution.
        reason: the error.
    """

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin and its contents.

    Attributes:
        name: the name of its entry point.
        distribution: name and version of its distribution.
        hooks: the hooks that it implements.
        layouts, storages: the names of its layouts, the URL schemes of its storages.
        failed_layouts: errors of layouts that cannot be created, by name.
    """

    name: str
    distribution: str
    hooks: tuple[str, ...]
    layouts: tuple[str, ...]
    storages: tuple[str, ...]
    failed_layouts: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Plugins:
    """The plugins in use: first the plugins of a Context, then the installed plugins. Thread-safe.

    Attributes:
        failed: the installed plugins that could not be imported.
    """

    _manager: pluggy.PluginManager
    failed: Sequence[FailedPlugin] = ()
    _handlers: Mapping[type, Handler] = field(default_factory=dict)
    _distributions: Mapping[str, str] = field(default_factory=dict)
    _wrap_leaf: Callable[[LeafHandler], LeafHandler] | None = None
    _dispatch: dict[type, Dispatch] = field(default_factory=dict, init=False)
    _named_objects: dict[str, Mapping[str, tuple[str, Callable[..., object]]]] = field(default_factory=dict, init=False)

    def with_plugins(self, plugins: Sequence[object], handlers: Mapping[type, Handler]) -> Plugins:
        """Return these and additional plugins, with handlers by type that take precedence over all plugins."""
        if not plugins and not handlers:
            return self
        manager = _new_manager()
        for name, plugin in self._manager.list_name_plugin():
            if plugin is not None:
                manager.register(plugin, name)
        for plugin in plugins:
            manager.register(plugin)
        manager.check_pending()
        return replace(self, _manager=manager, _handlers={**self._handlers, **handlers})

    def wrapping(self, wrap_leaf: Callable[[LeafHandler], LeafHandler]) -> Plugins:
        """Return the same plugins with every leaf handler wrapped by a function. Earlier wrappers stay in place."""
        wrapped: dict[int, tuple[LeafHandler, LeafHandler]] = {}

        def wrap(handler: LeafHandler) -> LeafHandler:
            """Wrap each handler only once, because tied leaves must have the same handler."""
            if id(handler) not in wrapped:
                inner = handler if self._wrap_leaf is None else self._wrap_leaf(handler)
                wrapped[id(handler)] = handler, wrap_leaf(inner)
            return wrapped[id(handler)][1]

        return replace(self, _wrap_leaf=wrap)

    def dispatch(self, value: object) -> Dispatch:
        """Return the handler of a value in a tree, which is never a files handler. Cached by type.

        For a leaf that is not one array, return the handler that takes it apart.

        Raises:
            PluginConflictError: two plugins claim the type with the same priority.
        """
        value_type = type(value)
        dispatch = self._dispatch.get(value_type)
        if dispatch is None:
            dispatch = self._find(value_type, value, _IN_TREES)
            if dispatch.leaf is not None and self._wrap_leaf is not None:
                dispatch = Dispatch(leaf=self._wrap_leaf(dispatch.leaf))
            if dispatch.leaf is not None and type(dispatch.leaf).parts_handler is not LeafHandler.parts_handler:
                dispatch = dispatch._replace(has_parts=True)
            if dispatch != Dispatch():  # a type without a handler may be registered with its framework later
                self._dispatch[value_type] = dispatch
        if dispatch.has_parts and dispatch.leaf is not None:
            parts = dispatch.leaf.parts_handler(value)
            if parts is not None:
                return Dispatch(checkpointable=parts)
        return dispatch

    def dispatch_named(self, value: object) -> Dispatch:
        """Return the handler of a checkpointable, which may be a files handler.

        Raises:
            PluginConflictError: two plugins claim the type with the same priority.
        """
        value_type = type(value)
        files = self._find(value_type, value, _AS_FILES)
        if files.files is None:
            return self.dispatch(value)
        if self._handler_of_context(value_type) is not None:
            return files
        tree = self.dispatch(value)
        handler = tree.leaf or tree.container or tree.checkpointable
        return files if handler is None or files.files.priority >= handler.priority else tree

    def unsupported_reason(self, value: object) -> str:
        """Return why a value in a tree has no handler and what to do, as a relative clause for an error message."""
        if self.dispatch_named(value).files is not None:
            return "which writes its own files; save it under a separate name with save_checkpointables"
        from ckptcore.distributions import install_hint  # only errors need it

        if hint := install_hint(value_type=type(value)):
            return f"which no installed plugin handles: install support for it with {hint}"
        for getter, setter in _STATE_METHODS:
            if callable(getattr(value, getter, None)) and not isinstance(value, type):
                if not callable(getattr(value, setter, None)):
                    return f"which has {getter} but not {setter}: add {setter} to its class, or save its {getter}()"
                return f"whose {getter} and {setter} cannot be called as {getter}() and {setter}(state)"
        from ckptcore.recipes import recipe_for  # only errors need it

        if (recipe := recipe_for(value)) is not None:
            return f"which no installed plugin handles: {recipe}"
        if hasattr(value, "__qualname__"):  # a function, method or class
            return "which no installed plugin handles: code is not saved, remove it from the tree"
        return (
            "which no installed plugin handles: convert it to arrays, numbers, text or containers, give its class "
            "state_dict and load_state_dict, or remove it from the tree"
        )

    def _handler_of_context(self, value_type: type) -> Handler | None:
        """Return the handler of a Context for a type, or for its nearest base class."""
        claims = [claimed for claimed in self._handlers if issubclass(value_type, claimed)]
        if not claims:
            return None
        return self._handlers[next((claimed for claimed in value_type.__mro__ if claimed in claims), claims[0])]

    def _find(self, value_type: type, example: object, hooks: Mapping[str, str]) -> Dispatch:
        given = self._handler_of_context(value_type)
        if given is not None:
            dispatch = _as_dispatch(given)
            return dispatch if any(getattr(dispatch, kind) is not None for kind in hooks.values()) else Dispatch()
        candidates: list[tuple[int, str, Dispatch]] = []
        for hook, kind in hooks.items():
            arguments = {"leaf_type": value_type, "value_type": value_type, "example": example}
            for name, handler in _call_hook(getattr(self._manager.hook, hook), arguments):
                if kind in _PROTOCOLS:
                    expect_inherits(type(handler), _PROTOCOLS[kind])
                candidates.append((handler.priority, name, Dispatch(**{kind: handler})))
        if not candidates:
            return Dispatch()
        highest = max(priority for priority, _, _ in candidates)
        best = [(name, dispatch) for priority, name, dispatch in candidates if priority == highest]
        if len(best) > 1:
            names = " and ".join(sorted(name for name, _ in best))
            raise PluginConflictError(
                f"the plugins {names} both claim {_type_name(value_type)} with priority {highest}; "
                "choose one with Context(plugins=PluginOptions(handlers={type: handler})), or uninstall one of them"
            )
        return best[0][1]

    def framework(self, name: str) -> AbstractLeaves:
        """Return the function of a framework that returns abstract leaves for stored arrays.

        Raises:
            UnknownPluginError: no installed plugin has the framework.
            PluginConflictError: two plugins have it.
        """
        frameworks = self._named("ckpt_frameworks", "framework")
        if name not in frameworks:
            from ckptcore.distributions import install_hint  # only errors need it

            hint = install_hint(framework=name)
            remedy = f"; install it with {hint}" if hint else ""
            raise UnknownPluginError(
                f"framework={name!r}: no installed plugin has this framework. Installed: "
                f"{', '.join(sorted(frameworks))}{self._failures()}{remedy}"
            )
        return cast(AbstractLeaves, frameworks[name][1])

    def abstract_of(self, stored: AbstractArray) -> object | None:
        """Return the abstract leaf of a stored array, in the framework of the array.

        None if the framework does not have such arrays, has no plugin, or is not imported. A framework that is not
        imported is not in use: an object that needs its arrays has imported its module, which has the same name.
        """
        if stored.framework not in sys.modules or stored.framework not in self._named("ckpt_frameworks", "framework"):
            return None
        record = ArrayRecord(ArraySpec(stored.shape, name_of_dtype(stored.dtype)))
        (abstract,) = self.framework(stored.framework)([record])
        return abstract

    def layout(self, layout: str | Layout) -> Layout:
        """Return the layout with a given name. A layout object is returned unchanged.

        Raises:
            UnknownPluginError: no installed plugin has it.
            PluginConflictError: two plugins have it.
            PluginError: its plugin cannot create it, usually because a library is missing.
        """
        if not isinstance(layout, str):
            expect_inherits(type(layout), Layout)
            return layout
        factories = self._named("ckpt_layouts", "layout")
        if layout not in factories:
            from ckptcore.distributions import DISTRIBUTIONS, install_hint  # only errors need it

            hint = install_hint(layout=layout)
            known = sorted({*factories, *(name for distribution in DISTRIBUTIONS for name in distribution.layouts)})
            remedy = f"; install it with {hint}" if hint else did_you_mean(LAYOUTS.get(layout, layout), known)
            raise UnknownPluginError(
                f"no installed plugin has a layout {layout!r}. Installed: {', '.join(sorted(factories))}"
                f"{self._failures()}{remedy}"
            )
        plugin_name, factory = factories[layout]
        try:
            return _create_layout(factory)
        except Exception as error:
            raise PluginError(
                f"the plugin {plugin_name} cannot create its layout {layout!r}: {_reason(error)}; install the "
                "libraries that it requires, or another version of the plugin"
            ) from error

    def layouts(self) -> Sequence[Layout]:
        """Return all layouts that can be created, sorted by name. `failed_layouts` returns the errors of other layouts.

        Raises:
            PluginConflictError: two plugins have a layout of the same name.
        """
        return [layout for layout in self._created_layouts().values() if not isinstance(layout, Exception)]

    def failed_layouts(self) -> Mapping[str, str]:
        """Return the errors of layouts that cannot be created, by name.

        Raises:
            PluginConflictError: two plugins have a layout of the same name.
        """
        return _failures_of(self._created_layouts())

    def _created_layouts(self) -> Mapping[str, Layout | Exception]:
        return _create_layouts({name: factory for name, (_, factory) in self._named("ckpt_layouts", "layout").items()})

    def storage(self, scheme: str) -> StorageOpener:
        """Return the opener of a URL scheme.

        Raises:
            UnknownPluginError: no installed plugin opens the scheme.
            PluginConflictError: two plugins open the scheme.
        """
        openers = self._named("ckpt_storages", "URL scheme")
        if scheme in openers:
            return cast(StorageOpener, openers[scheme][1])
        named_openers = _call_hook(self._manager.hook.ckpt_storage_for, {"scheme": scheme})
        if len(named_openers) > 1:
            names = " and ".join(name for name, _ in named_openers)
            raise PluginConflictError(f"the plugins {names} both open {scheme}:// locations; uninstall one of them")
        if not named_openers:
            from ckptcore.distributions import DISTRIBUTIONS, install_hint  # only errors need it

            known = [name for distribution in DISTRIBUTIONS for name in distribution.schemes]
            remedy = did_you_mean(scheme, sorted({*openers, *known}))
            if hint := install_hint(scheme=scheme if scheme in known else "https"):
                # The plugin that opens https:// also opens all schemes of fsspec, which DISTRIBUTIONS does not list.
                remedy = (
                    f"; install it with {hint}" if scheme in known else f"{remedy}; {hint} adds the schemes of fsspec"
                )
            raise UnknownPluginError(
                f"no installed plugin opens {scheme}:// locations. Installed: "
                f"{', '.join(f'{name}://' for name in sorted(openers))}{self._failures()}{remedy}"
            )
        return cast(StorageOpener, named_openers[0][1])

    def coordinator(self) -> Coordinator:
        """Return the coordinator of the job of this process.

        Raises:
            PluginConflictError: two plugins report a job of more than one process.
        """
        coordinators = _call_hook(self._manager.hook.ckpt_coordinator, {})
        several = [(name, coordinator) for name, coordinator in coordinators if coordinator.size > 1]
        job = _only(several, "a job", "JobOptions(coordinator=...)")
        return cast(Coordinator, coordinators[0][1] if job is None else job)

    def executor(self) -> Executor | None:
        """Return the workers of this process if it is a single controller, else None.

        Raises:
            PluginConflictError: two plugins report workers.
        """
        executors = _call_hook(self._manager.hook.ckpt_executor, {})
        return cast(Executor | None, _only(executors, "workers", "JobOptions(executor=...)"))

    def collectives(self) -> Collectives | None:
        """Return the collectives of the job of this process, or None if no plugin has any.

        Raises:
            PluginConflictError: several plugins have collectives.
        """
        collectives = _call_hook(self._manager.hook.ckpt_collectives, {})
        return cast(Collectives | None, _only(collectives, "collectives", "JobOptions(collectives=...)"))

    def thread_settings(self) -> AbstractContextManager[None]:
        """Return a context manager that gives another thread the settings of this thread. See the hook."""
        return _entering([context for _, context in _call_hook(self._manager.hook.ckpt_thread_settings, {})])

    def describe(self) -> Sequence[PluginInfo]:
        """Describe the plugins, sorted by name. A plugin of a Context has an empty distribution."""
        distributions = {**self._distributions, "builtin": f"ckptcore {version_of('ckptcore')}"}
        plugins = []
        for name, plugin in self._manager.list_name_plugin():
            if plugin is None:
                continue
            hooks = tuple(sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ()))
            names: dict[str, Mapping[str, object]] = {
                hook: getattr(plugin, hook, dict)() for hook in hooks if hook in ("ckpt_layouts", "ckpt_storages")
            }
            layouts, schemes = names.get("ckpt_layouts", {}), tuple(sorted(names.get("ckpt_storages", {})))
            failed = _failures_of(_create_layouts(layouts))
            distribution = distributions.get(name, "")
            plugins.append(PluginInfo(name, distribution, hooks, tuple(sorted(layouts)), schemes, failed))
        return sorted(plugins, key=lambda info: info.name)

    def _named(self, hook_name: str, what: str) -> Mapping[str, tuple[str, Callable[..., object]]]:
        """Return the named objects that a hook returns, each with the name of its plugin. Cached."""
        known = self._named_objects.get(hook_name)
        if known is not None:
            return known
        objects: dict[str, tuple[str, Callable[..., object]]] = {}
        for plugin_name, mapping in _call_hook(getattr(self._manager.hook, hook_name), {}):
            for name, named in mapping.items():
                if name in objects:
                    raise PluginConflictError(
                        f"the plugins {objects[name][0]} and {plugin_name} both have the {what} {name!r}; uninstall one"
                    )
                objects[name] = (plugin_name, named)
        self._named_objects[hook_name] = objects
        return objects

    def _failures(self) -> str:
        if not self.failed:
            return ""
        return "; these failed to load: " + "; ".join(f"{plugin.name} ({plugin.reason})" for plugin in self.failed)


def _call_hook(caller: Any, arguments: Mapping[str, object]) -> list[tuple[str, Any]]:
    """Call a hook of all plugins. Return their results except None, with the names of the plugins."""
    results = []
    for implementation in caller.get_hookimpls():
        result = implementation.function(*[arguments[name] for name in implementation.argnames])
        if result is not None:
            results.append((implementation.plugin_name, result))
    return results


@contextmanager
def _entering(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _only(results: Sequence[tuple[str, object]], what: str, option: str) -> object:
    """Return the only result of a hook, or None if there is none.

    Raises:
        PluginConflictError: there are several results.
    """
    if len(results) > 1:
        names = " and ".join(name for name, _ in results)
        raise PluginConflictError(
            f"the plugins {names} report {what} for this process; choose one with Context(job={option})"
        )
    return results[0][1] if results else None


def _as_dispatch(handler: Handler) -> Dispatch:
    for kind, protocol in _PROTOCOLS.items():
        if protocol in type(handler).__mro__:
            return Dispatch(**{kind: handler})  # type: ignore[arg-type]  # each kind has its protocol
    if hasattr(handler, "save") and hasattr(handler, "load"):
        return Dispatch(files=cast(FilesHandler, handler))
    raise PluginError(
        f"Context(plugins=PluginOptions(handlers=...)): {handler!r} is not a handler: inherit from "
        "LeafHandler, ContainerHandler or CheckpointableHandler of ckptcore.protocols, or implement FilesHandler"
    )


def _create_layouts(factories: Mapping[str, object]) -> Mapping[str, Layout | Exception]:
    """Create layouts, sorted by name. A layout that cannot be created is replaced by its error."""
    created: dict[str, Layout | Exception] = {}
    for name, factory in sorted(factories.items()):
        try:
            created[name] = _create_layout(factory)
        except Exception as error:  # noqa: BLE001  # a broken layout must not disable the others
            created[name] = error
    return created


def _create_layout(factory: object) -> Layout:
    layout = cast(LayoutFactory, factory)()
    expect_inherits(type(layout), Layout)
    return layout


def expect_inherits(offered_type: type, protocol: type) -> None:
    """Check that the type of a plugin's object inherits from a protocol, because the protocol has default methods.

    Raises:
        PluginError: the type does not inherit from it.
    """
    if protocol not in offered_type.__mro__:
        raise PluginError(
            f"{_type_name(offered_type)} must inherit from ckptcore.protocols.{protocol.__name__}, which has "
            "defaults for optional methods"
        )


def _failures_of(layouts: Mapping[str, Layout | Exception]) -> Mapping[str, str]:
    return {name: _reason(error) for name, error in layouts.items() if isinstance(error, Exception)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _type_name(value_type: type) -> str:
    return f"{value_type.__module__}.{value_type.__qualname__}"


class _Manager(pluggy.PluginManager):
    """A manager of plugins that does not examine special methods: pluggy takes 10 us for each attribute."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> pluggy.HookspecOpts | None:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def _new_manager() -> pluggy.PluginManager:
    manager = _Manager(PROJECT_NAME)
    manager.add_hookspecs(HookSpecs)
    return manager


@functools.cache
def installed_plugins() -> Plugins:
    """Return the built-in plugin and the plugins of the entry point group ``ckptcore``. Cached for the process."""
    manager = _new_manager()
    manager.register(BuiltinPlugin(), "builtin")
    distributions = {"builtin": "ckptcore"}
    failed = []
    for point in entry_points(PROJECT_NAME):
        try:
            if point.name in distributions:
                raise PluginConflictError(
                    f"{distributions[point.name]} also has a plugin named {point.name!r}; uninstall one"
                )
            manager.register(point.load(), point.name)
            distributions[point.name] = point.distribution
        except Exception as error:  # noqa: BLE001  # a broken plugin must not disable the others
            failed.append(FailedPlugin(point.name, point.distribution, _reason(error)))
            logger.warning("the plugin %s of %s failed to load: %s", point.name, point.distribution, error)
    manager.check_pending()
    return Plugins(manager, tuple(failed), _distributions=distributions)
