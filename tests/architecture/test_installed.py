"""Installed distributions, found without importing `importlib.metadata`. The results must be equal."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import ml_dtypes
import numpy
import pluggy
import pytest
import xxhash

import ckptcore
from ckptcore.installed import EntryPoint, entry_points, version_of


def install(directory: Path, name: str, text: str) -> None:
    """Write the metadata of a distribution."""
    (directory / name).mkdir(parents=True)
    (directory / name / "METADATA").write_text("Metadata-Version: 2.1\nName: an-example\nVersion: 1.2\n")
    (directory / name / "entry_points.txt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("group", ["ckptcore", "ckptcore.commands", "ckptcore_testing", "console_scripts", "pytest11"])
def test_finds_the_distributions_of_importlib(group: str) -> None:
    expected = [
        EntryPoint(entry.name, entry.value, f"{entry.dist.name} {entry.dist.version}")
        for entry in importlib.metadata.entry_points(group=group)
        if entry.dist is not None
    ]
    assert sorted(entry_points(group)) == sorted(expected)


def test_finds_the_version_of_importlib() -> None:
    assert version_of("ckptcore") == importlib.metadata.version("ckptcore")
    assert version_of("ckptcore-of-nobody") == "unknown"


def test_a_copy_without_metadata_saves_and_loads(tmp_path: Path) -> None:
    """Examples are a frozen program, and a copy of the sources in another project."""
    for package in (ckptcore, numpy, ml_dtypes, pluggy, xxhash):
        directory = Path(package.__path__[0])
        (tmp_path / directory.name).symlink_to(directory)
        if (libraries := directory.with_name(f"{directory.name}.libs")).is_dir():
            (tmp_path / libraries.name).symlink_to(libraries)
    program = (
        "import sys\n"
        f"sys.path = [{str(tmp_path)!r}, *[path for path in sys.path if 'site-packages' not in path]]\n"
        "import ckptcore, numpy\n"
        f"ckptcore.save({str(tmp_path / 'saved')!r}, {{'w': numpy.ones(3)}})\n"
        f"assert ckptcore.load({str(tmp_path / 'saved')!r})['w'].sum() == 3\n"
        f"assert ckptcore.verify({str(tmp_path / 'saved')!r}).ok\n"
        "assert ckptcore.__version__ == 'unknown'\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300, cwd=tmp_path)
    assert ckptcore.metadata(tmp_path / "saved").writer == "ckptcore unknown"


@pytest.mark.parametrize(
    ("directory", "file"), [("an_example-1.2.dist-info", "METADATA"), ("an_example.egg-info", "PKG-INFO")]
)
def test_reads_version_in_metadata(directory: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / directory).mkdir()
    (tmp_path / directory / file).write_text("Metadata-Version: 2.1\nName: an-example\nVersion: 1.2+local\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version_of("an-example") == "1.2+local"


def test_a_distribution_that_is_installed_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# a comment\n\n[other]\nx = y\n[an.group]\nfirst = json:decoder.JSONDecoder [extra]\nsecond=json\n"
    install(tmp_path / "a", "an_example-1.2.dist-info", text)
    install(tmp_path / "b", "An.Example.egg-info", "[an.group]\nthird = json\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("missing", "a", "b")])
    entries = entry_points("an.group")
    assert entries == [
        EntryPoint("first", "json:decoder.JSONDecoder [extra]", "an-example 1.2"),
        EntryPoint("second", "json", "an-example 1.2"),
    ]
    import json

    assert [point.load() for point in entries] == [json.decoder.JSONDecoder, json]


def test_finds_distributions_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("an_example-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: an-example\nVersion: 1.2\n")
        archive.writestr("an_example-1.2.dist-info/entry_points.txt", "[an.group]\nfirst = json\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "archive.zip")])
    assert entry_points("an.group") == [EntryPoint("first", "json", "an-example 1.2")]


def test_finds_distributions_of_an_import_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder(importlib.metadata.DistributionFinder):
        def find_distributions(self, context: object = None) -> list[importlib.metadata.Distribution]:
            return [Found()]

    class Found(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            texts = {"METADATA": "Name: hooked\nVersion: 3\n", "entry_points.txt": "[an.group]\nfirst = json\n"}
            return texts.get(filename)

        def locate_file(self, path: object) -> Path:
            raise NotImplementedError

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert entry_points("an.group") == [EntryPoint("first", "json", "hooked 3")]
