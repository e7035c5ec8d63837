"""The dry run of a release: versions, addresses, and the order of distributions."""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.sources import ROOT
from tools import release

PROJECT = """[project]
name = "ckptcore-view"
version = "0.1.0"
dependencies = ["ckptcore==0.1.0", "ckptcore-tools[all]==0.1.0", "click>=8.1", "other==0.1.0"]
"""


def requires(project: Path) -> set[str]:
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {Requirement(text).name for text in table["dependencies"]}


def test_a_distribution_is_released_after_its_requirements() -> None:
    places = release.projects()
    names = list(places)
    assert names[0] == "ckptcore"
    assert len(names) == 1 + len(list(ROOT.glob("plugins/*/pyproject.toml")))
    for position, name in enumerate(names):
        assert requires(places[name]) & set(names) <= set(names[:position])


def test_the_version_is_set_in_projects_and_requirements() -> None:
    text = release.with_version(PROJECT, "1.2.3", ["ckptcore", "ckptcore-tools"])
    assert tomllib.loads(text)["project"] == {
        "name": "ckptcore-view",
        "version": "1.2.3",
        "dependencies": ["ckptcore==1.2.3", "ckptcore-tools[all]==1.2.3", "click>=8.1", "other==0.1.0"],
    }


def test_every_source_gets_the_version(tmp_path: Path) -> None:
    places = release.projects()
    for name, place in places.items():
        copy = tmp_path if place == ROOT else tmp_path / "plugins" / name
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "pyproject.toml").write_bytes((place / "pyproject.toml").read_bytes())
    (tmp_path / "CITATION.cff").write_bytes((ROOT / "CITATION.cff").read_bytes())
    release.set_version("7.8.9", tmp_path)
    for path in (tmp_path, *(tmp_path / "plugins").iterdir()):
        project = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        texts = [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
        ours = [requirement for text in texts if (requirement := Requirement(text)).name in places]
        assert project["version"] == "7.8.9"
        assert {str(requirement.specifier) for requirement in ours} == {"==7.8.9"}
    assert "\nversion: 7.8.9\n" in (tmp_path / "CITATION.cff").read_text(encoding="utf-8")


def test_addresses_are_added_to_the_metadata() -> None:
    text = release.with_urls(PROJECT, {"Source code": "https://example.org/ckptcore"})
    assert tomllib.loads(text)["project"]["urls"] == {"Source code": "https://example.org/ckptcore"}
    assert release.with_urls(PROJECT, {}) == PROJECT


def test_a_wrong_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        release.main(["seven"])
    assert "'seven' is not a version: use one such as 0.1.0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_dry_run_builds_all_wheels_under_one_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["7.8.9rc1", "--out", str(tmp_path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name.split("-")[0].replace("_", "-") for path in paths] == list(release.projects())
    assert {path.name.split("-")[1] for path in paths} == {"7.8.9rc1"}
    assert sorted(paths) == sorted(tmp_path.glob("*.whl"))
