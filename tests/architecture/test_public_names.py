"""Public names. Only public modules have an `__all__`, which is sorted and complete; each name has a docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Container, Iterator
from pathlib import Path

from ckptcore import results
from tests.architecture.sources import Source, core_sources, plugin_sources

PUBLIC_MODULES = {
    "ckptcore",
    "ckptcore.api.checkpoints",
    "ckptcore.api.loads",
    "ckptcore.api.saves",
    "ckptcore.context",
    "ckptcore.errors",
    "ckptcore.events",
    "ckptcore.handlers",
    "ckptcore.hookspecs",
    "ckptcore.plain_safetensors",
    "ckptcore.planning",
    "ckptcore.policies",
    "ckptcore.protocols",
    "ckptcore.redaction",
    "ckptcore.results",
    "ckptcore.select",
    "ckptcore.step_names",
    "ckptcore.temporary",
}
"""Modules whose every name is for users or authors of plugins; the modules of `ckptcore.model` are too."""

COLLECTIONS = {
    "ckptcore.context",
    "ckptcore.plain_safetensors",
    "ckptcore_dcp.reading",
    "ckptcore_integrations.orbax_v1.library",
}
"""Modules that also offer names of other modules, as packages do."""

DOCUMENTED_MODULES = {
    module
    for page in (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
    for module in re.findall(r"^\.\. automodule:: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Modules whose names the reference lists."""

PUBLIC_SOURCES = [source for source in (*core_sources(), *plugin_sources()) if source.public]


def isort_key(name: str) -> tuple[int, str]:
    """Return a sort key for the order of `__all__` in Ruff: constants, classes, other names."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name)


def exported_names(tree: ast.Module) -> list[str] | None:
    """Return the names in `__all__`, or None without one."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def defined_names(tree: ast.Module) -> set[str]:
    """Return the public names that the module itself defines at its top level, except type variables."""
    names = defined_functions_and_classes(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign) and not _makes_type_variable(node.value):
            names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def defined_functions_and_classes(tree: ast.Module) -> set[str]:
    """Return the public functions and classes that the module itself defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def _makes_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in {"TypeVar", "ParamSpec"}
    )


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield public functions, classes and methods without a docstring."""
    if ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overloads = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
            if ast.get_docstring(node) is None and not overloads:
                yield node.name
            if isinstance(node, ast.ClassDef):
                yield from _undocumented_methods(node)


def _undocumented_methods(owner: ast.ClassDef) -> Iterator[str]:
    """Yield undocumented methods of a class without bases. Other methods may be documented in a base or protocol."""
    if owner.bases or owner.name.startswith("_"):
        return
    documented_by_attributes = "Attributes:" in (ast.get_docstring(owner) or "")
    for node in owner.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith(("_", "test_")):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if documented_by_attributes and "property" in decorators:
            continue
        if ast.get_docstring(node) is None and not any("overload" in decorator for decorator in decorators):
            yield f"{owner.name}.{node.name}"


def wrong_exports(source: Source) -> Iterator[str]:
    """Return the errors in the `__all__` of a module."""
    exported, defined = exported_names(source.tree), defined_names(source.tree)
    public = source.path.name == "__init__.py" or source.name in PUBLIC_MODULES | COLLECTIONS | DOCUMENTED_MODULES
    if not public:
        if exported is not None:
            yield f"{source.path}: has an __all__, and is no public module"
        return
    if exported is None:
        if defined:
            yield f"{source.path} defines {sorted(defined)} and has no __all__"
        return
    if exported != sorted(set(exported), key=isort_key):
        yield f"{source.path}: __all__ is not sorted, or names something twice: {exported}"
    # Constants and aliases in a module of a plugin need no underscore to be internal.
    everything = source.name in PUBLIC_MODULES
    expected = defined if everything else defined_functions_and_classes(source.tree)
    if not expected <= set(exported):
        yield f"{source.path}: not in __all__: {sorted(expected - set(exported))}"
    offers_others = source.path.name == "__init__.py" or source.name in COLLECTIONS
    if not offers_others and not set(exported) <= defined:
        yield f"{source.path}: in __all__ and not defined here: {sorted(set(exported) - defined)}"


