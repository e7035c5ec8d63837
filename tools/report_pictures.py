"""Take the pictures of the viewer: ``python -m tools.report_pictures``, after ``make demo``.

Writes the pictures of the documentation, and one for each question that a picture has to answer (`QUESTIONS`), in a
wide and a narrow window, light and dark. Look at them after a change of the page. Needs Chromium (the Debian package
``chromium``).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser, sync_playwright

_REPORT: Final = Path("report.html")
_IMAGES: Final = Path("docs/images")
_QUESTIONS_DIRECTORY: Final = Path("pictures-of-questions")
_NARROW: Final = 390
_SIZES: Final = {"wide": (1280, 900), "narrow": (_NARROW, 844)}
_SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
_DOCUMENTED: Final = {"report-array": "#at=120/model&tab=tree&leaf=1", "report-run": ""}
"""The address of each picture of the documentation."""

QUESTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "which-step-is-best": ("", "best step "),
    "why-is-it-kept": ("", "kept: "),
    "what-happens-to-the-others": ("", "would be deleted"),
    "where-did-it-die": ("", "The process was killed after step "),
    "which-framework-went-on": ("", "JAX instead of PyTorch"),
    "do-the-norms-grow": ("", "Norms over steps"),
    "which-array-is-largest": ("#at=120", "Largest arrays"),
    "how-much-is-optimizer": ("#at=120", "optimizer states"),
    "are-there-nan": ("#at=120", "None in 13 arrays"),
    "what-changed": ("#at=120/model&tab=differences", "4 of 4 arrays differ, most of all"),
    "what-blocked-the-training": ("#at=120&tab=timeline", "blocking"),
}
"""For each question to the report of the demo: the address of the view, and the text in it that answers it."""


def main() -> int:
    """Write the pictures. Return the exit code: 1 if there is no report or browser, or an answer is not in its view."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_QUESTIONS_DIRECTORY, help="the directory of the questions")
    out: Path = parser.parse_args().out
    chromium = shutil.which("chromium")
    if chromium is None or not _REPORT.exists():
        print("run `make demo` first, and install Chromium", file=sys.stderr)
        return 1
    unanswered = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, address in _DOCUMENTED.items():
            _take(browser, address, "wide", "light", _IMAGES / f"{name}.png")
        for size in _SIZES:
            for scheme in _SCHEMES:
                for name, (address, answer) in QUESTIONS.items():
                    if answer not in _take(browser, address, size, scheme, out / f"{name}-{size}-{scheme}.png"):
                        print(f"{name}: {answer!r} is not in the view {address or 'of the run'}", file=sys.stderr)
                        unanswered += 1
        browser.close()
    return 1 if unanswered else 0


def _take(browser: Browser, address: str, size: str, scheme: Literal["light", "dark"], path: Path) -> str:
    """Take a picture of a view, and return the text that is visible in it."""
    width, height = _SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(_REPORT.absolute().as_uri() + address)
    page.locator("main[data-shown]").wait_for()
    page.wait_for_function("document.querySelector('main').innerText.indexOf('Reading') < 0")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, full_page=path.parent != _IMAGES)
    text = page.locator("body").inner_text()
    page.close()
    return text


if __name__ == "__main__":
    sys.exit(main())
