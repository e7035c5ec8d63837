"""A checkout as if all its distributions were installed: their modules and entry points, without pip."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def use_checkout() -> Sequence[str]:
    """Put the modules of this checkout before installed ones on `sys.path`. Return its entries for child processes.

    Plugins are found by the metadata of their distributions. A directory that lives as long as this process has these,
    made from the files ``pyproject.toml``. Of two distributions with one name, the first on `sys.path` counts.
    """
    metadata = tempfile.mkdtemp(prefix="ckptcore-checkout-")
    atexit.register(shutil.rmtree, metadata, ignore_errors=True)
    projects = sorted(ROOT.glob("plugins/*/pyproject.toml"))
    for path in (ROOT / "pyproject.toml", *projects):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        directory = Path(metadata, f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
        directory.mkdir()
        named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (directory / "METADATA").write_text(named, encoding="utf-8")
        points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
            for group, found in project.get("entry-points", {}).items()
        )
        (directory / "entry_points.txt").write_text(points, encoding="utf-8")
    added = [metadata, str(ROOT), *(str(path.parent / "src") for path in projects)]
    sys.path[:0] = added
    return added
