"""HTML for notebooks."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from plugins.view.tests.conftest import state

DIFF: Any = ckptcore.diff


class Parsed(HTMLParser):
    """The tags and the text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_an_open_checkpoint_and_its_metadata(checkpoint: Path) -> None:
    with ckptcore.open(checkpoint) as open_checkpoint:
        parsed = Parsed(open_checkpoint._repr_html_() or "")
        assert open_checkpoint.bytes_read == 0
    assert "float32[64, 48], 12.3 kB" in parsed.text
    assert "3,288 parameters" in parsed.text
    assert (open_checkpoint._repr_html_() or "").count("closed") == 1
    assert Parsed(ckptcore.metadata(checkpoint)._repr_html_() or "").text == parsed.text


def test_a_part_and_an_array(checkpoint: Path) -> None:
    with ckptcore.open(checkpoint) as open_checkpoint:
        assert "layers.0.weight" in Parsed(open_checkpoint["model"]._repr_html_()).text
        assert "int16[2, 3, 4]" in Parsed(open_checkpoint["cube"]._repr_html_()).text
        assert open_checkpoint.bytes_read == 0


def test_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": state(), "rng": np.random.default_rng(0)})
    text = Parsed(ckptcore.metadata(tmp_path / "c")._repr_html_() or "").text
    assert "model" in text
    assert "rng" in text


def test_differences(checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "other", state(2.0))
    text = Parsed(DIFF(checkpoint, tmp_path / "other")._repr_html_()).text
    assert "3,071 of 3,072" in text
    assert "no difference" in Parsed(DIFF(checkpoint, checkpoint)._repr_html_()).text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;'\""
    ckptcore.save(tmp_path / "a", {name: np.ones(3), "v": name}, metadata={"note": name})
    ckptcore.save(tmp_path / "b", {name: np.zeros(3), "v": "x"})
    with ckptcore.open(tmp_path / "a") as open_checkpoint:
        shown = [
            open_checkpoint._repr_html_(),
            open_checkpoint[(name,)]._repr_html_(),
            DIFF(tmp_path / "a", tmp_path / "b")._repr_html_(),
        ]
    for html in shown:
        parsed = Parsed(html)
        assert {"script", "img"}.isdisjoint(parsed.tags)
        assert "<script>" in parsed.text


def test_long_and_deep_trees_are_cut(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = {"a.b": deep, "c": 1}
    ckptcore.save(tmp_path / "c", {"deep": deep, **{f"n{number}": number for number in range(5_000)}})
    html = ckptcore.metadata(tmp_path / "c")._repr_html_() or ""
    assert "more; `ckptcore view` shows all" in Parsed(html).text
    assert len(html) < 300_000


def test_without_this_distribution_notebooks_show_text(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptcore_view", None)
    monkeypatch.setitem(sys.modules, "ckptcore_view.notebook", None)
    assert ckptcore.metadata(checkpoint)._repr_html_() is None
