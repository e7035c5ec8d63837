"""The project's source files and their syntax trees, for the architecture tests."""

from __future__ import annotations

import ast
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """A Python module of the project.

    Attributes:
        path: the file.
        name: the module's dotted name.
    """

    path: Path
    name: str

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree of the module."""
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def public(self) -> bool:
        """Return True if no part of the name begins with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    def imported_modules(self) -> Iterator[tuple[str, int]]:
        """Yield the dotted name and line of each import in the file.

        ``from a.b import c`` yields ``a.b``, and also ``a.b.c`` if this is one of our modules.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                yield module, node.lineno
                for alias in node.names:
                    if _is_module(f"{module}.{alias.name}"):
                        yield f"{module}.{alias.name}", node.lineno

    def modules_needed_at_runtime(self, modules: Container[str]) -> Iterator[str]:
        """Yield the given modules that are imported anywhere in the file, except imports only for type checkers.

        ``from a.b import c`` yields ``a.b.c`` if this is one of the given modules, otherwise ``a.b``.
        """
        for node in _run(self.tree):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = self._absolute(node)
                names = [f"{package}.{alias.name}" for alias in node.names]
                imported = [name if name in modules else package for name in names]
            yield from (name for name in imported if name in modules)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def __str__(self) -> str:
        return self.name


@cache
def core_sources() -> Sequence[Source]:
    """Return the modules of the distribution `ckptcore`. Cached, so that each module is parsed once."""
    return tuple(_sources(ROOT, ROOT / "ckptcore"))


@cache
def plugin_sources() -> Sequence[Source]:
    """Return the modules of the distributions in ``plugins/``. Cached, so that each module is parsed once."""
    directories = sorted((ROOT / "plugins").glob("*/src"))
    return tuple(source for directory in directories for source in _sources(directory, directory))


def project_files(suffix: str) -> Sequence[Path]:
    """Return the project's files with a suffix, sorted, without files of environments and builds."""
    return tuple(path for path in _files() if path.name.endswith(suffix))


@cache
def _files() -> Sequence[Path]:
    skipped = {"build", "dist", "_build", "node_modules", "__pycache__"}
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(ROOT):
        # Do not enter them: an environment has a hundred thousand files.
        subdirectories[:] = [name for name in subdirectories if name not in skipped and not name.startswith(".")]
        paths += [Path(directory, name) for name in names]
    return tuple(sorted(paths))


def _sources(root: Path, directory: Path) -> list[Source]:
    sources = []
    for path in sorted(directory.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        sources.append(Source(path, ".".join(parts)))
    return sources


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.joinpath("__init__.py").is_file()


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, except the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).rpartition(".")[2] == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _run(other)
        else:
            yield child
            yield from _run(child)
