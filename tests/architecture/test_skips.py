"""Tests skip if a library is missing. All names of such libraries are correct, so a full installation skips none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("tests", "plugins") for path in sorted((ROOT / folder).rglob("test_*.py"))]


def skipped_without(source: str) -> Iterator[str]:
    """Yield the modules without which tests in this source skip."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            name = node.args[0]
            if isinstance(name, ast.Constant):  # other names come from parameters
                yield str(name.value)


def is_installed(name: str) -> bool:
    """Return True if a module is installed. Imports nothing."""
    top, *inner = name.split(".")
    spec = find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in inner:
        places = [folder / part for folder in folders if (folder / part).is_dir()]
        if not places and not any((folder / f"{part}.py").is_file() for folder in folders):
            return False
        folders = places
    return True


def test_no_test_skips_because_of_an_unknown_module() -> None:
    names = {(path, name) for path in SOURCES for name in skipped_without(path.read_text(encoding="utf-8"))}
    assert len(names) > 10
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(names) if not is_installed(name)]


def test_a_wrong_name_is_detected() -> None:
    """Show that the test above can fail."""
    source = 'import pytest\ndef f():\n    json = pytest.importorskip("json.nothing")\n'
    (name,) = skipped_without(source)
    assert not is_installed(name)
    assert is_installed("json.decoder") and not is_installed("nothing_of_this_name")


@pytest.mark.parametrize("name", ["json", "xml.etree.ElementTree"])
def test_a_right_name_is_found(name: str) -> None:
    assert is_installed(name)
