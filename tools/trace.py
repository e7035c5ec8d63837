"""List the files of the core that a plain save and a plain load run through, in the order in which they run.

Run ``python -m tools.trace`` for each file with the functions that run in it, first called first. Comprehensions and
lambdas count as parts of the function around them. With ``--markdown`` it prints the lists of
``docs/design/read-the-core.md``: each file with the first line of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np

import ckptcore

__all__ = ["Trace", "listing", "main", "trace", "trace_plain_load", "trace_plain_save"]

_CORE: Final = Path(ckptcore.__file__).parent

Trace = Mapping[str, list[str]]
"""By file of the core, relative to its package: the functions that ran. Both in the order of first calls."""


def trace(run: Callable[[], object]) -> Trace:
    """Run a function, and return what it ran through on this thread and on threads that it started."""
    found: dict[str, list[str]] = {}
    prefix = f"{_CORE}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix):
            return
        functions = found.setdefault(code.co_filename.removeprefix(prefix), [])
        if not code.co_name.startswith("<") and code.co_qualname not in functions:
            functions.append(code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def trace_plain_save(directory: Path) -> Trace:
    """Trace the second blocking save of ``{"w": np.ones(3)}`` in this process, after its imports."""
    state, context = {"w": np.ones(3)}, ckptcore.Context()  # not the default one, which may know of other saves
    ckptcore.save(directory / "first", state, context=context)
    return trace(lambda: ckptcore.save(directory / "second", state, context=context))


def trace_plain_load(directory: Path) -> Trace:
    """Trace the second load of ``{"w": np.ones(3)}`` in this process, after its imports."""
    ckptcore.save(directory / "saved", {"w": np.ones(3)})
    ckptcore.load(directory / "saved")
    return trace(lambda: ckptcore.load(directory / "saved"))


def listing(files: Trace) -> Sequence[str]:
    """Return a numbered list of files in Markdown, each with the first line of its docstring."""
    lines = []
    for number, file in enumerate(files, 1):
        docstring = ast.get_docstring(ast.parse((_CORE / file).read_text(encoding="utf-8"))) or ""
        lines.append(f"{number}. `{file}`: {docstring.partition(chr(10))[0].rstrip('.')}")
    return lines


def main() -> int:
    """Print both traces."""
    parser = argparse.ArgumentParser(prog="python -m tools.trace", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the lists of the design note")
    options = parser.parse_args()
    for name, traced in (("save", trace_plain_save), ("load", trace_plain_load)):
        with tempfile.TemporaryDirectory() as directory:
            files = traced(Path(directory))
        print(f"a plain {name}: {len(files)} files, {sum(map(len, files.values()))} functions")
        if options.markdown:
            print("", *listing(files), "", sep="\n")
            continue
        for file, functions in files.items():
            print(f"    {file}: {', '.join(functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
