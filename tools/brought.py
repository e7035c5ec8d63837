"""Write the table of what programs bring, from the tests with the mark ``brings``.

    python -m tools.brought            write docs/reference/what-programs-bring.md
    python -m tools.brought --check    only compare it

A test adds a row by a mark, at the function or at a parameter:

    @pytest.mark.brings("BatchNorm without a counter", "torch", "same")

All tests, also slow ones, are collected but not run. All libraries of the group `dev` must be installed. Tests with
trainers, which need other libraries, are only parsed, so their marks must have literal texts.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
_TRAINERS: Final = ROOT / "plugins/integrations/tests/trainers"
_PAGE: Final = ROOT / "docs/reference/what-programs-bring.md"

RESULTS: Final = ("same", "plain form", "refused")

_INTRODUCTION: Final = """\
# What programs bring

Objects that programs save and load, each with a test. `python -m tools.brought` writes this page from
the marks of the tests, which are in `tests` and `plugins/*/tests`.

- **same**: a load restores the object. Training continues as if it had not been interrupted.
- **plain form**: a load returns the content in another form, such as a dict of the parts.
- **refused**: an error says why, and what to do. Nothing is changed.

The rows of `test_optimizer_matrix` and `test_scheduler_matrix` were tried in all combinations: a model
that is plain, in `DistributedDataParallel`, in activation checkpoints, compiled, or sharded by FSDP2
(if the optimizer supports it); its optimizer saved by number or by name; loaded into objects that are
new, have made steps, or are on the meta device; from four layouts, from a checkpoint of
torch.distributed.checkpoint, and from a file of `torch.save`. Refused are only files of PyTorch with
objects that PyTorch alone reads: DTensors in a file of `torch.save`, and the states of torchao.

The rows of `test_optax_matrix`, `test_train_state_matrix`, `test_nnx_matrix`, `test_equinox_matrix` and
`test_jax_libraries_matrix` were tried in all combinations of: files of five layouts, and of both versions of
Orbax; an abstract tree that is a new state, a state after a jitted step, or the result of `eval_shape` or of
`ckptcore.abstract`; `load` and `load_into`. The next step is the same to the bit, and donated memory is reused.

Trainers are killed in the middle of a save, and resumed. What is refused is refused when the training starts.

| object | library | result | test |
|---|---|---|---|
"""


class Row(NamedTuple):
    """An object that a test saves and loads."""

    library: str
    object: str
    result: str
    test: str


class Rows:
    """A plugin of pytest that collects the rows."""

    def __init__(self) -> None:
        """Start without rows."""
        self.rows: set[Row] = set()
        self.problems: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record files whose tests cannot be collected, for example because a library is missing."""
        if not report.passed:
            self.problems.append(f"{report.nodeid}: {report.longrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Record the marks."""
        for item in items:
            path, _, name = item.nodeid.partition("::")
            test = f"{Path(path).name}::{name.partition('[')[0]}"
            for mark in item.iter_markers("brings"):
                self.add(test, *mark.args)

    def parse(self, file: Path) -> None:
        """Record the marks of a file that is not imported."""
        for test, arguments in literal_marks(file.name, file.read_text(encoding="utf-8"), "brings"):
            self.add(test, *arguments)

    def add(self, test: str, object_: str, library: str, result: str) -> None:
        """Add a row."""
        if result not in RESULTS:
            self.problems.append(f"{test}: the result {result!r} is not one of {', '.join(RESULTS)}")
        self.rows.add(Row(library, object_, result, test))


def literal_marks(file: str, source: str, mark: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the tests of a file that have a mark, and the literal arguments of each mark."""
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        for node in [part for decorator in function.decorator_list for part in ast.walk(decorator)]:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{mark}":
                yield f"{file}::{function.name}", [ast.literal_eval(argument) for argument in node.args]


def files_with(mark: str) -> Sequence[Path]:
    """Return the files of tests that have a mark."""
    places = [ROOT / "tests", *sorted((ROOT / "plugins").glob("*/tests"))]
    files = [file for place in places for file in sorted(place.rglob("test_*.py"))]
    return [file for file in files if f"mark.{mark}(" in file.read_text(encoding="utf-8")]


def write_page(path: Path, page: str, arguments: Sequence[str], module: str) -> int:
    """Write a page, or compare it if `arguments` have ``--check``. Return 1 if it differs."""
    if "--check" not in arguments:
        path.write_text(page, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != page:
        print(f"{path.relative_to(ROOT)} differs from the marks of the tests: run python -m {module}")
        return 1
    return 0


def pinned_versions(constraints: str) -> Mapping[str, str]:
    """Return the versions of libraries by name, in lower case."""
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE)}


def written_page(rows: Iterable[Row], versions: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        rows: the rows, in any order.
        versions: versions of libraries. A library without one is a part of Python.

    Raises:
        ValueError: a row has an unknown library.
    """
    lines = []
    for row in sorted(rows, key=lambda row: (row.library.lower(), row.object.strip("`").lower(), row)):
        if row.library != "Python" and row.library.lower() not in versions:
            raise ValueError(f"{row.test}: constraints.txt has no version of {row.library}")
        library = f"{row.library} {versions.get(row.library.lower(), '')}".strip()
        lines.append(f"| {row.object} | {library} | {row.result} | `{row.test}` |\n")
    return _INTRODUCTION + "".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Write or compare the page. Return 1 if a test cannot be collected, or if the page differs."""
    files = files_with("brings")
    rows, output = Rows(), io.StringIO()
    parsed = [file for file in files if file.is_relative_to(_TRAINERS)]
    for file in parsed:
        rows.parse(file)
    collected = [str(file) for file in files if file not in parsed]
    with contextlib.redirect_stdout(output):
        pytest.main(["--collect-only", "-q", "--slow", "-n", "0", "-p", "no:cacheprovider", *collected], [rows])
    if rows.problems:
        print(*rows.problems, sep="\n")
        return 1
    page = written_page(rows.rows, pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    return write_page(_PAGE, page, arguments, "tools.brought")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
