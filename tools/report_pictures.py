"""Take the pictures of the viewer in the documentation: ``make demo``, then ``python -m tools.report_pictures``.

Needs Chromium (the Debian package ``chromium``).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

_REPORT: Final = Path("report.html")
_IMAGES: Final = Path("docs/images")
_VIEWS: Final = {
    "report-array": ("#at=120/model&tab=tree&leaf=1", ".panel figure:nth-of-type(1) .plot-container"),
    "report-run": ("", "figure .plot-container"),
}
"""The address of each picture in the report, and what is visible once it is complete."""


def main() -> int:
    """Write the pictures. Return the exit code: 1 if there is no report or no browser."""
    chromium = shutil.which("chromium")
    if chromium is None or not _REPORT.exists():
        print("run `make demo` first, and install Chromium", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (address, complete) in _VIEWS.items():
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(_REPORT.absolute().as_uri() + address)
            page.locator(complete).last.wait_for()
            page.wait_for_load_state("networkidle")
            page.screenshot(path=_IMAGES / f"{name}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
