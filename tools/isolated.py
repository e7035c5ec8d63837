"""The packages of this environment without its distributions, for processes that must find none of this project."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

_METADATA: Final = (".dist-info", ".egg-info", ".egg-link", ".pth")


def packages_without_metadata(directory: Path, *names: str) -> Path:
    """Fill a new directory with links to installed packages, without this project's and without metadata. Return it.

    A process that ``python -S`` starts with it as PYTHONPATH has no installed distributions.

    Args:
        directory: the directory to create.
        names: packages and modules of this checkout that are linked, too.
    """
    directory.mkdir()
    for name in names:
        (directory / name).symlink_to(ROOT / name)
    for site in [Path(path) for path in sys.path if path.endswith("-packages")]:
        for entry in site.iterdir():
            link = directory / entry.name
            if not entry.name.startswith(("ckptcore", "__")) and entry.suffix not in _METADATA and not link.exists():
                link.symlink_to(entry)
    return directory


def copied_checkout(directory: Path) -> Path:
    """Copy the modules of this checkout, without the metadata that an editable installation leaves. Return the copy."""
    ignored = shutil.ignore_patterns("*.egg-info", "tests")
    for name in ("ckptcore", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    for project in ROOT.glob("plugins/*/pyproject.toml"):
        plugin = directory / "plugins" / project.parent.name
        shutil.copytree(project.parent / "src", plugin / "src", ignore=ignored)
        shutil.copy(project, plugin)
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def environment_without_metadata(packages: Path) -> dict[str, str]:
    """Return the variables of a process that finds only these packages."""
    return {**os.environ, "PYTHONPATH": str(packages), "PYTHONNOUSERSITE": "1"}
