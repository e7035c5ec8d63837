"""The metadata of every distribution, as a package index shows it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from ckptcore.distributions import DISTRIBUTIONS
from tests.architecture.sources import ROOT

PROJECTS = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]


def metadata(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


CORE = metadata(ROOT)

each_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda project: str(project.name))


def links(text: str) -> list[str]:
    """Return the targets of all links and images of a Markdown text."""
    tokens = [child for token in MarkdownIt("commonmark").parse(text) for child in token.children or ()]
    return [str(token.attrs.get("href") or token.attrs.get("src")) for token in tokens if token.type in LINKS]


LINKS = ("link_open", "image")


@each_project
def test_the_fields_are_complete(project: Path) -> None:
    found = metadata(project)
    for field in ("version", "requires-python", "license", "license-files", "classifiers"):
        assert found[field] == CORE[field], field
    assert 30 <= len(found["description"]) <= 120
    assert {"checkpoint", "machine-learning"} <= set(found["keywords"])
    assert "urls" not in found  # the project has no public address yet
    assert found["license-files"] == ["LICENSE"]
    assert (project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_project
def test_the_readme_is_useful_on_a_package_index(project: Path) -> None:
    found = metadata(project)
    text = (project / found["readme"]).read_text(encoding="utf-8")
    assert text.startswith(f"# {found['name']}\n")
    assert len(re.findall(r"\w+", text)) > 60
    dead = [target for target in links(text) if not target.startswith("https://")]
    assert dead == [], "relative links lead nowhere on a package index"


def test_descriptions_differ() -> None:
    assert len({metadata(project)["description"] for project in PROJECTS}) == len(PROJECTS)


def test_the_front_page_names_every_extra() -> None:
    for page in ("README.md", "PACKAGE.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [one.extra for one in DISTRIBUTIONS if f"`{one.extra}`" not in text] == [], page


def test_links_are_found() -> None:
    assert links("[a](b.md) ![c](d.svg) <https://e> [f][g]\n\n[g]: h\n") == ["b.md", "d.svg", "https://e", "h"]
