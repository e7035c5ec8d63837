"""The page of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

import ckptcore
from plugins.view.tests.conftest import add_panels, damage, state
from plugins.view.tests.page.conftest import Show

BOTH = pytest.mark.parametrize(
    "report", [pytest.param(False, id="served"), pytest.param(True, id="report", marks=pytest.mark.slow)]
)


@BOTH
def test_the_steps(report: bool, run: Path, show: Show) -> None:
    page = show(run, report=report)
    steps = page.get_by_role("region", name="Steps")
    expect(steps.get_by_role("row")).to_have_count(4)
    expect(steps.get_by_role("row").nth(1)).to_contain_text("committed")
    expect(steps.get_by_role("row").nth(3)).to_contain_text("0.1")
    charts = ["loss", *(["Norms over steps"] if report else []), "Duration of saves", "Size"]
    expect(page.locator("figcaption")).to_have_text(charts)
    expect(page.locator(".plot-container")).to_have_count(len(charts))
    page.get_by_label("Charts by").select_option("time")
    expect(page.locator(".plot-container")).to_have_count(len(charts))


@BOTH
def test_a_step(report: bool, run: Path, show: Show) -> None:
    page = show(run, report=report)
    page.get_by_role("region", name="Steps").get_by_role("link", name="30").click()
    expect(page.get_by_role("treegrid")).to_contain_text("layers")
    page.get_by_role("link", name="Differences").click()
    if not report:
        page.get_by_label("Compare with").select_option("step 10")
    expect(page.get_by_role("region", name="Elements of arrays")).to_contain_text("layers.0.weight")
    page.get_by_label("Location").get_by_role("link", name="run").click()
    expect(page.get_by_role("region", name="Steps")).to_be_visible()


@BOTH
def test_the_steps_that_a_policy_keeps(report: bool, run: Path, show: Show) -> None:
    page = show(run, report=report, policy="latest_n=1")
    steps = page.get_by_role("region", name="Steps")
    expect(steps.get_by_text("would be deleted")).to_have_count(2)
    expect(steps).to_contain_text("kept: the latest 1")


@BOTH
def test_panels_of_other_distributions(
    report: bool, run: Path, tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_panels(tmp_path / "guest", monkeypatch, bars="bars", broken="broken")
    page = show(run, report=report)
    section = page.locator("section", has=page.get_by_role("heading", name="Time"))
    expect(section.locator("p")).to_have_text(["<b>first</b>", "second"])
    figure = section.locator("figure")
    expect(figure.locator(".keys li")).to_have_text(["steps", "saves"])
    expect(figure.locator(".number").nth(1)).to_have_text("50 s")
    widths = [bar.get_attribute("style") for bar in figure.locator(".bar-part").all()]
    assert widths == ["width: 90.5%;", "width: 9.5%;", "width: 0%;", "width: 50%;"]
    figure.get_by_text("Data").click()
    expect(figure.get_by_role("row").nth(1)).to_have_text("job 190.5 s9.5 s")
    expect(section.get_by_role("region", name="Time", exact=True).get_by_role("row")).to_have_count(3)
    expect(page.get_by_text("ValueError: in https://user:***@host/x")).to_be_visible()


def test_another_policy(run: Path, show: Show) -> None:
    page = show(run, expected="400 (Bad Request)")
    page.get_by_label("Policy").fill("best_n=2:loss:min")
    page.get_by_role("button", name="Show what it keeps").click()
    steps = page.get_by_role("region", name="Steps")
    expect(steps.get_by_text("the best 2 by loss (min)")).to_have_count(2)
    page.get_by_label("Policy").fill("nonsense")
    page.get_by_role("button", name="Show what it keeps").click()
    expect(page.get_by_role("alert")).to_contain_text("nonsense")


def test_new_steps_appear_by_themselves(run: Path, show: Show) -> None:
    page = show(run)
    steps = page.get_by_role("region", name="Steps")
    expect(steps.get_by_role("row")).to_have_count(4)
    with ckptcore.Checkpointer(run) as checkpointer:
        checkpointer.save(40, state(), metrics={"loss": 0.01})
    expect(steps.get_by_role("row")).to_have_count(5)
    expect(steps.get_by_role("row").nth(1)).to_contain_text("40")


def test_the_first_step_of_an_empty_run_appears(tmp_path: Path, show: Show) -> None:
    (tmp_path / "run").mkdir()
    page = show(tmp_path / "run")
    expect(page.get_by_text("No step was saved yet")).to_be_visible()
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state())
    expect(page.get_by_role("region", name="Steps").get_by_role("row")).to_have_count(2)


@BOTH
def test_damaged_and_unfinished_steps(report: bool, run: Path, show: Show) -> None:
    (run / "10" / "model.safetensors").unlink()
    (run / "20" / "checkpoint.json").write_bytes(b"{")
    (run / ".40.0123456789abcdef.ckptcore").mkdir()
    page = show(run, report=report)
    steps = page.get_by_role("region", name="Steps")
    expect(steps.locator(".bad").filter(has_text="incomplete")).to_have_count(1)
    expect(steps.locator(".bad").filter(has_text="corrupt")).to_have_count(1)
    expect(steps).to_contain_text("model.safetensors is missing")
    expect(page.get_by_text("Unfinished: .40.")).to_be_visible()


@BOTH
def test_norms_over_steps(report: bool, run: Path, show: Show) -> None:
    page = show(run, "#tab=norms", report=report)
    if not report:
        page.get_by_label("Search arrays").fill("0/weight")
        page.get_by_role("checkbox").check()
    figure = page.locator("figure", has_text="Norms over steps")
    expect(figure.locator(".plot-container").first).to_be_visible()
    figure.get_by_text("Data").click()
    table = figure.get_by_role("region")
    expect(table).to_contain_text("model['layers.0.weight']")
    expect(table.get_by_role("row")).to_have_count(4)


def test_norms_of_a_checkpointable(tmp_path: Path, show: Show) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {"model": state(step), "extra": {"x": 1}})
    page = show(tmp_path / "run", "#tab=norms")
    page.get_by_role("link", name="model").click()
    page.get_by_label("Search arrays").fill("0/weight")
    page.get_by_role("checkbox").check()
    expect(page.locator("figure", has_text="Norms over steps").locator(".plot-container").first).to_be_visible()


def test_leaving_the_page_stops_reads(run: Path, show: Show) -> None:
    page = show(run, "#at=30&leaf=0")
    expect(page.locator(".panel .plot-container").first).to_be_visible()
    page.get_by_label("Location").get_by_role("link", name="run").click()
    page.go_back()
    expect(page.get_by_role("treegrid")).to_be_visible()


def test_a_metric_with_the_name_of_a_method(tmp_path: Path, show: Show) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state(), metrics={"constructor": 0.5})
        checkpointer.save(2, state())
    page = show(tmp_path / "run")
    steps = page.get_by_role("region", name="Steps")
    expect(steps.get_by_role("row").nth(2)).to_contain_text("0.5")
    expect(steps.get_by_role("row").nth(1)).not_to_contain_text("function")


def test_steps_that_a_policy_does_not_decide(run: Path, show: Show) -> None:
    page = show(run, "#policy=%20")
    expect(page.get_by_role("region", name="Steps").get_by_role("row")).to_have_count(4)
    expect(page.get_by_text("would be deleted")).to_have_count(0)


def test_norms_have_gaps_for_unreadable_steps(run: Path, show: Show) -> None:
    damage(run / "20" / "model.safetensors")
    page = show(run, "#tab=norms", expected="500 (Internal Server Error)")
    page.get_by_label("Search arrays").fill("cube")
    page.get_by_role("checkbox").check()
    expect(page.get_by_text("cube has gaps: step 20: ")).to_be_visible()


def test_older_steps_are_shown_on_demand(tmp_path: Path, show: Show) -> None:
    fast = ckptcore.Context(durability="none")
    for step in range(203):
        ckptcore.save(tmp_path / "run" / str(step), {"n": step}, context=fast)
    page = show(tmp_path / "run")
    rows = page.get_by_role("region", name="Steps").get_by_role("row")
    expect(rows).to_have_count(201)
    page.get_by_role("button", name="Show 3 of 3 more").click()
    expect(rows).to_have_count(204)


def test_the_story_of_a_run(tmp_path: Path, show: Show) -> None:
    """Show the best step, a killed job, a folder of runs and the layout of a phone in one page."""
    for name in ("first", "second"):
        for numbers in (range(10, 30, 10), range(30, 50, 10)):
            with ckptcore.Checkpointer(tmp_path / name) as checkpointer:
                for step in numbers:
                    checkpointer.save(step, state(), metrics={"loss": 1 / step, "lr": 0.1})
            owner = tmp_path / name / ".ckptcore/owner/owner.json"
            owner.write_text(owner.read_text().replace('"released": true', '"released": false'))
    page = show(tmp_path, policy="best_n=1:loss:min")
    runs = page.get_by_role("region", name="Runs")
    expect(runs.get_by_role("row")).to_have_count(3)
    expect(runs.get_by_role("row").nth(1)).to_contain_text("killed")
    expect(page.locator("figcaption")).to_have_text(["loss"])
    expect(page.locator(".keys li")).to_have_text(["first", "second"])
    runs.get_by_role("link", name="second").click()
    expect(page.locator(".mark text")).to_have_text(["best loss: 0.025 at step 40"])
    texts = page.locator("figure").first.locator(".event text")
    expect(texts).to_have_text(["killed, restart", "killed"])
    expect(page.locator("ol.events li")).to_have_text(
        [
            "The process was killed after step 20. A new process resumed; the first step that it saved is 30.",
            "The process was killed after step 40, and no process has resumed the run.",
        ]
    )
    expect(page.get_by_text("keeps the best 1 by loss (min): 1 of 4 steps")).to_be_visible()
    page.get_by_label("log axis").check()
    page.get_by_label("Smoothing").select_option("0.9")
    expect(page.locator("figure").first.locator(".line.faint")).to_have_count(1)
    steps = page.get_by_role("region", name="Steps")
    first = steps.get_by_role("row").nth(1)
    expect(first).to_contain_text("best loss")
    steps.get_by_role("button", name="step", exact=True).click()
    steps.get_by_role("button", name="step", exact=True).click()
    expect(first).to_contain_text("would be deleted")
    expect(first.get_by_text("would be deleted")).to_have_class("muted")
    page.get_by_role("button", name="Read the norms of the largest arrays").click()
    expect(page.locator("figure", has_text="Norms over steps").locator(".line")).to_have_count(5)
    expect(page.get_by_text("has gaps: step 10: 48 elements are NaN or infinite (and 3 more)")).to_be_visible()
    first.get_by_role("link", name="10").click()
    expect(page.get_by_role("region", name="Largest arrays").get_by_role("row").nth(1)).to_contain_text(
        "model['layers.0.weight']"
    )
    page.get_by_role("button", name="size", exact=True).first.click()
    rows = page.get_by_role("treegrid").get_by_role("row")
    expect(rows.nth(2)).to_contain_text("layers")
    expect(rows.nth(1)).to_contain_text("model")
    page.get_by_role("button", name="Read all arrays").click()
    expect(page.get_by_text("model['layers.1.bias']: 48 NaN, 0 Inf")).to_be_visible()
    page.get_by_label("Location").get_by_role("link", name="second").click()
    page.set_viewport_size({"width": 390, "height": 844})
    expect(steps.get_by_role("columnheader")).to_have_text(["step", "loss", "saved", "policy, notes"])
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    expect(page.get_by_text("The policy")).to_be_visible()


def test_every_step_of_a_report_opens_or_says_why_not(tmp_path: Path, show: Show) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (10, 20, 30):
            rows = {str(row): [] for row in range(19_981)} if step == 20 else {}  # fills the report
            checkpointer.save(step, {**state(step), **rows}, metrics={"loss": 1 / step})
    page = show(tmp_path / "run", report=True)
    steps = page.get_by_role("region", name="Steps")
    expect(page.get_by_text("1 step cannot be opened here")).to_be_visible()
    expect(page.locator("footer")).to_contain_text("Report of ckptcore")
    expect(steps.get_by_role("link")).to_have_text(["30", "20"])
    steps.get_by_role("link", name="20").click()
    page.locator(".tree .row .name", has_text="cube").click()
    expect(page.locator(".panel")).to_contain_text("maximum 1")
    expect(page.locator(".panel")).to_contain_text("for its newest step only")
    expect(page.locator(".panel")).to_contain_text("1 chunk in 1 object")
    expect(page.locator("svg.boxes")).to_have_count(0)  # the page draws chunks only if there are several
