"""The project's source files and their syntax trees, as the architecture tests look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["ROOT", "Source", "core_sources", "plugin_sources", "project_files"]

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
        """The module's syntax."""
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def public(self) -> bool:
        """Whether no part of the name begins with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    def imported_modules(self) -> Iterator[tuple[str, int]]:
        """The dotted name of each module imported anywhere in the file, with its line.

        ``from a.b import c`` gives ``a.b``, and ``a.b.c`` too where that is a module of ours.
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


def core_sources() -> list[Source]:
    """The modules of the distribution `ckptcore`."""
    return _sources(ROOT, ROOT / "ckptcore")


def plugin_sources() -> list[Source]:
    """The modules of the distributions below ``plugins/``."""
    found: list[Source] = []
    for directory in sorted((ROOT / "plugins").glob("*/src")):
        found += _sources(directory, directory)
    return found


def project_files(suffix: str) -> list[Path]:
    """The project's files with this suffix, without those of environments and builds."""
    skipped = {"build", "dist", "_build", "node_modules", "__pycache__"}
    return sorted(
        path
        for path in ROOT.rglob(f"*{suffix}")
        if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
    )


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
