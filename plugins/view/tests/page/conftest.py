"""Pages in a headless Chromium. A test fails if its page logs an error or requests another address."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ckptcore_view.report import write_report
from ckptcore_view.server import ViewServer
from ckptcore_view.viewed import Viewed
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ckptcore.context import default_context

Show = Callable[..., Page]

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
_PATIENCE_MS = 60_000
"""Milliseconds to wait for an expected state on a busy machine. Only a failing test waits this long."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("Chromium is not installed: install the Debian package chromium to test the page of the viewer")
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Return a function that shows a location in a new page.

    A server serves the page. If `report` is True, the page is a report instead. The page may log no error except one
    that contains `expected`.
    """
    problems: list[str] = []
    allowed = ""
    with ExitStack() as stack:

        def open_page(
            location: object, address: str = "", *, report: bool = False, other: str = "", policy: str = "",
            arrays: Any = None, expected: str = "", **settings: Any,
        ) -> Page:  # fmt: skip
            if report:
                file = tmp_path / "report.html"
                write_report(file, str(location), compare=other or None, policy=policy, arrays=arrays)
                url = file.as_uri()
            else:
                viewed = Viewed(str(location), default_context(), other=other, policy=policy)
                url = stack.enter_context(ViewServer(viewed)).url
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(_PATIENCE_MS)
            nonlocal allowed
            allowed = expected
            page.on("pageerror", lambda error: problems.append(f"error: {error}"))
            page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
            page.on("console", lambda message: message.type == "error" and problems.append(f"console: {message.text}"))
            own = (url.split("#")[0], "data:", "blob:")
            page.on(
                "request", lambda request: request.url.startswith(own) or problems.append(f"request: {request.url}")
            )
            page.goto(url + address)
            return page

        yield open_page
    assert [problem for problem in problems if not (allowed and allowed in problem)] == []
