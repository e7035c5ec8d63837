"""The template of `docs/how-to/write-a-plugin.md` is installed without changes, and passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ckptcore_testing.plugins import internal_imports

from tests.architecture.sources import ROOT

TEMPLATE = ROOT / "templates" / "plugin"


@pytest.mark.system
def test_the_template_passes_the_conformance_tests(tmp_path: Path) -> None:
    shutil.copytree(TEMPLATE, tmp_path / "plugin", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(tmp_path / "plugin")], check=True)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "plugin" / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("path", sorted(TEMPLATE.glob("**/*.py")), ids=lambda path: path.name)
def test_the_template_imports_public_modules_only(path: Path) -> None:
    assert internal_imports(path) == []


def test_the_page_explains_every_file() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-plugin.md").read_text(encoding="utf-8")
    files = [path for path in TEMPLATE.rglob("*") if path.suffix in {".py", ".toml"} and path.stat().st_size > 200]
    missing = [path.name for path in files if f"../../{path.relative_to(ROOT)}" not in page]
    assert not missing, missing
