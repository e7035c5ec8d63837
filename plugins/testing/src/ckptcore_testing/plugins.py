"""Conformance tests of plugins."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pluggy
import pytest

from ckptcore.builtin import BuiltinPlugin
from ckptcore.hookspecs import PROJECT_NAME, HookSpecs
from ckptcore.model import ArraySpec
from ckptcore.plugins import Plugins
from ckptcore_testing.arrays import bit_patterns
from ckptcore_testing.samples import FrameworkSample, Sample, StorageSample, installed_samples

PUBLIC_MODULES: Final = (
    "ckptcore",
    "ckptcore.context",
    "ckptcore.errors",
    "ckptcore.events",
    "ckptcore.handlers",
    "ckptcore.hookspecs",
    "ckptcore.model",
    "ckptcore.plain_safetensors",
    "ckptcore.planning",
    "ckptcore.policies",
    "ckptcore.protocols",
    "ckptcore.redaction",
    "ckptcore.results",
    "ckptcore.temporary",
    "ckptcore.training",
    "ckptcore_testing",
)
"""Modules of this project that plugins may import, in addition to the submodules of `ckptcore.model` and
`ckptcore_testing`."""

_TYPE_HOOKS: Final = (
    "ckpt_leaf_handler",
    "ckpt_container_handler",
    "ckpt_checkpointable_handler",
    "ckpt_files_handler",
)


def hide_distributions(
    patch: pytest.MonkeyPatch, plugins: Mapping[str, object], installed: Container[str] = ()
) -> pluggy.PluginManager:
    """Make new Contexts use the built-in plugin and a few others, as if no other distribution were installed.

    Args:
        patch: undoes the change after the test.
        plugins: the other plugins, by name. More can be registered with the result.
        installed: packages of distributions that count as installed.
    """
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(HookSpecs)
    for name, plugin in {"builtin": BuiltinPlugin(), **plugins}.items():
        manager.register(plugin, name)
    patch.setattr("ckptcore.runtime.installed_plugins", lambda: Plugins(manager))
    patch.setattr("ckptcore.distributions.find_spec", lambda package: package if package in installed else None)
    return manager


class PluginTests:
    """Conformance tests of a plugin. Subclass it and define `entry_point`. The plugin must be installed.

    Attributes:
        entry_point: the name of the plugin's entry point in the group ``ckptcore``.
        heavy: packages that the entry module must not import. None: the packages that the plugin's distribution
            requires, and that the core does not require.
        inner: names (without packages) of the plugin's modules that may import any module of ckptcore. Only for
            distributions that are released together with ckptcore.
    """

    entry_point: str
    heavy: Collection[str] | None = None
    inner: Collection[str] = ()

    # --- the installed plugin

    def _entry(self) -> importlib.metadata.EntryPoint:
        entry_points = importlib.metadata.entry_points(group=PROJECT_NAME, name=self.entry_point)
        assert len(entry_points) == 1, (
            f"{len(entry_points)} distributions have an entry point {self.entry_point!r} in {PROJECT_NAME!r}"
        )
        return next(iter(entry_points))

    def _distribution(self) -> importlib.metadata.Distribution:
        distribution = self._entry().dist
        assert distribution is not None
        return distribution

    def _manager(self) -> pluggy.PluginManager:
        manager = pluggy.PluginManager(PROJECT_NAME)
        manager.add_hookspecs(HookSpecs)
        manager.register(self._entry().load(), self.entry_point)
        return manager

    def _answer(self, hook: str, **arguments: object) -> Any:
        """Return the answer of this plugin to a hook. None if it does not implement the hook."""
        answers = getattr(self._manager().hook, hook)(**arguments)
        return answers[0] if answers else None

    def _samples(self) -> list[Sample]:
        return list(installed_samples().offered.get(self._distribution().name, ()))

    # --- importing

    def test_the_entry_module_imports_no_framework(self) -> None:
        heavy = set(self._required_packages() if self.heavy is None else self.heavy)
        module = self._entry().module
        program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
        imported = set(
            json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        )
        assert module in imported
        assert not heavy & imported, (
            f"importing {module} imports {sorted(heavy & imported)}; import them when they are used"
        )

    def test_hooks_work_without_the_framework(self) -> None:
        """Hooks do not import the framework."""
        heavy = sorted(set(self._required_packages() if self.heavy is None else self.heavy))
        program = (
            "import sys, json, importlib.metadata, pluggy\n"
            "from ckptcore.hookspecs import PROJECT_NAME, HookSpecs\n"
            "manager = pluggy.PluginManager(PROJECT_NAME); manager.add_hookspecs(HookSpecs)\n"
            f"entry, = importlib.metadata.entry_points(group=PROJECT_NAME, name={self.entry_point!r})\n"
            "manager.register(entry.load())\n"
            "class Strange: pass\n"
            "example = Strange()\n"
            "answers = manager.hook.ckpt_leaf_handler(leaf_type=Strange, example=example)\n"
            "answers += manager.hook.ckpt_container_handler(value_type=Strange, example=example)\n"
            "answers += manager.hook.ckpt_checkpointable_handler(value_type=Strange, example=example)\n"
            "manager.hook.ckpt_coordinator()\n"
            "manager.hook.ckpt_executor()\n"
            "print(json.dumps([len(answers), sorted(sys.modules)]))\n"
        )
        output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        answered, imported = json.loads(output)
        assert answered == 0, "the plugin handles an unknown type"
        assert not set(heavy) & set(imported), f"the hooks import {sorted(set(heavy) & set(imported))}"

    def _required_packages(self) -> set[str]:
        """Return the import names of requirements that the core does not have."""
        required = _requirements(self._distribution()) - _requirements(importlib.metadata.distribution(PROJECT_NAME))
        providers = importlib.metadata.packages_distributions()
        return {
            package
            for package, distributions in providers.items()
            if {_normal(name) for name in distributions} & (required - {PROJECT_NAME})
        }

    def test_the_plugin_imports_only_public_modules(self) -> None:
        top = self._entry().module.partition(".")[0]
        imports = [line for path in _sources(top) if path.stem not in self.inner for line in internal_imports(path)]
        assert imports == [], "import only public modules of ckptcore: " + "; ".join(imports)

    # --- hooks

    def test_hooks_match_their_specifications(self) -> None:
        manager = self._manager()
        manager.check_pending()
        (plugin,) = manager.get_plugins()
        callers = manager.get_hookcallers(plugin) or []
        assert callers, "the plugin implements no hook"
        marked = {caller.name for caller in callers}
        named = {name for name in dir(plugin) if name.startswith("ckpt_")}
        assert named == marked, f"{sorted(named ^ marked)} look like hooks, but are not marked with @hookimpl"

    def test_the_plugin_claims_no_unrelated_type(self) -> None:
        for example in (object(), _UnknownType(), 1, "text", {}, [], ModuleType("module"), int):
            for hook in _TYPE_HOOKS:
                key = "leaf_type" if hook == "ckpt_leaf_handler" else "value_type"
                answer = self._answer(hook, **{key: type(example), "example": example})
                assert answer is None, f"{hook} handles {type(example)}, which is not a type of this plugin"

    def test_layouts_are_registered_under_their_names(self) -> None:
        layouts: Mapping[str, Any] = self._answer("ckpt_layouts") or {}
        for name, factory in layouts.items():
            assert factory().name == name
            others = _offered_by_others("ckpt_layouts", self.entry_point)
            assert name not in others, f"the layout {name!r} is also offered by {others[name]}"

    def test_storages_have_schemes_and_samples(self) -> None:
        storages: Mapping[str, Any] = self._answer("ckpt_storages") or {}
        samples = [sample for sample in self._samples() if isinstance(sample, StorageSample)]
        sampled = {scheme for sample in samples for scheme in sample.schemes}
        if "ckpt_storage_for" in {caller.name for caller in self._callers()}:
            assert sampled, "define a StorageSample for a scheme of the plugin, for the matrix of tests"
        for scheme, opener in storages.items():
            assert re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme), f"{scheme!r} is not a URL scheme in lower case"
            assert callable(opener)
            others = _offered_by_others("ckpt_storages", self.entry_point)
            assert scheme not in others, f"the scheme {scheme!r} is also offered by {others[scheme]}"
            assert scheme in sampled, f"define a StorageSample for {scheme}://, for the matrix of tests"

    def test_the_plugin_opens_no_unknown_scheme(self) -> None:
        answer = self._answer("ckpt_storage_for", scheme="no-such-scheme")
        assert answer is None, "ckpt_storage_for must return None for unknown schemes, for a clear error"

    def test_leaves_have_a_sample_and_priorities(self) -> None:
        if "ckpt_leaf_handler" not in {caller.name for caller in self._callers()}:
            return
        frameworks = [sample for sample in self._samples() if isinstance(sample, FrameworkSample)]
        assert frameworks, "define a FrameworkSample, for the matrix of tests"
        for sample in frameworks:
            spec = ArraySpec((2,), next(iter(sample.dtypes)))
            with sample.session():
                leaves = (sample.make(bit_patterns(spec)), sample.abstract(spec))
            for leaf in leaves:
                handler = self._answer("ckpt_leaf_handler", leaf_type=type(leaf), example=leaf)
                assert handler is not None, f"the plugin does not handle {type(leaf)} of its own sample"
                assert type(handler.priority) is int

    def _callers(self) -> list[Any]:
        manager = self._manager()
        (plugin,) = manager.get_plugins()
        return list(manager.get_hookcallers(plugin) or [])


class _UnknownType:
    """A type that no plugin handles."""


def _offered_by_others(hook: str, entry_point: str) -> dict[str, str]:
    """Return the layouts or schemes that other installed plugins offer, each with the name of its plugin."""
    from ckptcore.plugins import installed_plugins

    attribute = "layouts" if hook == "ckpt_layouts" else "storages"
    return {
        name: plugin.name
        for plugin in installed_plugins().describe()
        if plugin.name != entry_point
        for name in getattr(plugin, attribute)
    }


def _requirements(distribution: importlib.metadata.Distribution) -> set[str]:
    return {_normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in distribution.requires or ()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sources(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"no module {package}"
    for place in spec.submodule_search_locations or ():
        yield from sorted(Path(place).rglob("*.py"))
    if not spec.submodule_search_locations and spec.origin is not None:
        yield Path(spec.origin)


def internal_imports(path: Path) -> list[str]:
    """Return the imports of internal modules of ckptcore in a source file, with their lines."""
    imports = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules = [node.module]
            if node.module == PROJECT_NAME:
                modules = [_member(alias.name) for alias in node.names]
        imports += [f"{path}:{node.lineno} imports {module}" for module in modules if not _is_public(module)]  # type: ignore[attr-defined]  # imports have lines
    return imports


def _member(name: str) -> str:
    """Return the module that ``from ckptcore import name`` imports."""
    full = f"{PROJECT_NAME}.{name}"
    return full if importlib.util.find_spec(full) is not None else PROJECT_NAME


def _is_public(module: str) -> bool:
    if module.partition(".")[0] != PROJECT_NAME or module in PUBLIC_MODULES:
        return True
    return module.startswith(f"{PROJECT_NAME}.model.")
