"""The chart of the README, which is drawn from the recorded report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.chart import BEGIN, END, Bar, bars, caption, draw, main, table, with_caption
from benchmarks.peers import LOAD, SAVE
from benchmarks.report import Row
from tests.architecture.sources import ROOT

SPEEDS = {SAVE: {"ckptcore": 2.0, "Orbax v1": 0.5}, LOAD: {"ckptcore": 3.0, "safetensors": 4.0}}

SVG = "{http://www.w3.org/2000/svg}"


def a_report() -> dict[str, Any]:
    rows = [
        asdict(Row(case, library, 1.5 / speed, ratio=speeds["ckptcore"] / speed, nbytes=1_500_000_000))
        for case, speeds in SPEEDS.items()
        for library, speed in speeds.items()
    ]
    machine = {"processor": "A & B", "cores": 2, "memory": 16 << 30, "system": "Linux 6", "file_system": "ext4"}
    versions = {"python": "3.11.7", "torch": "2.9", "safetensors": "0.6"}
    return {
        "machine": machine,
        "versions": versions,
        "setting": {"rounds": 5, "scale": 1.0},
        "benchmarks": {"peers": rows},
    }


def test_bars_show_speeds_with_the_fastest_first() -> None:
    assert bars(a_report(), LOAD) == [Bar("safetensors", 4e9), Bar("ckptcore", 3e9)]
    with pytest.raises(ValueError, match="--only peers"):
        bars({"benchmarks": {}}, SAVE)


def test_the_chart_has_a_bar_for_each_library_in_proportion() -> None:
    image = ElementTree.fromstring(draw(a_report()))
    widths = [float(bar.attrib["width"]) for bar in image.iter(f"{SVG}rect")][1:]
    assert widths[1] / widths[0] == pytest.approx(0.25, rel=0.01)
    assert widths[3] / widths[2] == pytest.approx(0.75, rel=0.01)
    texts = [str(text.text) for text in image.iter(f"{SVG}text")]
    assert {"ckptcore", "Orbax v1", "safetensors", "2.00 GB/s", "0.50 GB/s", "4.00 GB/s"} <= set(texts)
    inside = float(image.attrib["width"])
    assert all(float(text.attrib["x"]) < inside - 60 for text in image.iter(f"{SVG}text") if "GB/s" in str(text.text))
    assert "Orbax v1 0.50 GB/s" in str(next(image.iter(f"{SVG}title")).text)


def test_the_caption_names_the_machine_and_the_versions() -> None:
    text = caption(a_report()).replace("\n", " ")
    assert "1.5 GB" in text and "A & B, 2 cores, 16 GiB, ext4, Linux 6" in text
    assert "Python 3.11.7, safetensors 0.6, torch 2.9" in text and "median of 5 rounds" in text


def test_the_table_has_a_row_for_each_peer_with_faster_ones_first() -> None:
    text = table(a_report())
    assert "medians of 5 rounds" in text and "A & B, 2 cores" in text
    rows = [line for line in text.splitlines() if line.startswith("| peers")]
    assert rows == [
        f"| {LOAD} | 500.00 ms | safetensors | 375.00 ms | 0.75 |",
        f"| {SAVE} | 750.00 ms | Orbax v1 | 3.00 s | 4.00 |",
    ]


def test_the_command_writes_the_image_and_the_caption(tmp_path: Path) -> None:
    results, chart, readme = tmp_path / "results.json", tmp_path / "images" / "speed.svg", tmp_path / "README.md"
    page = tmp_path / "speed.md"
    results.write_text(json.dumps(a_report()), encoding="utf-8")
    readme.write_text(f"# Title\n\n{with_caption_marks('old')}\n\nend\n", encoding="utf-8")
    files = ["--results", str(results), "--chart", str(chart), "--readme", str(readme), "--page", str(page)]
    assert main(files) == 0
    assert page.read_text("utf-8") == table(a_report())
    assert chart.read_text("utf-8") == draw(a_report())
    assert readme.read_text("utf-8") == f"# Title\n\n{with_caption_marks(caption(a_report()))}\n\nend\n"
    with pytest.raises(ValueError, match="the page has no lines"):
        with_caption("no comments", "text")


def with_caption_marks(text: str) -> str:
    return f"{BEGIN}\n{text}\n{END}"


def test_the_readme_shows_the_recorded_report() -> None:
    report = json.loads((ROOT / "benchmarks" / "results.json").read_text("utf-8"))
    assert (ROOT / "docs" / "images" / "speed.svg").read_text("utf-8") == draw(report)
    assert caption(report) in (ROOT / "README.md").read_text("utf-8")
    assert (ROOT / "docs" / "reference" / "speed.md").read_text("utf-8") == table(report)
    assert {bar.library for bar in bars(report, SAVE)} == {bar.library for bar in bars(report, LOAD)}
    assert len(bars(report, SAVE)) == 5
