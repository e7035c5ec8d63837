"""The built documentation: its search answers questions, and every link has a target. ``make docs`` builds it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.architecture.sources import ROOT

BUILT: Final = ROOT / "docs" / "_build" / "html"

QUESTIONS: Final = {
    "map_location": "how-to/questions",
    "strict=False": "how-to/questions",
    "bf16": "how-to/questions",
    "NFS": "how-to/questions",
    "Lustre": "how-to/questions",
    "slurm": "how-to/clusters",
    "kubernetes": "how-to/clusters",
    "migration": "how-to/questions",
    "another number of GPUs": "how-to/questions",
    "load the best step": "how-to/questions",
    "shell completion": "how-to/questions",
    "tied weights": "how-to/questions",
    "macOS": "how-to/questions",
    "Windows": "how-to/questions",
}
"""Questions to the search, each with the page that is among the first three results."""

CUT_TEXTS: Final = """() => {
  const picture = document.querySelector(".paper").getBoundingClientRect();
  return [...document.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < picture.left || box.right > picture.right || box.bottom > picture.bottom;
  }).map(text => text.textContent);
}"""

SEARCH: Final = "query => Search._performSearch(...Search._parseQuery(query)).reverse().map(found => found[0])"


@pytest.fixture(scope="module")
def built() -> Path:
    """Return the directory of the built pages. Skip if a page is newer than the build."""
    index = BUILT / "searchindex.js"
    sources = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    if not index.exists() or index.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        pytest.skip("the documentation is not built, or older than its sources: run `make docs`")
    return BUILT


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Yield a page of a headless Chromium."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("Chromium is not installed: install the Debian package chromium to test the documentation")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page()
        browser.close()


def test_the_search_answers_questions(built: Path, page: Page) -> None:
    page.goto((built / "search.html").as_uri())
    page.wait_for_function("Search._index !== null")
    results = {question: page.evaluate(SEARCH, question) for question in ("resume", *QUESTIONS)}
    assert results["resume"][0] == "how-to/resume-a-run"
    assert {
        question: pages[:3] for question, pages in results.items() if QUESTIONS.get(question, pages[0]) not in pages[:3]
    } == {}


def test_no_text_of_a_picture_is_cut_off(page: Page) -> None:
    cut = {}
    for picture in sorted((ROOT / "docs" / "pictures").glob("*.svg")):
        page.goto(picture.as_uri())
        cut[picture.name] = page.evaluate(CUT_TEXTS)
    assert len(cut) > 5 and not any(cut.values()), cut


class _Links(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id") or "")
        if tag == "a":
            self.links.append(attributes.get("href") or "")


def test_every_link_has_a_target(built: Path) -> None:
    pages = {page: _Links(page) for page in sorted(built.rglob("*.html"))}
    dead = []
    for page, parsed in pages.items():
        for link in parsed.links:
            if re.match(r"[a-z]+:", link):
                continue  # a link to another site
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            known = pages[target].anchors if target in pages else {""} if target.exists() else set[str]()
            if unquote(anchor) not in known:
                dead.append(f"{page.relative_to(built)}: {link}")
    assert len(pages) > 100 and not dead
