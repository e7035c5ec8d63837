"""Versions that slime wrote and SGLang pulled: `golden/slime`, one directory for each encoding and checksum."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.cases import refused
from ckptcore_tools.copies import copy_steps

import ckptcore
from ckptcore.context import IOOptions
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError
from plugins.versions.tests.slime_files import pull, read_file, version_at

GOLDEN = Path(__file__).parent / "golden" / "slime"
ANYWHERE = ckptcore.Context(io=IOOptions(bases="anywhere"))
NAMES = ("xor_xxh3-128", "overwrite_adler32", "xor_blake3")
LAST = 3


def copied(name: str, tmp_path: Path) -> Path:
    """Copy a golden, with its model as version 0."""
    if name.endswith("blake3") and find_spec("blake3") is None:
        pytest.skip("needs the package blake3")
    directory = tmp_path / name
    shutil.copytree(GOLDEN / name, directory)
    shutil.copytree(directory / "base", version_at(directory, 0))
    return directory


def bytes_of(tree: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tree.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_version_of_slime_loads_as_sglang_pulled_it(name: str, tmp_path: Path) -> None:
    directory = copied(name, tmp_path)
    pulled = bytes_of(ckptcore.load(directory / "pulled"))
    loaded = ckptcore.load(version_at(directory, LAST))
    assert bytes_of(loaded) == pulled
    assert bytes_of(ckptcore.load(version_at(directory, 1))) != pulled
    assert bytes_of(ckptcore.load(version_at(directory, 2))) == pulled  # version 3 changes nothing
    base = ckptcore.load(directory / "base")
    assert {key: (array.shape, array.dtype) for key, array in loaded.items()} == {
        key: (array.shape, array.dtype) for key, array in base.items()
    }
    for number in range(LAST + 1):
        assert ckptcore.verify(version_at(directory, number)).ok
    assert ckptcore.metadata(version_at(directory, 2)).layout == "slime"


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_reader_of_the_tests_agrees_with_sglang(name: str) -> None:
    """So `slime_files.pull` can replace it in other tests."""
    base, pulled = (read_file(GOLDEN / name / part / "model.safetensors")[1] for part in ("base", "pulled"))
    assert pull(GOLDEN / name, LAST, base) == pulled
    assert pull(GOLDEN / name, 1, base) != pulled


def test_boxes_are_read(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    opened = ckptcore.open(version_at(directory, 2))
    whole = ckptcore.load(directory / "pulled")["model.embed_tokens.weight"]
    for box in (np.s_[3:9, 2:], np.s_[0], np.s_[:, 7], np.s_[...]):
        assert opened["model.embed_tokens.weight"][box].tobytes() == whole[box].tobytes()


def test_a_copy_of_one_version_has_all_arrays(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    refused(
        lambda: ckptcore.copy(version_at(directory, 2), tmp_path / "copy"),
        "weight_v000002 is stored as differences from weight_v000001", "layout='safetensors'", "copy_steps",
        error=InvalidLocationError,
    )  # fmt: skip
    ckptcore.copy(version_at(directory, 2), tmp_path / "copy", layout="dcp")
    shutil.rmtree(version_at(directory, 1))
    assert bytes_of(ckptcore.load(tmp_path / "copy")) == bytes_of(ckptcore.load(directory / "pulled"))
    assert ckptcore.verify(tmp_path / "copy").state == "sound"


def test_a_copy_of_all_versions_is_equal(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    copy_steps(directory, tmp_path / "copies")
    for number in range(LAST + 1):
        files = sorted(version_at(directory, number).iterdir())
        copies = version_at(tmp_path / "copies", number)
        assert [path.name for path in files] == sorted(path.name for path in copies.iterdir())
        assert all(path.read_bytes() == (copies / path.name).read_bytes() for path in files)


def test_versions_are_compared(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    assert not ckptcore.diff(version_at(directory, 2), version_at(directory, 3))
    changed = ckptcore.diff(version_at(directory, 1), version_at(directory, 2))
    assert "model.scale" in str(changed)


def test_steps_are_versions(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    reader = ckptcore.CheckpointReader(directory)
    assert (tuple(reader.steps), reader.latest) == ((0, 1, 2, 3), 3)
    assert bytes_of(reader.load()) == bytes_of(ckptcore.load(directory / "pulled"))


def test_version_0_is_asked_for(tmp_path: Path) -> None:
    directory = copied(NAMES[0], tmp_path)
    shutil.rmtree(version_at(directory, 0))

    def load(context: ckptcore.Context | None = None) -> Any:
        return ckptcore.load(version_at(directory, 2), context=context)

    message = refused(load, "weight_v000001 is stored as differences from", error=CorruptCheckpointError)
    assert "Link or copy it there as weight_v000000" in message and "bases='anywhere'" in message
    version_at(directory, 0).symlink_to("base")
    refused(load, "a link to", 'IOOptions(bases="anywhere")', error=ckptcore.CheckpointError)
    assert bytes_of(load(context=ANYWHERE)) == bytes_of(ckptcore.load(directory / "pulled"))
    version_at(directory, 0).unlink()
    version_at(directory, 0).symlink_to(tmp_path / "elsewhere")
    shutil.copytree(directory / "base", tmp_path / "elsewhere")
    assert bytes_of(load(context=ANYWHERE)) == bytes_of(ckptcore.load(directory / "pulled"))


def test_blake3_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "c"
    shutil.copytree(GOLDEN / "xor_blake3", directory)
    shutil.copytree(directory / "base", version_at(directory, 0))
    monkeypatch.setitem(sys.modules, "blake3", None)
    refused(
        lambda: ckptcore.load(version_at(directory, 1)),
        "pip install 'ckptcore-versions[blake3]'",
        error=ckptcore.errors.MissingDistributionError,
    )
