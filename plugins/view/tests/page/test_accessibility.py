"""Accessibility on a wide screen and on a phone, in both colour schemes. axe-core checks WCAG 2.2 AA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from plugins.view.tests.page.conftest import Show

PHONE = {"width": 390, "height": 844}
VIEWS = {
    "": "figure",
    "#tab=norms": "ul.choices li",
    "#at=30": "[role=row]",
    "#at=30&tab=tree&leaf=0": ".panel figure",
    "#at=30&tab=files": "table",
    "#at=30&tab=timeline": ".plot-container",
    "#at=30&tab=differences": "[aria-label='Elements of arrays']",
    "#at=30&tab=origin": "code",
}
"""The address of each view, and a selector of an element that is visible once the view is complete."""


def violations(page: Page) -> list[str]:
    options: Any = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    return [
        f"{violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for violation in Axe().run(page, options=options).response["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("light", None, id="light-wide"),
        pytest.param("dark", PHONE, id="dark-phone", marks=pytest.mark.slow),
        pytest.param("dark", None, id="dark-wide", marks=pytest.mark.slow),
        pytest.param("light", PHONE, id="light-phone", marks=pytest.mark.slow),
    ],
)
def test_no_violations(scheme: str, size: Any, run: Path, show: Show) -> None:
    page = show(run, color_scheme=scheme, **({"viewport": size} if size else {}))
    for address, complete in VIEWS.items():
        page.goto(f"{page.url.split('#')[0]}{address}")
        expect(page.locator(complete).first).to_be_visible()
        expect(page.locator("main")).to_have_attribute("data-shown", address)
        assert violations(page) == [], address


@pytest.mark.parametrize(
    "address",
    [pytest.param(view, marks=[] if view in ("", "#at=30") else pytest.mark.slow) for view in VIEWS],
)
def test_a_phone_scrolls_only_down(address: str, run: Path, show: Show) -> None:
    page = show(run, address, viewport=PHONE)
    expect(page.locator("main")).to_have_attribute("data-shown", address)
    expect(page.locator(VIEWS[address]).first).to_be_visible()
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_a_phone_shows_either_the_tree_or_the_array(run: Path, show: Show) -> None:
    page = show(run, "#at=30", viewport=PHONE)
    page.locator(".tree .row .name", has_text="weight").first.click()
    expect(page.get_by_role("heading", name="model['layers.0.weight']")).to_be_visible()
    expect(page.get_by_role("treegrid")).to_be_hidden()
    page.get_by_role("button", name="← Tree").click()
    expect(page.get_by_role("treegrid")).to_be_visible()


def test_the_scheme_can_be_chosen(run: Path, show: Show) -> None:
    page = show(run)
    expect(page.locator(".plot-container").first).to_be_visible()
    background = "getComputedStyle(document.documentElement).backgroundColor"
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(background) == "rgb(13, 17, 23)"
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()


def test_the_keyboard_reaches_everything(run: Path, show: Show) -> None:
    page = show(run, "#at=30")
    expect(page.get_by_role("treegrid")).to_be_visible()
    reached = []
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent || document.activeElement.ariaLabel"))
    assert reached[0] == "Skip to content"
    assert {"run", "Theme: system", "Tree", "Files", "Timeline", "Differences", "Origin", "Search names"} <= set(
        reached
    )
    page.keyboard.press("Tab")
