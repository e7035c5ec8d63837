"""Import rules that import-linter cannot check: third-party packages in the core, and the core in plugins."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tomllib
from pathlib import Path

from tests.architecture.sources import Source, core_sources, plugin_sources

CORE_DEPENDENCIES = {"ml_dtypes", "numpy", "pluggy", "xxhash"}
EXTRA_DEPENDENCIES = {
    "ckptcore.progress": {"rich", "tqdm"},  # imported if a progress bar is requested
}
"""Packages that only one part of the core may import, because they come with an extra."""

PUBLIC = {
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
    "ckptcore.step_names",
    "ckptcore.temporary",
    "ckptcore.training",
}
"""Modules that a plugin may import. Submodules only of `ckptcore.model`."""

FEATURES = {
    "ckptcore_collective",
    "ckptcore_incremental",
    "ckptcore_integrations.torch_checkpointing",
    "ckptcore_jax.worker_loads",
    "ckptcore_jax.worker_saves",
    "ckptcore_jax.worker_stages",
    "ckptcore_recovery",
    "ckptcore_testing",
    "ckptcore_tiers",
    "ckptcore_tools",
    "ckptcore_transforms",
    "ckptcore_versions",
    "ckptcore_view",
}
"""Packages and modules of our own distributions that share the version of the core and may import more of it."""

SHARED = {
    "ckptcore.builtin",
    "ckptcore.commit",
    "ckptcore.derivations",
    "ckptcore.distributions",
    "ckptcore.inspection",
    "ckptcore.io",
    "ckptcore.job",
    "ckptcore.loading",
    "ckptcore.matching",
    "ckptcore.on_demand",
    "ckptcore.opening",
    "ckptcore.plugins",
    "ckptcore.progress",
    "ckptcore.runtime",
    "ckptcore.saving",
    "ckptcore.training",
    "ckptcore.tree",
}
"""Packages of the core that `FEATURES` may import."""

WITH_DIRECTORIES = {
    "ckptcore.builtin.local": "a storage",
    "ckptcore.commit.directory_locks": "locks directories, chosen by the commit method",
    "ckptcore.commit.overwriting": "commits next to other files, for the commit method",
    "ckptcore.commit.rename": "commits by rename, chosen by the commit method",
    "ckptcore.commit.subdirectory": "a storage within another one",
    "ckptcore.commit.method": "tries what a storage supports",
    "ckptcore.protocols": "the protocol",
    "ckptcore.protocols.storage": "the protocol",
    "ckptcore_testing": "its tests",
    "ckptcore_testing.faulty_storage": "a storage within another one",
    "ckptcore_testing.storage_directories": "its tests",
}
"""The only modules that name `AtomicDirectories`. All others use the commit method of a location."""

CHOICES = {
    "ckptcore.commit.subdirectory",
    "ckptcore_testing.faulty_storage",
    "ckptcore_testing.storage_directories",
}
"""Modules that check if a storage implements it: wrappers of storages, their tests, and the choice of commit method."""


def foreign_imports(source: Source) -> list[str]:
    """Return imports of the core outside of the standard library, this project and declared dependencies."""
    allowed = set(CORE_DEPENDENCIES)
    for part, extra in EXTRA_DEPENDENCIES.items():
        if source.name == part or source.name.startswith(f"{part}."):
            allowed |= extra
    return [
        f"{source.path}:{line} imports {module}"
        for module, line in source.imported_modules()
        if (top := module.partition(".")[0]) not in allowed and top != "ckptcore" and top not in sys.stdlib_module_names
    ]


def is_feature(source: Source) -> bool:
    """Return True if a module may import packages of the core that are not public."""
    return not FEATURES.isdisjoint((source.name, source.name.partition(".")[0]))


def internal_imports(source: Source) -> list[str]:
    """Return imports of internal modules of the core in a plugin."""
    feature = is_feature(source)
    allowed = (*PUBLIC, *SHARED) if feature else PUBLIC
    packages = tuple(f"{package}." for package in (SHARED | {"ckptcore.planning"} if feature else set()))
    return [
        f"{source.path}:{line} imports {module}, which is internal"
        for module, line in source.imported_modules()
        if module.partition(".")[0] == "ckptcore"
        and module not in allowed
        and not module.startswith(("ckptcore.model.", *packages))
    ]


def undeclared_imports(source: Source) -> list[str]:
    """Return imports of our other distributions that a plugin does not declare as dependencies."""
    project = next(parent for parent in source.path.parents if (parent / "pyproject.toml").is_file())
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*declared["dependencies"], *itertools.chain(*declared.get("optional-dependencies", {}).values())]
    own = {path.name for path in (project / "src").glob("ckptcore_*")}
    names = own | {
        re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in (declared["name"], *required)
    }
    return [
        f"{source.path}:{line} imports {module}, which {declared['name']} does not require"
        for module, line in source.imported_modules()
        if (top := module.partition(".")[0]).startswith("ckptcore_") and top not in names
    ]


def imports_at_top_level(source: Source) -> set[str]:
    """Return the packages that are imported with the module."""
    packages: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            packages.add(node.module.partition(".")[0])
    return packages


def names_directories(source: Source) -> bool:
    """Return True if the code names `AtomicDirectories`."""
    return any(
        (isinstance(node, ast.Name) and node.id == "AtomicDirectories")
        or (isinstance(node, ast.Attribute) and node.attr == "AtomicDirectories")
        or (isinstance(node, ast.alias) and node.name == "AtomicDirectories")
        for node in ast.walk(source.tree)
    )


def checks_for_directories(source: Source) -> bool:
    """Return True if the code checks for `AtomicDirectories` with `isinstance` or `issubclass`."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and any("AtomicDirectories" in ast.unparse(argument) for argument in node.args)
        for node in ast.walk(source.tree)
    )


