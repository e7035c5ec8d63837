"""Installed distributions: their entry points and versions.

`importlib.metadata` has the same functions, but it takes longer than a small save, because it imports `email`, `csv`
and `zipfile`, and reads the metadata of each distribution. This module uses it only if a distribution may be in an
archive or behind an import hook, or if it finds no metadata of a distribution.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, reduce
from importlib.machinery import PathFinder
from typing import NamedTuple


class EntryPoint(NamedTuple):
    """An entry point of a distribution.

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
        # A value may end with extras, as in ``module:attribute [extra]``. They do not matter for the import.
        module, _, attribute = self.value.partition("[")[0].partition(":")
        return reduce(getattr, filter(None, attribute.strip().split(".")), importlib.import_module(module.strip()))


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group. Of distributions with the same name, use the first on `sys.path`."""
    if not _are_directories():
        from importlib import metadata  # slow: see the docstring of this module

        return [
            EntryPoint(point.name, point.value, f"{point.dist.name} {point.dist.version}" if point.dist else "")
            for point in metadata.entry_points(group=group)
        ]
    return [
        EntryPoint(name, value, " ".join(_name_and_version(directory)))
        for directory in _metadata_directories(*_paths()).values()
        for name, value in _points(os.path.join(directory, "entry_points.txt"), group)
    ]


@cache
def version_of(distribution: str) -> str:
    """Return the version of a distribution of this project.

    Return "unknown" if there are no metadata, as in a frozen program or in a copy of the sources in another project.
    """
    if _are_directories() and (directory := _metadata_directories(*_paths()).get(distribution)) is not None:
        return _name_and_version(directory)[1] or "unknown"
    from importlib import metadata  # slow: see the docstring of this module

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _are_directories() -> bool:
    """Return True if all modules come from directories of `sys.path`: no archives, eggs or import hooks."""
    if any(path.endswith(".egg") or os.path.isfile(path) for path in _paths()):
        return False
    return not any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder)


def _paths() -> list[str]:
    return [path for path in sys.path if isinstance(path, str)]  # Python ignores other types


@lru_cache(maxsize=1)
def _metadata_directories(*paths: str) -> Mapping[str, str]:
    """Return the directory with the metadata of each distribution, by normalized name."""
    directories: dict[str, str] = {}
    for path in paths:
        try:
            names = os.listdir(path or ".")
        except OSError:  # missing or unreadable: nothing can be imported from it
            continue
        for name in names:
            stem, point, suffix = name.rpartition(".")
            if point and suffix.lower() in ("dist-info", "egg-info"):
                normalized = stem.partition("-")[0].replace("_", "-").replace(".", "-").lower()
                directories.setdefault(normalized, os.path.join(path, name))
    return directories


def _name_and_version(directory: str) -> tuple[str, str]:
    """Return the name and the version of a distribution. A missing field is an empty string."""
    text = _text(os.path.join(directory, "METADATA")) or _text(os.path.join(directory, "PKG-INFO"))
    fields = dict([line.partition(": ")[::2] for line in text.partition("\n\n")[0].splitlines()])
    return fields.get("Name", "").strip(), fields.get("Version", "").strip()


def _text(path: str) -> str:
    """Return the text of a file; an empty one if it cannot be read, for example because it does not exist."""
    try:
        with open(path, "rb", buffering=0) as file:  # a buffer and a decoder cost more than the read
            return file.read().decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _points(path: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a group in a file ``entry_points.txt``. The file need not exist."""
    text = _text(path)
    if group not in text:  # so it is in most files
        return
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == group and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()
