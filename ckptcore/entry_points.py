"""Entry points of the installed distributions.

`importlib.metadata` finds the same ones, but takes longer than a small save: it imports the packages `email`, `csv` and
`zipfile`, and reads the metadata of each distribution. It is used only where a distribution may be in an archive or
behind an import hook.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import reduce
from importlib.machinery import PathFinder
from typing import NamedTuple

__all__ = ["EntryPoint", "entry_points"]


class EntryPoint(NamedTuple):
    """A named object that a distribution offers.

    Attributes:
        name: its name in the group.
        value: ``module`` or ``module:attribute``.
        distribution: name and version of the distribution.
    """

    name: str
    value: str
    distribution: str

    def load(self) -> object:
        """Import the object."""
        module, _, attribute = self.value.partition("[")[0].partition(":")
        return reduce(getattr, filter(None, attribute.strip().split(".")), importlib.import_module(module.strip()))


def entry_points(group: str) -> list[EntryPoint]:
    """Find the entry points of a group. Of distributions with the same name, the first one on `sys.path` counts."""
    paths = [path for path in sys.path if isinstance(path, str)]  # Python ignores others
    is_plain = not any(path.endswith(".egg") or os.path.isfile(path) for path in paths)
    if not is_plain or any(hasattr(found, "find_distributions") for found in sys.meta_path if found is not PathFinder):
        from importlib import metadata  # see above

        return [
            EntryPoint(found.name, found.value, f"{found.dist.name} {found.dist.version}" if found.dist else "")
            for found in metadata.entry_points(group=group)
        ]
    points: list[EntryPoint] = []
    seen: set[str] = set()
    for directory in paths:
        for name in _names_in(directory or "."):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in (".dist-info", ".egg-info"):
                distribution, _, version = stem.partition("-")
                distribution = distribution.replace("_", "-")
                if (normalized := distribution.replace(".", "-").lower()) not in seen:
                    seen.add(normalized)
                    described = f"{distribution} {version}".rstrip()
                    points += [
                        EntryPoint(key, value, described)
                        for key, value in _read(os.path.join(directory, name, "entry_points.txt"), group)
                    ]
    return points


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # not there, or not readable: nothing can be imported from it
        return []


def _read(path: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of one group of a file ``entry_points.txt``, which most distributions lack."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    section = ""
    for line in map(str.strip, lines):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == group and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()
