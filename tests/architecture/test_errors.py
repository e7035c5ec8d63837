"""The tree drawn in the docstring of `ckptcore.errors` is the tree of its classes."""

from __future__ import annotations

import builtins
import inspect
import re

import ckptcore.errors
from ckptcore.errors import CheckpointError, converts_errors

LINE = re.compile(r"^(?P<indent>[│├└─\s]*)(?P<name>[A-Z]\w+)\s*(?:\((?P<builtin>\w+)\))?")


def drawn_tree(docstring: str) -> dict[str, tuple[str | None, str | None]]:
    """Return for each drawn class the class above it, and the builtin class in parentheses."""
    drawn: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in docstring.splitlines():
        if not re.match(r"^\s{4}[│├└─ ]*[A-Z]\w+", line):
            continue
        match = LINE.match(line)
        assert match is not None, line
        depth, name = len(match["indent"]), match["name"]
        while above and above[-1][0] >= depth:
            above.pop()
        assert name not in drawn, f"{name} is drawn twice"
        drawn[name] = (above[-1][1] if above else None, match["builtin"])
        above.append((depth, name))
    return drawn


def is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def actual_tree() -> dict[str, tuple[str | None, str | None]]:
    """Return for each class of the module its base in the module, and its builtin base."""
    classes = {
        name: value
        for name, value in vars(ckptcore.errors).items()
        if is_error(value) and value.__module__ == ckptcore.errors.__name__
    }
    tree: dict[str, tuple[str | None, str | None]] = {}
    for name, value in classes.items():
        ours = [base.__name__ for base in value.__bases__ if base.__name__ in classes]
        others = [base.__name__ for base in value.__bases__ if base.__name__ not in classes]
        assert len(ours) <= 1 and len(others) <= 1, f"{name} has bases {value.__bases__}"
        tree[name] = (ours[0] if ours else None, others[0] if others and others != ["Exception"] else None)
    return tree


def test_the_documented_error_tree_is_correct() -> None:
    assert drawn_tree(ckptcore.errors.__doc__ or "") == actual_tree()


def test_every_error_is_exported() -> None:
    assert set(actual_tree()) == set(ckptcore.errors.__all__) - {converts_errors.__name__}


def test_every_error_is_a_checkpoint_error_and_has_a_builtin_base() -> None:
    fitting = {value for value in vars(builtins).values() if inspect.isclass(value) and issubclass(value, Exception)}
    for name in actual_tree():
        error = getattr(ckptcore.errors, name)
        assert issubclass(error, CheckpointError)
        if error is not CheckpointError:
            assert fitting.intersection(error.__mro__) - {Exception}, f"{name} is no builtin error"


def test_a_difference_is_detected() -> None:
    """Show that the comparison above can fail."""
    drawing = (
        "Errors.\n\n    Top\n    ├── Left   (ValueError)  text\n    │   └── LeftLow   text\n    └── Right   text\n"
    )
    assert drawn_tree(drawing) == {
        "Top": (None, None),
        "Left": ("Top", "ValueError"),
        "LeftLow": ("Left", None),
        "Right": ("Top", None),
    }
