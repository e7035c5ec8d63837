"""Change the code in small ways and find out which changes the tests notice.

Run ``python -m tools.mutants --seed 18 --count 200 --paths ckptcore/commit ckptcore/loading --tests tests/loading
--out mutants.json``; a run that was interrupted continues. After a change of the code, run with ``--like
mutants.json``, which makes the same mutants again. Then ``--compare BEFORE AFTER`` lists the mutants that the tests no
longer notice.

A mutant has one change inside one function. Its name is made of the qualified name of the function, the kind of change
and the text that is changed, so it stays the same when files are renamed or when lines move. Each mutant is tested in a
fork of this process, which has imported the libraries that are slow to import, but nothing of ``ckptcore``. The files
of the worktree stay as they are: an import hook replaces the module, also in processes that tests start.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tools.mutant_hook import VARIABLE, install

_ROOT: Final = Path(__file__).resolve().parents[1]
_PRELOADED: Final = ("numpy", "ml_dtypes", "pytest", "safetensors", "torch", "jax")

_COMPARISONS: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: Final[Mapping[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        name: qualified name of the function, kind of change, the text that is changed, and a number where several
            changes have all of these in common.
        path: the file, relative to the worktree. It is not a part of the name.
        index: number of the change in the file.
    """

    name: str
    path: str
    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the tests for a mutant.

    Attributes:
        outcome: ``killed``, ``survived`` or ``timeout``.
        seconds: duration of the tests.
        path: the file that was changed.
    """

    outcome: str
    seconds: float
    path: str


@dataclass(frozen=True, slots=True)
class _Site:
    """A place that can be changed; `apply` changes the tree."""

    function: str
    kind: str
    text: str
    apply: Callable[[], object]


def find_mutants(root: Path, paths: Sequence[str]) -> Sequence[Mutant]:
    """Return all mutants of the Python files below paths of a worktree, in order."""
    files: list[Path] = []
    for path in paths:
        files += sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
    seen: Counter[str] = Counter()
    mutants = []
    for file in files:
        for index, site in enumerate(_sites(ast.parse(file.read_text(encoding="utf-8")))):
            name = f"{site.function} | {site.kind} | {site.text}"
            mutants.append(Mutant(f"{name} | {seen[name]}", str(file.relative_to(root)), index))
            seen[name] += 1
    return mutants


def mutated_source(source: str, index: int) -> str:
    """Return the source with one change, which is given by its number in the file."""
    tree = ast.parse(source)
    for number, site in enumerate(_sites(tree)):
        if number == index:
            site.apply()
            return ast.unparse(ast.fix_missing_locations(tree))
    raise IndexError(f"expected fewer than {index} changes")


def _sites(tree: ast.Module) -> Iterator[_Site]:
    for node, function in _functions(tree, ""):
        yield from _in_statements(node.body, function)


def _functions(node: ast.AST, outer: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield functions with their qualified names. A function inside another counts as a part of the outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, f"{outer}{child.name}"
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{outer}{child.name}.")


def _in_statements(body: list[ast.stmt], function: str) -> Iterator[_Site]:
    for number, statement in enumerate(body):
        if _is_log(statement):
            continue
        if isinstance(statement, ast.Raise) or (isinstance(statement, ast.Expr) and _is_call(statement.value)):

            def remove(number: int = number) -> None:
                body[number] = ast.Pass()

            yield _Site(function, "remove", _text(statement), remove)
        elif isinstance(statement, ast.Break | ast.Continue):

            def exchange(number: int = number, statement: ast.stmt = statement) -> None:
                body[number] = ast.Continue() if isinstance(statement, ast.Break) else ast.Break()

            yield _Site(function, "loop", _text(statement), exchange)
        if not isinstance(statement, ast.Raise | ast.Assert):
            yield from _in_statement(statement, function)


def _in_statement(statement: ast.stmt, function: str) -> Iterator[_Site]:
    if isinstance(statement, ast.If | ast.While):
        yield _negated(statement, function)
    elif isinstance(statement, ast.Return) and statement.value is not None and not _is_none(statement.value):

        def return_none(statement: ast.Return = statement) -> None:
            statement.value = ast.Constant(None)

        yield _Site(function, "return", _text(statement.value), return_none)
    for name, value in ast.iter_fields(statement):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr):
                yield from _in_expression(child, function)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _in_statements(child.body, function)
            elif isinstance(child, ast.withitem):
                yield from _in_expression(child.context_expr, function)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from _in_statements(value, function)


def _in_expression(expression: ast.expr, function: str) -> Iterator[_Site]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Compare):
            for number, operator in enumerate(node.ops):
                if type(operator) in _COMPARISONS:

                    def compare(node: ast.Compare = node, number: int = number) -> None:
                        node.ops[number] = _COMPARISONS[type(node.ops[number])]()

                    yield _Site(function, "compare", f"{_text(node)} ({number})", compare)
        elif isinstance(node, ast.BoolOp):

            def other(node: ast.BoolOp = node) -> None:
                node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()

            yield _Site(function, "and-or", _text(node), other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):

            def twice(node: ast.UnaryOp = node) -> None:
                node.operand = ast.UnaryOp(ast.Not(), node.operand)

            yield _Site(function, "not", _text(node), twice)
        elif isinstance(node, ast.IfExp):
            yield _negated(node, function)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:

            def arithmetic(node: ast.BinOp = node) -> None:
                node.op = _ARITHMETIC[type(node.op)]()

            yield _Site(function, "arithmetic", _text(node), arithmetic)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):

            def change(node: ast.Constant = node) -> None:
                node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1

            yield _Site(function, "constant", _text(node), change)
        elif isinstance(node, ast.Call) and _can_swap(node.args[:2]):

            def swap(node: ast.Call = node) -> None:
                node.args[:2] = node.args[1::-1]

            yield _Site(function, "swap", _text(node), swap)


def _can_swap(arguments: Sequence[ast.expr]) -> bool:
    """Return True for two arguments that differ."""
    if len(arguments) < 2 or any(isinstance(argument, ast.Starred) for argument in arguments):
        return False
    return _text(arguments[0]) != _text(arguments[1])


def _negated(node: ast.If | ast.While | ast.IfExp, function: str) -> _Site:
    def negate() -> None:
        node.test = ast.UnaryOp(ast.Not(), node.test)

    return _Site(function, "negate", _text(node.test), negate)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _is_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) or (isinstance(node, ast.Await) and isinstance(node.value, ast.Call))


def _is_log(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _text(statement).startswith("logger.")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def try_mutant(root: Path, mutant: Mutant | None, tests: Sequence[str], timeout: float) -> Result:
    """Run tests against a mutant in a fork of this process, or against the code as it is."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        scratch = Path(name)
        child = os.fork()
        if child == 0:
            _run_tests(root, mutant, tests, scratch)
        status = _wait(child, timeout)
        told = (scratch / "output").read_text(encoding="utf-8", errors="replace") if mutant is None else ""
    seconds = round(time.monotonic() - start, 2)
    if mutant is None and status != 0:
        raise SystemExit(f"the tests fail without a mutant:\n{told[-4000:]}")
    outcome = "timeout" if status is None else "killed" if status else "survived"
    return Result(outcome, seconds, "" if mutant is None else mutant.path)


