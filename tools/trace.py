"""List the files of the core that a plain save and a plain load run through, in the order in which they run.

``python -m tools.trace`` prints each file with the functions that run in it, in the order of their first calls, and the
lines of code of all these files. Comprehensions and lambdas count as parts of the function around them. With
``--write``, the table of `SPINE` is written into ``docs/design/read-the-core.md``. The lists of that page are created
when the documentation is built.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

import ckptcore
from tools.count import count_source
from tools.counts import Trace, trace

_CORE: Final = Path(ckptcore.__file__).parent
NOTE: Final = Path(__file__).parents[1] / "docs" / "design" / "read-the-core.md"
_BEGIN: Final = "<!-- written by python -m tools.trace --write -->\n\n"
_END: Final = "<!-- end -->"

SPINE: Final[Mapping[str, Mapping[str, str]]] = {
    "save": {
        "perform_save": "runs the stages below, at once or in the background, and reports events and progress",
        "prepare_save": "describes the value and the target, and refuses what cannot be saved",
        "describe_part": "takes the value apart: its skeleton, leaves and boxes, and the process that writes each box",
        "write_save": "claims the target, lets the layout write each part, gathers the receipts, and commits",
        "ObjectWrites.work": "runs in each I/O thread: copies blocks of objects, computes their checksums, writes them",
        "build_root": "makes the root from the receipts, after a check that the boxes make up the arrays",
        "RenameTransaction.commit": "writes the root and renames the hidden directory; now the checkpoint exists",
    },
    "load": {
        "Load.run": "runs the stages below, again if the checkpoint was replaced meanwhile",
        "open_tree": "reads the root, checks it, and asks the layout for the chunk index",
        "plan_leaf_reads": "decides which boxes of stored arrays each leaf needs",
        "read_boxes": "finds the bytes of chunks through the index, and lets I/O threads read and verify them",
        "TreeRead.finish_leaf": "builds a leaf when its last box was read; `rebuild` then makes the value",
    },
}
"""The functions to read first, in the order in which they are called, with what each does."""


def spine_table(traces: Mapping[str, Trace]) -> str:
    """Return `SPINE` as a table in Markdown, with the files in which the functions ran.

    Raises:
        ValueError: a function did not run, or several with its name did.
    """
    rows = ["| | function | file | does |", "|---|---|---|---|"]
    for operation, functions in SPINE.items():
        for name, text in functions.items():
            files = [file for file, names in traces[operation].items() if name in names]
            if len(files) != 1:
                raise ValueError(f"{name} of SPINE ran in {files} during a plain {operation}: name one that runs once")
            rows.append(f"| {operation} | `{name}` | `{files[0]}` | {text} |")
    return "\n".join(rows) + "\n"


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
    parser.add_argument("--write", action="store_true", help="write the table of the design note")
    options = parser.parse_args()
    traces = {}
    for name, traced in (("save", trace_plain_save), ("load", trace_plain_load)):
        with tempfile.TemporaryDirectory() as directory:
            files = traces[name] = traced(Path(directory))
        print(f"a plain {name}: {len(files)} files, {sum(map(len, files.values()))} functions")
        for file, functions in files.items():
            print(f"    {file}: {', '.join(functions)}")
    together = {file for files in traces.values() for file in files}
    code = sum(count_source((_CORE / file).read_text(encoding="utf-8")).code for file in together)
    print(f"both: {len(together)} files with {code:,} lines of code")
    if options.write:
        before, rest = NOTE.read_text(encoding="utf-8").split(_BEGIN)
        NOTE.write_text(f"{before}{_BEGIN}{spine_table(traces)}\n{_END}{rest.split(_END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
