"""Build the wheels of all distributions under one version, in the order of their release. Nothing is uploaded.

Run ``python -m tools.release VERSION --out DIRECTORY``. It builds from copies of the sources: no file of the clone
changes. A wheel must have the version, and require exactly this version of each of our distributions. With ``--set`` it
builds nothing and writes the version into the sources. See RELEASING.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT: Final = Path(__file__).resolve().parents[1]
URLS: Final[Mapping[str, str]] = {}
"""Addresses of the project by label, such as "Source". Filled at the first release; all wheels get them."""
_IGNORED: Final = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", "tests")


class Wheel(NamedTuple):
    """A built wheel.

    Attributes:
        path: the file.
        name: normalised name of the distribution.
        version: version of the distribution.
        requires: its requirements.
        extras: names of its extras.
        packages: top-level import packages.
    """

    path: Path
    name: str
    version: str
    requires: Sequence[Requirement]
    extras: Sequence[str]
    packages: Sequence[str]


def projects(root: Path = ROOT) -> Mapping[str, Path]:
    """Return the directories of all distributions by name, each after those that it requires.

    This is the order of a release: whoever installs a distribution meanwhile finds what it requires. Extras do not
    count, because those of the core name all distributions.
    """
    directories: dict[str, Path] = {}
    required: dict[str, set[str]] = {}
    for file in [root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))]:
        table = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name = canonicalize_name(table["name"])
        directories[name] = file.parent
        required[name] = {canonicalize_name(Requirement(text).name) for text in table["dependencies"]}
    order = TopologicalSorter(
        {name: sorted(required[name] & directories.keys()) for name in directories}
    ).static_order()
    return {name: directories[name] for name in order}


def with_urls(text: str, urls: Mapping[str, str]) -> str:
    """Return a ``pyproject.toml`` with addresses of the project."""
    lines = [f"{json.dumps(label)} = {json.dumps(url)}" for label, url in urls.items()]
    return "\n".join([text, "[project.urls]", *lines, ""]) if lines else text


def with_version(text: str, version: str, names: Sequence[str]) -> str:
    """Return a ``pyproject.toml`` with another version of the project and of the distributions in `names`."""
    text, count = re.subn(r'(?m)^version = "[^"]*"$', f'version = "{version}"', text)
    if count != 1:
        raise ValueError(f"expected one line with the version of the project; found {count}")
    ours = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf'(["\'](?:{ours})(?:\[[^\]]*\])?)==[^"\',;]+', rf"\g<1>=={version}", text)


def build(directory: Path, version: str | None = None) -> Mapping[str, Wheel]:
    """Build all wheels into a directory, in the order of `projects`. Return them by name.

    Args:
        directory: where wheels are written.
        version: version of all wheels. None: the one that the sources have.

    Raises:
        ValueError: a wheel has another version, or requires another version of one of our distributions.
        subprocess.CalledProcessError: a build failed.
    """
    order = projects()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptcore-release-") as scratch:
        sources = [_copy(place, Path(scratch) / name, version, list(order)) for name, place in order.items()]
        _pip_wheel(sources, directory)
    wheels = {wheel.name: wheel for wheel in map(_read, sorted(directory.glob("*.whl")))}
    if wheels.keys() != order.keys():
        raise ValueError(f"{directory} has wheels of {sorted(wheels)}, not of {sorted(order)}: use an empty directory")
    _check(wheels)
    return {name: wheels[name] for name in order}


def _copy(project: Path, place: Path, version: str | None, names: Sequence[str]) -> Path:
    if project == ROOT:
        place.mkdir()
        for name in ("pyproject.toml", "PACKAGE.md", "LICENSE"):
            shutil.copy(ROOT / name, place)
        shutil.copytree(ROOT / "ckptcore", place / "ckptcore", ignore=_IGNORED)
    else:
        shutil.copytree(project, place, ignore=_IGNORED)
    settings = place / "pyproject.toml"
    text = with_urls(settings.read_text(encoding="utf-8"), URLS)
    settings.write_text(text if version is None else with_version(text, version, names), encoding="utf-8")
    return place


def set_version(version: str, root: Path = ROOT) -> None:
    """Write a version into the sources of all distributions, and into `CITATION.cff`."""
    places = projects(root)
    for place in places.values():
        settings = place / "pyproject.toml"
        settings.write_text(with_version(settings.read_text(encoding="utf-8"), version, list(places)), encoding="utf-8")
    citation = root / "CITATION.cff"
    text = re.sub(r"(?m)^version: .*$", f"version: {version}", citation.read_text(encoding="utf-8"))
    citation.write_text(text, encoding="utf-8")


def _pip_wheel(sources: Sequence[Path], directory: Path) -> None:
    # The builds run in this environment, without a network. Variables such as PYTHONPATH are left out, because the
    # builds would import the sources of the clone instead of the copies.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*command, "--wheel-dir", str(directory), *map(str, sources)], check=True, env=kept, timeout=540)


def _read(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        files = archive.namelist()
        (metadata,) = [name for name in files if name.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(metadata).decode("utf-8"))
    packages = {name.partition("/")[0] for name in files} - {metadata.partition("/")[0]}
    return Wheel(
        path,
        canonicalize_name(fields["Name"]),
        fields["Version"],
        [Requirement(text) for text in fields.get_all("Requires-Dist", [])],
        fields.get_all("Provides-Extra", []),
        sorted(packages),
    )


def _check(wheels: Mapping[str, Wheel]) -> None:
    version = wheels["ckptcore"].version
    for wheel in wheels.values():
        if wheel.version != version:
            raise ValueError(f"{wheel.path.name}: expected version {version} as of ckptcore; found {wheel.version}")
        for requirement in wheel.requires:
            if canonicalize_name(requirement.name) in wheels and str(requirement.specifier) != f"=={version}":
                raise ValueError(f"{wheel.path.name}: expected {requirement.name}=={version}; found {requirement}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build all wheels and print their paths in the order of the release."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="version of all wheels, such as 0.1.0 or 0.1.0rc1")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where wheels are written; default: dist")
    parser.add_argument("--set", action="store_true", help="write the version into the sources, and build nothing")
    given = parser.parse_args(arguments)
    try:
        version = str(Version(given.version))
        if given.set:
            set_version(version)
            return 0
        wheels = build(given.out, version)
    except InvalidVersion:
        parser.error(f"{given.version!r} is not a version: use one such as 0.1.0 or 0.1.0rc1")
    except (ValueError, subprocess.CalledProcessError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for wheel in wheels.values():
        print(wheel.path)
    print(f"{len(wheels)} wheels of version {version}. Nothing was uploaded: see RELEASING.md.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