def _run_tests(root: Path, mutant: Mutant | None, tests: Sequence[str], scratch: Path) -> None:
    """Run in the child; it does not return."""
    status = 3
    try:
        os.setsid()
        output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        if mutant is not None:
            original = root / mutant.path
            source = mutated_source(original.read_text(encoding="utf-8"), mutant.index)
            (scratch / "mutated.py").write_text(source, encoding="utf-8")
            shutil.copy(Path(__file__).with_name("mutant_hook.py"), scratch / "sitecustomize.py")
            os.environ[VARIABLE] = json.dumps([os.path.realpath(original), str(scratch / "mutated.py")])
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH", "")]))
            install()
        pytest = importlib.import_module("pytest")
        # The plugin faulthandler would wait for a thread of the parent that this fork does not have.
        without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "xdist")]
        options = ["-x", "-q", *without, "-m", "not slow"]
        status = int(pytest.main([*options, f"--basetemp={scratch / 'tests'}", *tests]))
    except BaseException:  # noqa: BLE001  # the fork must not return into the program of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, timeout: float) -> int | None:
    """Wait for the child; return its status, or None if it took too long. Ends all processes of its session."""
    end = time.monotonic() + timeout
    status: int | None = None
    while time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = code
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def compare(before: Mapping[str, Result], after: Mapping[str, Result]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the mutants that were noticed before and survive now, and those noticed before that do not exist now."""
    noticed = [name for name, result in before.items() if result.outcome != "survived"]
    survive = [name for name in noticed if name in after and after[name].outcome == "survived"]
    return survive, [name for name in noticed if name not in after]


def _read(path: Path) -> dict[str, Result]:
    mutants = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return {name: Result(**result) for name, result in mutants.items()}


def _write(path: Path, tests: Sequence[str], results: Mapping[str, Result]) -> None:
    report = {"tests": tests, "mutants": {name: asdict(result) for name, result in results.items()}}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test mutants, or compare two runs: return 1 if a mutant that was noticed now survives or does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", nargs="+", default=["ckptcore/commit", "ckptcore/loading"], help="what is changed")
    parser.add_argument("--tests", nargs="+", default=["tests/loading"], help="arguments of pytest, fastest first")
    parser.add_argument("--seed", type=int, default=18, help="chooses the mutants (default: 18)")
    parser.add_argument("--count", type=int, default=200, help="how many mutants (default: 200)")
    parser.add_argument("--most", type=int, help="stop after this many in this run")
    parser.add_argument("--like", type=Path, help="results of an earlier run: make the same mutants")
    parser.add_argument("--timeout", type=float, help="seconds for each mutant (default: 3 times the tests + 30)")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="the results")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two results")
    options = parser.parse_args(arguments)
    if options.compare is not None:
        survive, missing = compare(*map(_read, options.compare))
        print(f"{len(survive)} mutants were noticed before and survive:", *survive, sep="\n  ")
        print(f"{len(missing)} mutants were noticed before and do not exist:", *missing, sep="\n  ")
        return 1 if survive or missing else 0
    mutants = find_mutants(_ROOT, options.paths)
    if options.like is not None:
        wanted = _read(options.like)
        chosen = [mutant for mutant in mutants if mutant.name in wanted]
    else:
        chosen = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    results = _read(options.out) if options.out.exists() else {}
    left = [mutant for mutant in chosen if mutant.name not in results][: options.most]
    print(f"{len(mutants)} mutants, {len(chosen)} chosen, {len(left)} to test")
    for name in _PRELOADED:
        importlib.import_module(name)
    clean = try_mutant(_ROOT, None, options.tests, 3600)
    timeout = clean.seconds * 3 + 30 if options.timeout is None else options.timeout
    print(f"the tests take {clean.seconds} s", flush=True)
    for mutant in left:
        results[mutant.name] = result = try_mutant(_ROOT, mutant, options.tests, timeout)
        print(f"{result.outcome:9} {result.seconds:7.1f} s  {mutant.path}: {mutant.name}", flush=True)
        _write(options.out, options.tests, results)
    print(
        *[f"{count} {outcome}" for outcome, count in Counter(of.outcome for of in results.values()).items()], sep=", "
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
