"""The changelog has entries of at most three lines. Until the first release, it has no section for later changes."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT


def test_entries_are_short_and_in_sections_of_the_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["[0.1.0] - unreleased"]
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(entries) > 20
    assert [entry for entry in entries if entry.count("\n") > 2] == []
    assert [line for line in text.splitlines() if len(line) > 130] == []
