"""Files for GitHub, editors and newcomers are well formed, and name only existing files and targets."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.sources import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: Any) -> Iterator[str]:
    """Yield the commands of a workflow, once for each combination of values of its matrix."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            texts = [step.get("run", "")]
            for name, values in matrix.items():
                texts = [text.replace(f"${{{{ matrix.{name} }}}}", str(value)) for text in texts for value in values]
            yield from texts


def made(text: str) -> set[str]:
    """Return the targets of all calls of make in these commands."""
    lines = [line for line in re.split(r"\n|&&", text) if re.match(r"\s*make\s", line)]
    words = [word for line in lines for word in line.partition("#")[0].split()[1:]]
    return {word for word in words if not word.startswith("-") and "=" not in word and not word.isdigit()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_a_workflow_calls_only_existing_targets(path: Path) -> None:
    workflow = parsed(path)
    texts = list(commands(workflow))
    targets = set().union(*map(made, texts))
    assert targets and targets <= TARGETS
    assert "${{ matrix" not in "".join(texts)
    assert workflow["permissions"] == {"contents": "read"}
    assert True in workflow, "the key `on` of a workflow; YAML 1.1 reads it as true"


def test_the_workflow_of_changes_runs_what_local_integration_runs() -> None:
    workflow = parsed(ROOT / ".github" / "workflows" / "tests.yml")
    targets = set().union(*map(made, commands(workflow)))
    assert targets - {"setup-core", "test-core"} == made((ROOT / ".ci" / "run").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: str(path.name))
def test_a_form_of_issues_has_fields_with_distinct_ids(path: Path) -> None:
    form = parsed(path)
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) > 0


def test_updates_of_dependencies_name_existing_directories() -> None:
    updates = parsed(ROOT / ".github" / "dependabot.yml")["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip", "docker"}
    assert all((ROOT / update["directory"].strip("/")).is_dir() for update in updates)


def test_the_documentation_is_built_by_make() -> None:
    build = parsed(ROOT / ".readthedocs.yaml")["build"]
    assert set().union(*map(made, build["commands"])) == {"docs"}


def test_hooks_run_tools_of_the_project() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["entry"].startswith(".ci/tool ")
    run = subprocess.run([ROOT / ".ci" / "tool", "ckptcore-no-such-tool"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "run make setup" in run.stderr


def test_the_citation_has_the_version_of_the_project() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["title"], citation["version"], citation["license"]) == (
        project["name"], project["version"], project["license"],
    )  # fmt: skip
    assert citation["authors"] == project["authors"]
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["project"]["authors"] == project["authors"]


def test_the_container_sets_up_the_core() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert made(container["postCreateCommand"]) == {"setup-core"}
    dockerfile = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).read_text(encoding="utf-8")
    installed = re.findall(r"--no-install-recommends ([a-z ]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert len(installed) == 2, "the packages that continuous integration installs"
    assert {name for names in installed for name in names.split()} <= set(dockerfile.split())


def test_tests_of_the_core_exist() -> None:
    (line,) = re.findall(r"^CORE_TESTS := ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    paths = line.replace("\\\n", " ").split()
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_ignored_revisions_are_commits_with_their_subjects() -> None:
    text = (ROOT / ".git-blame-ignore-revs").read_text(encoding="utf-8")
    rows = re.findall(r"^# (.+)\n([0-9a-f]{40})$", text, re.MULTILINE)
    assert len(rows) == text.count("\n") // 2 > 0


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "RELEASING.md"])
def test_pages_for_newcomers_name_existing_files_and_targets(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", text)
    paths = [word for word in quoted if re.fullmatch(r"[\w.-]+/[\w./-]+|[A-Z]+\.(md|cff)", word)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert set().union(set(), *[made(word) for word in [*quoted, text]]) <= TARGETS
    assert "@" not in text and "http" not in text
