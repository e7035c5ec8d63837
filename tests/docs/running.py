"""Run the Python blocks of a page of the documentation."""

from __future__ import annotations

import linecache
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.docs.pages import CodeBlock


def page_module(page: Path, purpose: str) -> ModuleType:
    """Create a module for the names of a page. Dataclasses and pickle look it up in `sys.modules`.

    Each purpose has its own module, because pickle refuses a class that its module has since redefined.
    """
    module = ModuleType(f"page_{page.stem.replace('-', '_').replace('.', '_')}_{purpose}")
    sys.modules[module.__name__] = module
    return module


def run_python(block: CodeBlock, page: Path, module: ModuleType) -> None:
    """Execute a block. Its tracebacks show the page and the line."""
    name = f"{page}:{block.line}"
    linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
    exec(compile(block.code, name, "exec", dont_inherit=True), vars(module))  # noqa: S102  # the purpose of this file


def run_program(blocks: Sequence[CodeBlock], directory: Path) -> None:
    """Execute the blocks of a page as one program, with the line numbers of the page.

    For pages that send their classes to other processes: pickles contain classes of a program by value.

    Raises:
        AssertionError: the program failed. The message has its output.
    """
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    program = directory / "page.py"
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, str(program)], cwd=directory, capture_output=True, text=True, check=False, timeout=300
    )
    program.unlink()
    assert finished.returncode == 0, finished.stdout + finished.stderr
