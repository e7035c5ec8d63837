"""Count the code of the project by package, without docstrings, comments and blank lines.

Run ``python tools/count.py [--path WORKTREE] [--json]``. A string that is a statement of its own counts as a docstring,
wherever it is. With ``--write``, the table of `ROOMS` is written into ``docs/design/small-core.md``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

__all__ = ["Count", "count_packages", "count_source", "imported_modules", "main", "public_names", "table"]

_FEW_LINES: Final = 100
_MODULES: Final = "ckptcore (modules)"
_PLAIN_SAVE_AND_LOAD: Final = """
import json, sys, tempfile
import ml_dtypes, numpy, pluggy, xxhash
before = set(sys.modules)
import ckptcore
with tempfile.TemporaryDirectory() as directory:
    ckptcore.save(directory + "/state", {"w": numpy.ones(3)})
    ckptcore.load(directory + "/state")
print(json.dumps(sorted(set(sys.modules) - before)))
"""

_BEGIN: Final = "<!-- written by python -m tools.count --write -->\n\n"
_END: Final = "\n<!-- end -->"

ROOMS: Final[Mapping[str, str]] = {
    "builtin": "a plain install saves NumPy arrays and Python values to local disks and to memory, in safetensors",
    "commit": "fencing, leases and locks keep one save from damaging another, on every storage",
    "io": "one engine moves and checks the bytes of every layout and storage, in bounded memory",
    "training": "a training loop needs steps, retention and resumption",
    "opening, matching, loading": "nothing else is required to load, whoever wrote the checkpoint",
    "saving": "every save runs through it: plain ones, strategies, jobs, background",
    "inspection": "`verify` never needs another distribution",
}
"""Large packages of the core, each with the reason why it stays there."""


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers of files and of lines.

    Attributes:
        files: Python files.
        short: files with fewer than 100 lines.
        lines: all lines.
        code: lines with code.
        docstrings: lines of docstrings, including blank lines inside them.
        comments: lines with nothing but a comment.
    """

    files: int = 0
    short: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*[getattr(self, field.name) + getattr(other, field.name) for field in fields(Count)])


def count_source(source: str) -> Count:
    """Count one file."""
    docstrings: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(_lines(node))
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            strings.update(_lines(node))
    lines = source.splitlines()
    code = comments = 0
    for number, line in enumerate(lines, 1):
        text = line.lstrip()
        if number in docstrings:
            continue
        if number in strings or (text and not text.startswith("#")):
            code += 1
        elif text:
            comments += 1
    return Count(1, len(lines) < _FEW_LINES, len(lines), code, len(docstrings), comments)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@cache  # it reads the whole project
def count_packages(root: Path) -> Mapping[str, Count]:
    """Count a worktree: packages of the core, sources and tests of plugins, and the other directories."""
    counts: dict[str, Count] = {}
    for name, path in _named_files(root):
        counts[name] = counts.get(name, Count()) + count_source(path.read_text(encoding="utf-8"))
    return counts


def _named_files(root: Path) -> Iterator[tuple[str, Path]]:
    core = root / "ckptcore"
    for path in _python_files(core):
        parts = path.relative_to(core).with_suffix("").parts
        yield f"ckptcore.{parts[0]}" if len(parts) > 1 else _MODULES, path
    for plugin in sorted((root / "plugins").glob("*/")):
        for package in sorted((plugin / "src").glob("*/")):
            for path in _python_files(package):
                yield package.name, path
        for path in _python_files(plugin / "tests"):
            yield "tests of plugins", path
    for name in ("tests", "benchmarks", "examples", "tools"):
        for path in _python_files(root / name):
            yield name, path


def _python_files(directory: Path) -> Sequence[Path]:
    return [path for path in sorted(directory.rglob("*.py")) if "__pycache__" not in path.parts]


def public_names(root: Path) -> Sequence[str]:
    """Return `ckptcore.__all__` of a worktree, from a process that imports it."""
    names: Sequence[str] = _run(root, "import json, ckptcore; print(json.dumps(list(ckptcore.__all__)))")
    return names


def imported_modules(root: Path) -> Sequence[str]:
    """Return the modules that a save and a load of ``{"w": np.ones(3)}`` import in a fresh process of a worktree.

    NumPy, ml_dtypes, pluggy and xxhash are imported before, so neither their modules count nor those that they import.
    The interpreter is that of the worktree's ``.venv`` if it has one, with the plugins that are installed there.
    """
    modules: Sequence[str] = _run(root, _PLAIN_SAVE_AND_LOAD)
    return modules


def _run(root: Path, code: str) -> Any:
    """Run code with the library of a worktree, and return the value of the JSON that it prints."""
    own = root / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [str(own if own.exists() else sys.executable), "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts of a worktree."""
    parser = argparse.ArgumentParser(prog="python tools/count.py", description=__doc__)
    parser.add_argument("--path", type=Path, default=Path(__file__).parents[1], help="worktree (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", action="store_true", help="write the table of the design note")
    options = parser.parse_args(arguments)
    root = options.path.resolve()
    counts = count_packages(root)
    if options.write:
        note = root / "docs" / "design" / "small-core.md"
        before, rest = note.read_text(encoding="utf-8").split(_BEGIN)
        note.write_text(f"{before}{_BEGIN}{rooms_table(counts)}{_END}{rest.split(_END)[1]}", encoding="utf-8")
    names, modules = public_names(root), imported_modules(root)
    if options.json:
        counted = {
            "packages": {name: asdict(count) for name, count in counts.items()},
            "public_names": names,
            "modules_of_a_save_and_a_load": modules,
        }
        print(json.dumps(counted, indent=1))
    else:
        print("\n".join(table(counts)))
        own = sum(module.partition(".")[0] == "ckptcore" for module in modules)
        print(f"\npublic names of ckptcore: {len(names)}")
        print(f"modules that a plain save and load import: {len(modules)}, {own} of them of ckptcore")
    return 0


def table(counts: Mapping[str, Count]) -> Iterator[str]:
    """Return the lines of a table of packages, with the sums of the core and of the plugins."""
    columns = [field.name for field in fields(Count)]
    core = _sum(count for name, count in counts.items() if name.startswith("ckptcore.") or name == _MODULES)
    plugins = _sum(count for name, count in counts.items() if name.startswith("ckptcore_"))
    totals = {"the core": core, "all plugins": plugins, "everything": _sum(counts.values())}
    width = max(map(len, [*counts, *totals]))
    yield " ".join([f"{'package':{width}}", *[f"{column:>10}" for column in columns]])
    for name, count in [*counts.items(), *totals.items()]:
        yield " ".join([f"{name:{width}}", *[f"{getattr(count, column):>10,}" for column in columns]])


def rooms_table(counts: Mapping[str, Count]) -> str:
    """Return `ROOMS` as a table in Markdown, with lines of code rounded to hundreds. The last row is all other code."""
    rows = ["| package | lines of code | stays in the core because |", "|---|---|---|"]
    rest = _sum(count for name, count in counts.items() if name.startswith("ckptcore.") or name == _MODULES).code
    for names, reason in ROOMS.items():
        code = sum(counts[f"ckptcore.{name}"].code for name in names.split(", "))
        rows.append(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {round(code, -2):,} | {reason} |")
        rest -= code
    others = "the model, protocols, trees, plans, jobs, options and errors, and `ckptcore.open`"
    rows.append(f"| all others | {round(rest, -2):,} | {others} |")
    return "\n".join(rows) + "\n"


def _sum(counts: Iterable[Count]) -> Count:
    return sum(counts, Count())


if __name__ == "__main__":
    sys.exit(main())
