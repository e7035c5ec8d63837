"""Runs the Python blocks of a page of the documentation."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType

from tests.docs.pages import CodeBlock

__all__ = ["page_module", "run_python"]


def page_module(page: Path) -> ModuleType:
    """A module for the names of a page; dataclasses and pickle find it in `sys.modules`."""
    module = ModuleType("page_" + page.stem.replace("-", "_").replace(".", "_"))
    sys.modules[module.__name__] = module
    return module


def run_python(block: CodeBlock, page: Path, module: ModuleType) -> None:
    """Execute a block so that a traceback shows the page and its line."""
    name = f"{page}:{block.line}"
    linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
    exec(compile(block.code, name, "exec", dont_inherit=True), vars(module))  # noqa: S102  # what this file is for
