"""The examples on the pages about plugins pass the conformance tests that these pages recommend."""

from __future__ import annotations

import contextlib
import tempfile

import pytest
from ckptcore_testing import LayoutTests

from tests.architecture.sources import ROOT
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

PAGES = ("write-a-coordinator", "write-a-layout", "write-a-leaf-handler", "write-a-storage")


def classes_of(page_name: str) -> dict[str, object]:
    """Return the test classes that a page defines. Its code runs once, in a temporary directory."""
    page = ROOT / "docs" / "how-to" / f"{page_name}.md"
    module = page_module(page, "examples")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for block in code_blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                run_python(block, page, module)
    return {name: value for name, value in vars(module).items() if name.startswith("Test") and isinstance(value, type)}


# Pytest collects test classes after it imported this module. An error in one page must not hide the others.
_FOUND: dict[str, dict[str, object] | Exception] = {}
for _page in PAGES:
    try:
        _classes = classes_of(_page)
    except Exception as error:  # noqa: BLE001  # raised by the test below
        _FOUND[_page] = error
    else:
        _FOUND[_page] = _classes
        for _suite in _classes.values():
            if isinstance(_suite, type) and issubclass(_suite, LayoutTests):
                # Fewer than the defaults, with which the tests of our layouts run.
                _suite.tampered_states, _suite.most_damages = 200, 10
        globals().update(_classes)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_ends_with_tests(page: str) -> None:
    classes = _FOUND[page]
    if isinstance(classes, Exception):
        raise classes
    assert classes