def test_only_the_commit_method_depends_on_the_kind_of_storage() -> None:
    sources = [*core_sources(), *plugin_sources()]
    assert {source.name for source in sources if names_directories(source)} - WITH_DIRECTORIES.keys() == set()
    assert {source.name for source in sources if checks_for_directories(source)} == CHOICES


def test_a_check_of_the_storage_type_is_detected(tmp_path: Path) -> None:
    """Show that the test above can fail."""
    path = tmp_path / "guest.py"
    path.write_text(
        "from ckptcore import protocols\nasked = isinstance(store, (protocols.AtomicDirectories, int))\n",
        encoding="utf-8",
    )
    source = Source(path, "guest")
    assert names_directories(source)
    assert checks_for_directories(source)


def test_the_core_imports_only_what_it_declares() -> None:
    assert [line for source in core_sources() for line in foreign_imports(source)] == []


def test_a_plugin_imports_only_public_modules() -> None:
    plugins = [source for source in plugin_sources() if not is_feature(source)]
    assert [line for source in plugins for line in internal_imports(source)] == []


def test_a_plugin_requires_the_plugins_that_it_imports() -> None:
    assert [line for source in plugin_sources() for line in undeclared_imports(source)] == []


def test_an_undeclared_import_is_detected(tmp_path: Path) -> None:
    """Show that the test above can fail."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "ckptcore-guest"\ndependencies = ["ckptcore>=0.1", "ckptcore-host>=0.1"]\n', encoding="utf-8"
    )
    path = tmp_path / "guest.py"
    path.write_text("import ckptcore_guest.a\nimport ckptcore_host\nimport ckptcore_other.b\n", encoding="utf-8")
    assert [line.split()[2] for line in undeclared_imports(Source(path, "guest"))] == ["ckptcore_other.b,"]


def test_forbidden_imports_are_detected(tmp_path: Path) -> None:
    """Show that the tests above can fail, also for an import inside a function."""
    path = tmp_path / "guest.py"
    path.write_text("import os\nimport numpy\ndef f():\n    from torch import nn\n", encoding="utf-8")
    assert [line.rpartition(" ")[2] for line in foreign_imports(Source(path, "ckptcore.guest"))] == ["torch"]
    path.write_text(
        "import ckptcore\nfrom ckptcore.model.tree import Node\nfrom ckptcore import saves\nimport ckptcore.io.x\n",
        encoding="utf-8",
    )
    modules = [line.split()[2] for line in internal_imports(Source(path, "guest"))]
    assert "ckptcore.io.x," in modules
    assert "ckptcore.model.tree," not in modules


CAPABILITIES = {
    "AtomicDirectories",
    "GathersInGroups",
    "StampedReader",
    "NativeReader",
    "Rejoinable",
    "ReportsAwaited",
    "StatefulCheckpointable",
}
"""The only protocols that `isinstance` may check. Other capabilities are default methods or fields; see
docs/design/architecture.md."""


def test_few_capabilities_are_checked_with_isinstance() -> None:
    protocols = {
        node.name
        for source in core_sources()
        if source.name.startswith("ckptcore.protocols")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        and any("runtime_checkable" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert protocols == CAPABILITIES
    assert len(protocols) <= 7
