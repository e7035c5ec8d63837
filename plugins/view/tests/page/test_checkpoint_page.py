"""The page of a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ckptcore_testing import ThreadJob
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from playwright.sync_api import Page, expect

import ckptcore
from ckptcore.protocols import Coordinator
from plugins.view.tests.conftest import state
from plugins.view.tests.page.conftest import Show

BOTH = pytest.mark.parametrize("report", [False, True], ids=["served", "report"])


def row(page: Page, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("gridcell").first.filter(has_text=name)).last


def choose(page: Page, name: str) -> None:
    """Choose an array of the tree."""
    page.locator(".tree .row .name", has_text=name).last.click()


@BOTH
def test_the_tree_shows_totals(report: bool, checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, report=report)
    expect(page.get_by_role("heading", name=str(checkpoint))).to_be_visible()
    rows = page.get_by_role("treegrid").get_by_role("row")
    expect(rows).to_have_count(13)
    expect(rows.nth(0)).to_contain_text("dict, 5 arrays")
    expect(rows.nth(4)).to_contain_text("float32[64, 48]")
    expect(rows.nth(4)).to_contain_text("12.3 kB")
    expect(rows.nth(9)).to_contain_text("= model['layers.0.weight']")
    expect(rows.nth(10)).to_contain_text("int 5")


def test_rows_fold_and_the_keyboard_moves(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint)
    tree = page.get_by_role("treegrid")
    rows = page.get_by_role("treegrid").get_by_role("row")
    page.locator(".row .name", has_text="layers").first.click()
    expect(rows).to_have_count(7)
    tree.focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(rows).to_have_count(13)
    expect(page.locator(".row.active")).to_contain_text("layers")
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator(".row.active")).to_contain_text("weight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="model['layers.0.weight']")).to_be_visible()
    expect(page.locator(".row[aria-selected=true]")).to_contain_text("weight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".row.active")).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("End")
    expect(page.locator(".row.active")).to_contain_text("cube")


def test_search(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint)
    page.get_by_label("Search names").fill("LAYERS.1 bias")
    expect(page.get_by_role("status").first).to_have_text("1 found")
    expect(page.locator(".row .name")).to_contain_text(["<root>", "model", "layers", "1", "bias"])
    page.get_by_label("Search names").fill("nonsense")
    expect(page.get_by_role("status").first).to_have_text("nothing found")
    page.get_by_label("Search names").fill("")
    expect(page.get_by_role("treegrid").get_by_role("row")).to_have_count(13)


@BOTH
def test_an_array(report: bool, checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, report=report)
    choose(page, "weight")  # of layer 1
    panel = page.locator(".panel")
    expect(panel).to_contain_text("float32[2, 48]")
    expect(panel).to_contain_text("minimum 1")
    expect(panel.locator("figure", has_text="Histogram").locator(".plot-container").first).to_be_visible()
    expect(panel.locator("figure", has_text="Elements [0:2, 0:48]").locator(".plot-container").first).to_be_visible()
    expect(panel).to_contain_text("1 chunk in 1 object")
    panel.get_by_text("Bytes", exact=True).click()
    expect(panel.get_by_role("region", name="Chunks")).to_contain_text("model.safetensors")


def test_elements_at_an_index(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, "#tab=tree&leaf=0", expected="400 (Bad Request)")
    index = page.get_by_label("Index of the elements, as in NumPy")
    expect(index).to_have_value("[0:64, 0:48]")
    index.fill("[3, 0:5]")
    page.get_by_role("button", name="Show").click()
    figure = page.locator("figure", has_text="Elements [3, 0:5]")
    figure.get_by_text("Data").click()
    expect(figure.get_by_role("region")).to_contain_text("147")
    index.fill("[999, 0]")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("alert")).to_contain_text("out of bounds")


def test_nan_is_marked(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, "#tab=tree&leaf=3")
    expect(page.locator(".panel strong.warning")).to_have_text("48")


def test_shards_on_devices(tmp_path: Path, show: Show) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    array = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("data", "model")))
    ckptcore.save(tmp_path / "c", {"w": array})
    page = show(tmp_path / "c", "#tab=tree&leaf=0")
    drawing = page.get_by_role("img", name="Shards of the job that saved it: 8 boxes.")
    expect(drawing.locator("rect")).to_have_count(8)
    expect(drawing.locator("text")).to_have_text(["0", "1", "2", "3", "4", "5", "6", "7"])
    expect(drawing.locator("title").nth(3)).to_have_text("[2:4, 2:4]: 3")


def test_a_large_array_is_read_on_demand(tmp_path: Path, show: Show) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.zeros(70_000_000, np.int8)})
    page = show(tmp_path / "c", "#tab=tree&leaf=0")
    button = page.get_by_role("button", name="Read all 70.0 MB for statistics")
    expect(button).to_be_visible()
    button.click()
    expect(page.locator(".panel")).to_contain_text("zeros 70,000,000")


@BOTH
def test_files_timeline_and_origin(report: bool, checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, report=report)
    page.get_by_role("link", name="Files").click()
    expect(page.get_by_role("region", name="Files")).to_contain_text("model.safetensors")
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator(".plot-container").first).to_be_visible()
    page.get_by_text("Data").click()
    expect(page.get_by_role("region", name="Phases of the save")).to_contain_text("write")
    page.get_by_role("link", name="Origin").click()
    expect(page.locator("main")).to_contain_text(ckptcore.metadata(checkpoint).digest or "")
    expect(page.locator("pre")).to_contain_text("for tests")


@BOTH
def test_damage_is_shown(report: bool, checkpoint: Path, show: Show) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    page = show(checkpoint, report=report)
    expect(page.get_by_role("alert")).to_contain_text("Damaged: 1 problem")
    expect(page.get_by_role("alert")).to_contain_text("instead of")


def other_state() -> dict[str, Any]:
    changed = state()
    changed["model"]["layers.1.weight"] = changed["model"]["layers.1.weight"].copy()
    changed["model"]["layers.1.weight"][1, 7] += 0.5
    changed["step"] = 6
    return changed


def test_differences(checkpoint: Path, tmp_path: Path, show: Show) -> None:
    ckptcore.save(tmp_path / "other", other_state())
    page = show(checkpoint, other=str(tmp_path / "other"))
    page.get_by_role("link", name="Differences").click()
    expect(page.get_by_role("region", name="Differences")).to_contain_text("step")
    region = page.get_by_role("region", name="Elements of arrays")
    region.get_by_role("row", name="layers.1.weight").get_by_role("button").click()
    expect(page.get_by_role("region", name="Worst elements")).to_contain_text("[1, 7]")
    expect(region).to_contain_text("1 of 96 differ")
    page.get_by_role("button", name="Compare the elements of 5 arrays").click()
    expect(region.get_by_text("the same")).to_have_count(4)


def test_differences_in_a_report(checkpoint: Path, tmp_path: Path, show: Show) -> None:
    ckptcore.save(tmp_path / "other", other_state())
    page = show(checkpoint, "#tab=differences", report=True, other=str(tmp_path / "other"))
    expect(page.get_by_role("region", name="Elements of arrays").get_by_text("the same")).to_have_count(4)
    expect(page.get_by_role("region", name="Elements of arrays")).to_contain_text("1 of 96 differ")


@BOTH
def test_several_checkpointables(report: bool, tmp_path: Path, show: Show) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": state(), "rng": np.random.default_rng(0)})
    page = show(tmp_path / "c", report=report)
    page.get_by_role("region", name="Checkpointables").get_by_role("link", name="model").click()
    expect(page.get_by_role("treegrid").get_by_role("row")).to_have_count(13)
    page.get_by_label("Location").get_by_role("link", name="c", exact=True).click()
    expect(page.get_by_role("region", name="Checkpointables")).to_contain_text("rng")


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "</script><script>alert(3)</script>", "\"'><b>&amp;",
    "javascript:alert(4)", "{{nonce}}", "%{y}<extra>", "\u202egnp.exe", "a\nb\tc", "${alert(5)}",
]  # fmt: skip


@BOTH
def test_hostile_names_are_text(report: bool, tmp_path: Path, show: Show) -> None:
    arrays = {name: np.arange(6.0).reshape(2, 3) for name in HOSTILE}
    metrics = dict.fromkeys(HOSTILE[:3], 1.0)
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {**arrays, "value": HOSTILE[0]}, metrics=metrics, metadata={"note": HOSTILE})
    page = show(tmp_path / "run", report=report)
    expect(page.locator("figcaption", has_text="<script>alert(1)</script>").first).to_be_visible()
    expect(page.locator(".plot-container")).to_have_count(6 if report else 5)  # a report shows norms without a click
    for tab in ("tab=norms", "at=2&tab=timeline", "at=2&tab=origin", "at=2&tab=differences", "at=2&tab=files"):
        page.goto(f"{page.url.split('#')[0]}#{tab}")
        expect(page.locator("main")).to_have_attribute("data-shown", f"#{tab}")
    page.goto(f"{page.url.split('#')[0]}#at=2")
    for name in HOSTILE[:4]:
        choose(page, name)
        expect(page.locator(".panel .plot-container").nth(1)).to_be_visible()
    expect(page.locator("main b, main img, main script")).to_have_count(0)


def test_whole_numbers_are_exact(tmp_path: Path, show: Show) -> None:
    ckptcore.save(tmp_path / "c", {"ids": np.array([1234567, 1234568])})
    page = show(tmp_path / "c", "#tab=tree&leaf=0")
    expect(page.locator(".panel")).to_contain_text("maximum 1234568")


def test_a_slice_without_elements(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, "#tab=tree&leaf=0")
    index = page.get_by_label("Index of the elements, as in NumPy")
    expect(index).to_have_value("[0:64, 0:48]")
    index.fill("[5:5]")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("The slice has no elements.")).to_be_visible()


def test_the_ranks_of_states_that_exist(tmp_path: Path, show: Show) -> None:
    def job(coordinator: Coordinator) -> None:
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        value = ckptcore.PerProcess({"w": np.full(3, coordinator.rank)})
        ckptcore.save_checkpointables(tmp_path / "c", {"data": value}, context=context)

    ThreadJob(3, timeout_seconds=60).run(job)
    shutil.rmtree(tmp_path / "c" / "data.rank_0")
    page = show(tmp_path / "c")
    links = page.get_by_role("region", name="Checkpointables").get_by_role("link")
    expect(links).to_have_text(["data, rank 1", "rank 2"])
    links.nth(1).click()
    choose(page, "w")
    expect(page.locator(".panel")).to_contain_text("minimum 2")


def test_a_page_of_a_replaced_checkpoint(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, expected="400 (Bad Request)")
    expect(page.get_by_role("treegrid").get_by_role("row")).to_have_count(13)
    ckptcore.save(checkpoint, {"aaa": np.full(4, 7.0), **state()}, overwrite=True)
    choose(page, "cube")
    expect(page.get_by_role("alert").first).to_contain_text("was replaced meanwhile: load the page again")


def test_tabs_that_do_not_exist(checkpoint: Path, show: Show) -> None:
    page = show(checkpoint, "#tab=__proto__")
    expect(page.get_by_role("treegrid").get_by_role("row")).to_have_count(13)


def test_the_worst_array_of_a_report(tmp_path: Path, show: Show) -> None:
    ckptcore.save(tmp_path / "a", {name: np.zeros(3) for name in "abc"})
    ckptcore.save(tmp_path / "b", {"a": np.ones(3), "b": np.full(3, 9.0), "c": np.zeros(3)})
    page = show(tmp_path / "a", "#tab=differences", report=True, other=str(tmp_path / "b"))
    expect(page.get_by_role("heading", name="Worst elements of b")).to_be_visible()
    region = page.get_by_role("region", name="Elements of arrays")
    region.get_by_role("row", name="a 24 B").get_by_role("button").click()
    expect(page.get_by_role("heading", name="Worst elements of a")).to_be_visible()
