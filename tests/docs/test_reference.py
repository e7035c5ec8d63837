"""The documentation contains every hook with its signature and every public name, and its links work."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import ckptcore_azure.settings
import ckptcore_gcs.settings
import ckptcore_s3.settings
from ckptcore_testing.plugins import PUBLIC_MODULES
from sphinx.ext.autodoc.mock import mock  # type: ignore[attr-defined]  # documented, but not in the stubs
from sphinx.util.inspect import TypeAliasForwardRef
from sphinx.util.typing import stringify_annotation

from ckptcore.distributions import lazy_names
from ckptcore.hookspecs import HookSpecs
from tests.architecture.sources import ROOT
from tests.docs.pages import code_blocks, documentation_pages

HOOKS = [name for name in vars(HookSpecs) if name.startswith("ckpt_")]
REFERENCE = ROOT / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. (?:auto|py:)\w+:: (\S+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def written_signature(name: str) -> str:
    """Return a hook as a plugin author writes it: ``name(argument: type) -> result``, without ``self``."""
    signature = inspect.signature(getattr(HookSpecs, name))
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    return f"{name}{signature.replace(parameters=parameters)}".replace("'", "")


def documented_modules() -> Mapping[str, Path]:
    """Return the modules that the reference documents as a whole, with their pages."""
    modules: dict[str, Path] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        if title.startswith("ckptcore") and find_spec(title) is not None:
            modules[title] = page
    return modules


@functools.cache
def _imported(module: str) -> ModuleType:
    """Import a module, without the libraries that `docs/conf.py` replaces because `.venv` lacks them.

    Other tests must not get a module that was imported in this way.
    """
    known = module in sys.modules
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    [replaced] = re.findall(r"^autodoc_mock_imports = (\[.*?\])$", conf, re.MULTILINE | re.DOTALL)
    with mock(ast.literal_eval(replaced)):
        imported = importlib.import_module(module)
    if not known and module.startswith("ckptcore_integrations."):
        del sys.modules[module]
    return imported


def public_names(module: str) -> set[str]:
    """Return the names that a module exports, without submodules."""
    imported = _imported(module)
    names = set(getattr(imported, "__all__", ()))
    return {name for name in names if name not in HOOKS and not inspect.ismodule(getattr(imported, name))}


def documented_names(module: str, page: Path) -> set[str]:
    """Return the names of a module that its page documents or excludes."""
    text = page.read_text(encoding="utf-8")
    names = {name.removeprefix(f"{module}.").partition("(")[0] for name in DIRECTIVE.findall(text)}
    block = re.search(rf"^\.\. automodule:: {re.escape(module)}\n((?:   :.*\n)*)", text, re.MULTILINE)
    if block is not None and ":no-members:" not in block[1]:
        imported = _imported(module)
        # Sphinx documents re-exported classes and functions, but other objects only in the module that defines them.
        exported = {name for name in public_names(module) if callable(getattr(imported, name))}
        names |= exported | set(re.findall(r"^(\w+)(?:: [^=\n]+)? =", inspect.getsource(imported), re.MULTILINE))
        for excluded in re.findall(r":exclude-members: (.*)", block[1]):
            names |= set(excluded.split(", "))
    return names


def imported_names(code: str) -> set[str]:
    """Return the names of our modules that a block of code imports, or uses as attributes of `ckptcore`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptcore"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ckptcore":
            names.add(f"ckptcore.{node.attr}")
    return names


def test_the_documentation_has_every_hook_with_its_signature() -> None:
    lines = (ROOT / "docs/how-to/write-a-plugin.md").read_text(encoding="utf-8").splitlines()
    missing = [hook for hook in HOOKS if written_signature(hook) not in lines]
    assert not missing, missing


def test_the_documentation_names_no_unknown_hook() -> None:
    for page in documentation_pages():
        named = set(re.findall(r"\bckpt_[a-z_]+", page.read_text(encoding="utf-8")))
        assert named <= {*HOOKS, "ckpt_path"}, page  # `ckpt_path` is an argument of Lightning


def test_the_reference_has_every_public_name() -> None:
    missing = [
        f"{module}.{name}"
        for module, page in documented_modules().items()
        for name in public_names(module) - documented_names(module, page)
    ]
    assert not missing, sorted(missing)


def test_every_public_module_has_a_page() -> None:
    assert set(PUBLIC_MODULES) <= set(documented_modules())


def test_the_reference_has_every_name_that_examples_import() -> None:
    documented = {f"ckptcore.{name}" for name in lazy_names()}
    for page in REFERENCE.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        documented |= {name.partition("(")[0] for name in DIRECTIVE.findall(text)}
        for module in re.findall(r"^\.\. automodule:: (\S+)", text, re.MULTILINE):
            documented |= {module, *[f"{module}.{name}" for name in documented_names(module, page)]}
    missing = {
        f"{page.name}: {name}"
        for page in documentation_pages()
        for block in code_blocks(page.read_text(encoding="utf-8"))
        for name in (imported_names(block.code) if block.language == "python" else ())
        if name not in documented
    }
    assert not missing, sorted(missing)


def test_the_reference_names_no_internal_module() -> None:
    named = {
        reference.rpartition(".")[0]
        for page in REFERENCE.glob("*.md")
        for reference in re.findall(
            r"^\.\. (?:auto|py:)\w+:: (ckptcore\.[\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert named <= {*PUBLIC_MODULES, "ckptcore.select", "ckptcore.step_names"}


def test_signatures_name_type_aliases() -> None:
    """Sphinx prints `TypeAliasForwardRef('JSON')` without the setting in `docs/conf.py`."""
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    [setting] = re.findall(r"^TypeAliasForwardRef\.__repr__ = .*$", conf, re.MULTILINE)
    alias = type("TypeAliasForwardRef", (TypeAliasForwardRef,), {})
    exec(setting, {"TypeAliasForwardRef": alias})  # noqa: S102  # the line of the configuration
    annotation = Mapping[str, alias("JSON")] | None  # type: ignore[misc, valid-type]  # mypy does not see a type
    assert stringify_annotation(annotation) == "collections.abc.Mapping[str, JSON] | None"


def test_the_reference_has_every_storage_option() -> None:
    page = (REFERENCE / "storage-options.md").read_text(encoding="utf-8")
    listed = {
        name
        for line in page.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    plugins = (ckptcore_azure, ckptcore_gcs, ckptcore_s3)
    assert listed == {name for plugin in plugins for name in plugin.settings.OPTIONS}


def test_links_to_files_work() -> None:
    broken = [
        f"{page} links to {target}, which does not exist"
        for page in documentation_pages()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert not broken, broken


def test_a_signature_is_written_as_expected() -> None:
    assert written_signature("ckpt_coordinator") == "ckpt_coordinator() -> Coordinator | None"
