"""Names of the package `ckptcore`, as type checkers, `dir` and `help` see them, also without any plugin."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import ckptcore
from ckptcore.distributions import lazy_names

MOST_NAMES = 30

ALONE = """
import sys

OWN = {*sys.stdlib_module_names, "ckptcore", "numpy", "ml_dtypes", "pluggy", "xxhash"}


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in OWN and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())
import importlib.metadata
importlib.metadata.distributions = lambda **_: iter(())
import pydoc
import ckptcore
from ckptcore.distributions import lazy_names
print(pydoc.plain(pydoc.render_doc(ckptcore)))
from ckptcore import *
assert save is ckptcore.save and open is ckptcore.open
"""
"""Renders `help(ckptcore)` in a process that can import the core and its dependencies only."""


def names_for_type_checkers(module: ModuleType) -> dict[str, str]:
    """Return the names that a module imports only for type checkers, with their modules."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.asname or "": f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_see_the_exported_names() -> None:
    names = {name: f"{module}.{name}" for name, module in ckptcore._HOMES.items()}
    modules = {name: f"ckptcore.{name}" for name in ckptcore._MODULES}
    lazy = {name: f"ckptcore.lazy_names.{name}" for name in lazy_names()}
    assert names_for_type_checkers(ckptcore) == names | modules | lazy
    results = {name: f"{module}.{name}" for name, module in ckptcore.results._HOMES.items()}
    assert names_for_type_checkers(ckptcore.results) == results
    assert {name for name in dir(ckptcore.results) if not name.startswith("_")} == results.keys()


def test_type_checkers_see_the_lazy_names_in_their_distributions() -> None:
    tree = ast.parse((Path(str(ckptcore.__file__)).parent / "lazy_names.pyi").read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    expected = {}
    for name, distribution in lazy_names().items():
        module = distribution.names[name]
        expected[name] = f"{distribution.package}.{module}.{name}" if module else distribution.package
    assert seen == expected


def test_the_number_of_exported_names_is_limited() -> None:
    assert vars(ckptcore)["__all__"] == list(ckptcore._HOMES) and len(ckptcore._HOMES) <= MOST_NAMES


def test_dir_lists_public_names_only() -> None:
    listed = [name for name in dir(ckptcore) if not name.startswith("__")]
    assert {*ckptcore._HOMES, *ckptcore._MODULES} <= set(listed)
    assert not {"importlib", "logging", "TYPE_CHECKING", "Final"} & set(listed)
    assert not [name for name in listed if name.startswith("_")]


def test_the_version_is_that_of_the_distribution() -> None:
    assert ckptcore.__version__ == version("ckptcore")


@pytest.mark.system
def test_help_needs_no_plugin() -> None:
    result = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "save_checkpointables_async(" in result.stdout and "class Checkpointer" in result.stdout
