"""Plugins that the core does not know. They are installed, found and tested without a change of our code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from ckptcore_testing.plugins import internal_imports

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TOYS = ("toy_directory", "toy_framework", "toy_layout", "toy_read_cache", "toy_save_strategy", "toy_storage")
MATRIX = ROOT / "tests" / "matrix" / "test_matrix.py"

CUT = (
    "(toyframe and numpy) or toyframe-toyframe or torch-toyframe-scroll or toyframe-jax-safetensors "
    "or test_every_plugin or test_there_is"
)
LONG = "test_any_combination_of_samples_works or gs or s3 or fsspec"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with copies of the toy plugins, and `site`, into which they are installed."""
    directory = tmp_path_factory.mktemp("strangers")
    for toy in TOYS:
        shutil.copytree(
            HERE / toy, directory / toy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(directory / "site")]
    subprocess.run([*command, *[str(directory / toy) for toy in TOYS]], check=True)
    return directory


def run_tests(installed: Path, *arguments: str) -> dict[str, str]:
    """Run pytest with the toy plugins installed. Return the outcome of each test by its name."""
    report = installed / "report.xml"
    environment = {**os.environ, "PYTHONPATH": str(installed / "site")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += [f"--rootdir={ROOT}", f"--confcutdir={ROOT}", f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failed = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = failed[0] if failed else "passed"
    return outcomes


@pytest.mark.parametrize("toy", [pytest.param(toy, marks=[pytest.mark.slow] * (toy == "toy_layout")) for toy in TOYS])
def test_a_toy_plugin_passes_its_conformance_tests(installed: Path, toy: str) -> None:
    outcomes = run_tests(installed, str(installed / toy / "tests"))
    assert list(outcomes.values()).count("passed") > 8
    assert "failure" not in outcomes.values()


@pytest.mark.slow
def test_toy_plugins_take_part_in_the_matrix(installed: Path) -> None:
    """Run a part of the matrix. The next test runs all combinations."""
    outcomes = run_tests(installed, str(MATRIX), "--slow", "--full", "-k", f"({CUT}) and not ({LONG})")
    passed = [name for name, outcome in outcomes.items() if outcome == "passed"]
    for pair in (
        "toyframe-numpy-scroll-file",
        "numpy-toyframe-safetensors-file",
        "toyframe-toyframe-scroll-memory",
        "toyframe-toyframe-scroll-toy",
        "toyframe-toyframe-safetensors-toy",
        "torch-toyframe-scroll-file",
        "toyframe-jax-safetensors-file",
    ):
        assert any(name.endswith(f"[{pair}]") for name in passed), f"the matrix has no {pair}: {sorted(outcomes)[:40]}"
    assert any("crate" in name for name in passed), "the toy's container takes no part"
    assert set(outcomes.values()) == {"passed"}


@pytest.mark.slow
def test_toy_plugins_pass_the_full_matrix(installed: Path, full: bool) -> None:
    outcomes = run_tests(
        installed, str(MATRIX), "--slow", "-k", "toy or scroll" if full else "(toy or scroll) and file"
    )
    assert set(outcomes.values()) == {"passed"}
    assert sum("toyframe" in name for name in outcomes) > (500 if full else 50)


@pytest.mark.slow
def test_without_the_installation_the_matrix_has_no_toy_plugins() -> None:
    """Show that only the installation adds the toy plugins to the matrix."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-c", str(ROOT / "pyproject.toml"), str(MATRIX)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search("-safetensors-file", listed)
    assert not re.search("toyframe|scroll", listed)


@pytest.mark.parametrize("path", sorted(HERE.glob("toy_*/**/*.py")), ids=lambda path: str(path.relative_to(HERE)))
def test_toy_plugins_import_only_public_modules(path: Path) -> None:
    assert internal_imports(path) == []


def test_an_import_of_an_internal_module_is_detected(tmp_path: Path) -> None:
    """Show that the test above can fail."""
    source = tmp_path / "nosy.py"
    source.write_text(
        "from ckptcore.model import Box\nimport ckptcore.saving.save\n"
        "def f():\n    from ckptcore import commit, load\n",
        encoding="utf-8",
    )
    assert [line.rpartition(" ")[2] for line in internal_imports(source)] == [
        "ckptcore.saving.save",
        "ckptcore.commit",
    ]


def test_our_code_does_not_mention_the_toy_plugins() -> None:
    mentioned = [
        str(path)
        for folder in ("ckptcore", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"toyframe|toymirror|toyscroll|toycache|toyspare|toyattic|toy_", path.read_text(encoding="utf-8"))
    ]
    assert mentioned == []
