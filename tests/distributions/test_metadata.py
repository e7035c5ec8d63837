"""The metadata of every distribution, as a package index shows it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ckptcore.distributions import DISTRIBUTIONS
from tests.architecture.sources import ROOT
from tools.versions import OLDEST, OLDEST_ADAPTERS, UNTESTED_EXTRAS

PROJECTS = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]


def metadata(project: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


CORE = metadata(ROOT)


OURS = {metadata(project)["name"] for project in PROJECTS}

APART = {
    "ckptcore-integrations": metadata(ROOT / "plugins" / "integrations")["optional-dependencies"].keys(),
    "ckptcore-jax": {"colocated"},
}
"""Extras by distribution that need newer versions than the rest, those of `constraints-oldest-adapters.txt`."""

OTHERS = {"test", *UNTESTED_EXTRAS}
"""Extras whose lowest versions are not tested. Extras for tests are not for users."""


def requirements_of(project: Path, without: Collection[str] = ()) -> list[Requirement]:
    """Return the requirements of a distribution and of its extras."""
    table = metadata(project)
    extras = [texts for name, texts in table.get("optional-dependencies", {}).items() if name not in without]
    return [Requirement(text) for texts in (table["dependencies"], *extras) for text in texts]


def lowest_of(requirements: Iterable[Requirement]) -> dict[str, set[Version]]:
    """Return the lowest allowed versions of distributions of others."""
    accepted: dict[str, set[Version]] = {}
    for requirement in requirements:
        if requirement.name not in OURS:
            lowest = {Version(specifier.version) for specifier in requirement.specifier if specifier.operator == ">="}
            accepted.setdefault(canonicalize_name(requirement.name), set()).update(lowest)
    return accepted


def pinned(file: str) -> dict[str, Version]:
    """Return the versions in a file of constraints."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


each_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda project: str(project.name))


def links(text: str) -> list[str]:
    """Return the targets of all links and images of a Markdown text."""
    tokens = [child for token in MarkdownIt("commonmark").parse(text) for child in token.children or ()]
    return [str(token.attrs.get("href") or token.attrs.get("src")) for token in tokens if token.type in LINKS]


LINKS = ("link_open", "image")


@each_project
def test_the_fields_are_complete(project: Path) -> None:
    table = metadata(project)
    for field in ("version", "requires-python", "license", "license-files", "classifiers"):
        assert table[field] == CORE[field], field
    assert 30 <= len(table["description"]) <= 120
    assert {"checkpoint", "machine-learning"} <= set(table["keywords"])
    assert "urls" not in table  # the project has no public address yet
    assert table["license-files"] == ["LICENSE"]
    assert (project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_project
def test_the_readme_is_useful_on_a_package_index(project: Path) -> None:
    table = metadata(project)
    text = (project / table["readme"]).read_text(encoding="utf-8")
    assert text.startswith(f"# {table['name']}\n")
    assert len(re.findall(r"\w+", text)) > 60
    dead = [target for target in links(text) if not target.startswith("https://")]
    assert dead == [], "relative links lead nowhere on a package index"


def test_descriptions_differ() -> None:
    assert len({metadata(project)["description"] for project in PROJECTS}) == len(PROJECTS)


def test_the_front_page_names_every_extra() -> None:
    for page in ("README.md", "PACKAGE.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        extras = [distribution.extra for distribution in DISTRIBUTIONS]
        assert [extra for extra in extras if f"`{extra}`" not in text] == [], page


def test_distributions_require_each_other_at_their_own_version() -> None:
    loose = [
        f"{project.name}: {requirement}"
        for project in PROJECTS
        for requirement in requirements_of(project)
        if requirement.name in OURS and str(requirement.specifier) != f"=={CORE['version']}"
    ]
    assert loose == []


def test_an_extra_has_the_same_meaning_in_all_distributions() -> None:
    """If two distributions have the same extra, one forwards to the other. Only extras for tests differ."""
    meanings: dict[str, set[str]] = {}
    for project in PROJECTS:
        table = metadata(project)
        for extra, requirements in table.get("optional-dependencies", {}).items():
            name = f"{table['name']}[{extra}]"
            if extra != "test":
                (meaning, *_) = [
                    *(requirement.partition("==")[0] for requirement in requirements if f"[{extra}]" in requirement),
                    name,
                ]
                meanings.setdefault(extra, set()).add(meaning)
    assert {extra: sorted(names) for extra, names in meanings.items() if len(names) > 1} == {}


def test_the_core_has_the_extra_of_every_replacement_adapter_and_format() -> None:
    extras = CORE["optional-dependencies"]
    offered = {
        name: [f"ckptcore-{plugin}[{name}]=={CORE['version']}"]
        for plugin in ("formats", "integrations")
        for name in metadata(ROOT / "plugins" / plugin)["optional-dependencies"].keys() - {"test"}
    }
    assert {name: extras.get(name) for name in offered} == offered
    own = {distribution.extra: [f"ckptcore-{distribution.extra}=={CORE['version']}"] for distribution in DISTRIBUTIONS}
    assert {name: extras[name] for name in extras.keys() - offered.keys() - {"all"}} == own
    assert Requirement(extras["all"][0]).extras == own.keys()


def test_the_lowest_versions_are_tested() -> None:
    tested = pinned(OLDEST)
    accepted = lowest_of(
        requirement
        for project in PROJECTS
        for requirement in requirements_of(project, without={*OTHERS, *APART.get(metadata(project)["name"], ())})
    )
    assert accepted == {name: {tested[name]} if name in tested else set() for name in accepted}


def test_the_lowest_versions_of_separate_extras_are_tested() -> None:
    """If two extras differ, the highest of their lowest versions is tested."""
    tested = pinned(OLDEST_ADAPTERS)
    tables = [metadata(project) for project in PROJECTS if metadata(project)["name"] in APART]
    accepted = lowest_of(
        Requirement(text)
        for table in tables
        for extra, texts in table["optional-dependencies"].items()
        if extra in APART[table["name"]] and extra not in OTHERS
        for text in texts
    )
    assert {name: max(versions) for name, versions in accepted.items()} == {name: tested[name] for name in accepted}
    fits = {"equinox", "flax", "jaxlib", "optax"}
    assert tested.keys() == accepted.keys() | fits
    assert UNTESTED_EXTRAS == tuple(sorted(UNTESTED_EXTRAS)) and {*UNTESTED_EXTRAS} < APART["ckptcore-integrations"]


def test_the_page_lists_the_tested_versions() -> None:
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([A-Za-z0-9_-]+) \| ([0-9.]+ \| [0-9.]+) \|$", text, flags=re.MULTILINE))
    oldest, newest = pinned(OLDEST), pinned("constraints.txt")
    named = {canonicalize_name(name): tuple(map(Version, row.split(" | "))) for name, row in rows.items()}
    assert named == {name: (oldest[name], newest[name]) for name in named}
    assert named.keys() >= {canonicalize_name(Requirement(text).name) for text in CORE["dependencies"]} | {
        "jax",
        "torch",
    }


def test_links_are_found() -> None:
    assert links("[a](b.md) ![c](d.svg) <https://e> [f][g]\n\n[g]: h\n") == ["b.md", "d.svg", "https://e", "h"]