def test_all_is_sorted_and_complete() -> None:
    assert [wrong for source in PUBLIC_SOURCES for wrong in wrong_exports(source)] == []


def test_all_contains_only_existing_names() -> None:
    missing = [
        f"{source.name}.{name}"
        for source in core_sources()
        if source.public
        for name in exported_names(source.tree) or []
        if not hasattr(importlib.import_module(source.name), name)
    ]
    assert missing == []


def test_every_public_name_has_a_docstring() -> None:
    assert [f"{source.path}: {name}" for source in PUBLIC_SOURCES for name in undocumented(source.tree)] == []


def test_the_front_page_exports_every_function_of_the_api() -> None:
    ckptcore = importlib.import_module("ckptcore")
    api = [importlib.import_module(module) for module in PUBLIC_MODULES if module.startswith("ckptcore.api.")]
    functions = {name for module in api for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert functions <= set(ckptcore.__all__)
    assert {"load", "load_into", "metadata", "save", "save_async", "verify"} <= functions


def returned_names(tree: ast.Module, classes: Container[str]) -> set[str]:
    """Return names in the result types of public functions, and of public members of these classes."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    members = [member for owner in owners for member in owner.body]
    annotations = [node.returns for node in [*tree.body, *members] if isinstance(node, functions) and _is_public(node)]
    annotations += [
        node.annotation
        for node in members
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_")
    ]
    return {
        name.id
        for annotation in annotations
        if annotation
        for name in ast.walk(annotation)
        if isinstance(name, ast.Name)
    }


def _is_public(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not function.name.startswith("_") or function.name in {"__enter__", "__getitem__", "__iter__"}


INTERNAL_RESULTS = {"LoadRequest", "TreeContents"}
"""Classes without a public home that methods of public classes return to the core."""


def test_result_types_of_public_functions_are_public() -> None:
    """The types of their attributes and methods must also be public."""
    public = {name for module in [*PUBLIC_MODULES, "ckptcore.model"] for name in dir(importlib.import_module(module))}
    internal = {
        node.name for source in core_sources() for node in source.tree.body if isinstance(node, ast.ClassDef)
    } - public
    homes = {getattr(results, name).__module__ for name in results._HOMES}
    homes |= {
        getattr(importlib.import_module("ckptcore"), name).__module__ for name in ("Checkpointer", "CheckpointReader")
    }
    types = {
        name
        for source in core_sources()
        if source.name in homes or source.name in PUBLIC_MODULES
        for name in returned_names(source.tree, public)
    }
    assert types & internal <= INTERNAL_RESULTS


def test_wrong_exports_and_missing_docstrings_are_detected(tmp_path: Path) -> None:
    """Show that the tests above can fail."""
    path = tmp_path / "gaps.py"
    path.write_text(
        '__all__ = ["b", "a"]\nLIMIT = 3\n_hidden = 4\n'
        "class A:\n    def f(self): ...\n    def _g(self): ...\ndef b(): ...\n",
        encoding="utf-8",
    )
    tree = Source(path, "gaps").tree
    assert exported_names(tree) == ["b", "a"]
    assert defined_names(tree) == {"LIMIT", "A", "b"}
    assert list(undocumented(tree)) == ["the module", "A", "A.f", "b"]
    assert list(wrong_exports(Source(path, "ckptcore_tools.exports"))) == [
        f"{path}: __all__ is not sorted, or names something twice: ['b', 'a']",
        f"{path}: not in __all__: ['A']",
        f"{path}: in __all__ and not defined here: ['a']",
    ]
    path.write_text("class A: ...\n", encoding="utf-8")
    assert list(wrong_exports(Source(path, "ckptcore_tools.exports"))) == [f"{path} defines ['A'] and has no __all__"]
    path.write_text('__all__ = ["A"]\nclass A: ...\n', encoding="utf-8")
    assert list(wrong_exports(Source(path, "gaps"))) == [f"{path}: has an __all__, and is no public module"]
