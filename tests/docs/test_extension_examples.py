"""The examples of the pages about plugins pass the tests that these pages tell plugin authors to inherit."""

from __future__ import annotations

import contextlib
import tempfile

from tests.architecture.sources import ROOT
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

PAGES = ("write-a-coordinator", "write-a-layout", "write-a-leaf-handler", "write-a-storage")


def classes_of(page_name: str) -> dict[str, object]:
    """The test classes that a page defines; its code runs once, in a directory of its own."""
    page = ROOT / "docs" / "how-to" / f"{page_name}.md"
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        module = page_module(page)
        for block in code_blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                run_python(block, page, module)
    return {name: value for name, value in vars(module).items() if name.startswith("Test") and isinstance(value, type)}


_FOUND = {page: classes_of(page) for page in PAGES}
for _classes in _FOUND.values():
    globals().update(_classes)


def test_every_page_ends_with_tests() -> None:
    assert all(_FOUND.values()), _FOUND
