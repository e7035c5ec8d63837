"""Rules of style that linters lack: names of files, first lines, and no mutable state in modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.sources import ROOT, Source, core_sources, plugin_sources, project_files

VAGUE = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}

STATEFUL = {
    "ckptcore.io.background": "a forked child has no saves under way",
    "ckptcore.builtin.local_calls": "a forked child must close the files that it inherits",
    "ckptcore.io.threads": "a forked child must start threads of its own",
}
"""Modules that may keep state, and why."""

MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "sort", "update",
    "__setitem__", "__delitem__", "appendleft", "popleft",
}  # fmt: skip


def state(tree: ast.Module) -> Iterator[str]:
    """Yield places where a function changes the value of a module-level name."""
    names = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        shared = names - _locals(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"line {node.lineno}: global {', '.join(node.names)}"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if node.func.attr in MUTATORS and isinstance(owner, ast.Name) and owner.id in shared:
                    yield f"line {node.lineno}: {owner.id}.{node.func.attr}()"
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Store | ast.Del)
                and isinstance(node.value, ast.Name)
                and node.value.id in shared
            ):
                yield f"line {node.lineno}: {node.value.id}[...] is set or deleted"


def _locals(function: ast.AST) -> set[str]:
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def test_modules_have_no_mutable_state() -> None:
    sources = [source for source in (*core_sources(), *plugin_sources()) if source.name not in STATEFUL]
    assert [f"{source.path}: {place}" for source in sources for place in sorted(set(state(source.tree)))] == []


def test_modules_that_may_keep_state_exist() -> None:
    assert set(STATEFUL) <= {source.name for source in core_sources()}


def test_no_file_has_a_name_without_a_meaning() -> None:
    vague = [
        str(path.relative_to(ROOT))
        for path in project_files(".py")
        if VAGUE & {path.stem.strip("_"), path.parent.name.strip("_")}
    ]
    assert vague == []


def test_the_first_line_describes_the_file() -> None:
    first = {
        source.path: (ast.get_docstring(source.tree) or "").partition("\n")[0].rstrip()
        for source in (*core_sources(), *plugin_sources())
    }
    assert {path: line for path, line in first.items() if not line.endswith((".", ":", "?"))} == {}


def conversions(tree: ast.Module) -> Iterator[str]:
    """Yield context managers that convert an error of their body into another error."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and "contextmanager" in map(ast.unparse, function.decorator_list):
            for node in ast.walk(function):
                if isinstance(node, ast.Try) and any(isinstance(inner, ast.Yield) for inner in _inside(node.body)):
                    handled = [inner for handler in node.handlers for inner in _inside(handler.body)]
                    if any(isinstance(inner, ast.Raise) and inner.exc is not None for inner in handled):
                        yield function.name


def _inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (inner for node in nodes for inner in ast.walk(node))


def test_context_managers_that_convert_errors_leave_no_cycle() -> None:
    converting = [
        f"{source.name}: {name}" for source in (*core_sources(), *plugin_sources()) for name in conversions(source.tree)
    ]
    assert converting == [], "decorate them with converts_errors: see ckptcore.errors"


def test_converted_errors_are_detected() -> None:
    text = (
        "@contextmanager\ndef f():\n    try:\n        yield\n    except OSError as error:\n        raise ValueError{}\n"
    )
    assert list(conversions(ast.parse(text.format("(1) from error")))) == ["f"]
    assert list(conversions(ast.parse(text.replace("raise ValueError{}", "raise")))) == []


def test_mutable_state_is_detected(tmp_path: Path) -> None:
    """Show that the test above can fail."""
    path = tmp_path / "stateful.py"
    path.write_text(
        "SEEN = {}\nNAMES = []\nCOUNT = 0\n"
        "def f(x):\n    SEEN[x] = 1\n    NAMES.append(x)\n"
        "def g():\n    global COUNT\n    COUNT += 1\n"
        "def h():\n    NAMES = []\n    NAMES.append(1)\n    return NAMES\n",
        encoding="utf-8",
    )
    assert sorted(set(state(Source(path, "stateful").tree))) == [
        "line 5: SEEN[...] is set or deleted",
        "line 6: NAMES.append()",
        "line 8: global COUNT",
    ]
