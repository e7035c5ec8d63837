"""Names that a file system treats as equal or refuses, and directories that it cannot rename."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_tools.exports import Export, WithExports

import ckptcore
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Claim, new_save_id
from ckptcore.errors import AtomicityError, InvalidLocationError, NameCollisionError
from ckptcore.runtime import runtime_of
from tests.composites.objects import Files
from tests.storage.mounts import Mounts, mounts

__all__ = ["mounts"]

pytestmark = pytest.mark.system

_FAST: Final = ckptcore.Context(durability="none")
_ONE, _TWO = np.ones(3, np.float32), np.zeros(3, np.float32)


def _save(location: Path, state: dict[str, Any], **options: Any) -> None:
    ckptcore.save(location, state, context=_FAST, **options)


def _objects(location: Path, *names: str) -> None:
    ckptcore.save_checkpointables(location, {name: {"w": _ONE} for name in names}, context=_FAST)


_PAIRS: Final = [("W", "w"), ("\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}")]
_SAVES: Final[dict[str, Callable[[Path, str, str], object]]] = {
    "zarr": lambda at, first, second: _save(at, {first: _ONE, second: _TWO}, layout="zarr"),
    "zarr3": lambda at, first, second: _save(at, {"in": {first: _ONE, second: _TWO}}, layout="zarr3"),
    "objects": lambda at, first, second: _objects(at, first, second),
    "zarr3 of an object": lambda at, first, second: ckptcore.save_checkpointables(
        at, {"model": {first: _ONE, second: _TWO}}, layout="zarr3", context=_FAST
    ),
    "an object and the root": lambda at, first, second: _objects(at, "Checkpoint.json", first),
}


@pytest.fixture(params=["ext4", "xfs", "fuse"])
def merging(request: pytest.FixtureRequest, mounts: Mounts) -> Path:
    """Return a directory whose file system treats different names as equal."""
    if request.param == "ext4":
        at = mounts.disk("ext4", 64, make=("-O", "casefold", "-E", "encoding=utf8"))
        (directory := at / "folded").mkdir()
        mounts.run("chattr", "+F", str(directory))
        return directory
    if request.param == "xfs":
        return mounts.disk("xfs", 320, make=("-n", "version=ci"))
    return mounts.odd("case,accents")


@pytest.mark.lives(
    "exFAT, NTFS, APFS, SMB",
    "FUSE by fusepy, with names without case and with one form of accents",
    "names that it treats as equal are refused before anything is written, with both names",
    "no exchange of directories; on SMB, and through FUSE, leases in place of locks",
)
@pytest.mark.lives(
    "ext4 with casefold, XFS with ascii-ci",
    "on a loop device, where the kernel has them: skipped so far",
    "as on exFAT",
    "nothing else",
)
@pytest.mark.parametrize("kind", _SAVES)
def test_names_that_are_one_are_refused_before_anything_is_written(kind: str, merging: Path) -> None:
    for first, second in _PAIRS if kind != "an object and the root" else _PAIRS[:1]:
        if "xfs" in str(merging) and not first.isascii():
            continue  # XFS ignores the case of ASCII letters only
        with pytest.raises(NameCollisionError, match=r"treats the names .* and .* as equal.*Nothing was written"):
            _SAVES[kind](merging / "c", first, second)
        assert os.listdir(merging) == []


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_names_inside_files_may_be_equal(layout: str, merging: Path) -> None:
    _save(merging / "c", {"W": _ONE, "w": _TWO}, layout=layout)
    loaded = ckptcore.load(merging / "c")
    assert loaded["W"].tolist() == [1] * 3 and loaded["w"].tolist() == [0] * 3


def test_files_of_an_object_with_equal_names_are_refused(merging: Path) -> None:
    files = Files({"Readme": b"one", "readme": b"two"})
    with pytest.raises(NameCollisionError, match="'Readme' and 'files/readme'|'files/Readme' and 'files/readme'"):
        ckptcore.save_checkpointables(merging / "c", {"files": files}, context=_FAST)
    assert os.listdir(merging) == []


def test_copies_and_conversions_with_equal_names_are_refused(merging: Path, tmp_path: Path) -> None:
    _save(tmp_path / "zarr", {"W": _ONE, "w": _TWO}, layout="zarr3")
    _objects(tmp_path / "several", "Model", "model")
    _save(tmp_path / "one", {"W": _ONE, "w": _TWO})
    copies: list[tuple[str, dict[str, Any]]] = [
        ("zarr", {}), ("several", {}), ("several", {"layout": "safetensors"}), ("one", {"layout": "zarr3"}),
    ]  # fmt: skip
    for name, options in copies:
        with pytest.raises(NameCollisionError, match="as equal"):
            ckptcore.copy(tmp_path / name, merging / "c", context=_FAST, **options)
        assert os.listdir(merging) == []


@pytest.mark.parametrize("within", [False, True])
def test_exports_with_equal_names_are_refused_before_the_save_commits(within: bool, merging: Path) -> None:
    state = {"model": {"W": _ONE, "w": _TWO}}
    location = merging / ("c/hf" if within else "hf")
    export = Export(location=location, subtree="model", layout="zarr3")
    with pytest.raises(NameCollisionError, match=r"hf: .*'state/W' and 'state/w' as equal.*Nothing was written"):
        _save(merging / "c", state, strategy=WithExports([export]))
    assert os.listdir(merging) == []
    _save(merging / "c", state, strategy=WithExports([Export(location=location, subtree="model")]))
    assert ckptcore.load(location)["W"].tolist() == [1] * 3


@pytest.mark.parametrize("names", [("C",), ("hf", "HF")])
def test_exports_with_equal_locations_are_refused_before_save_commits(names: tuple[str, ...], merging: Path) -> None:
    exports = [Export(location=merging / name) for name in names]
    with pytest.raises(NameCollisionError, match="as equal.*Nothing was written"):
        _save(merging / "c", {"w": _ONE}, strategy=WithExports(exports))
    assert os.listdir(merging) == []


def test_sessions_with_equal_names_are_refused(merging: Path) -> None:
    with ckptcore.partial(merging / "c", layout="zarr3", context=_FAST) as session:
        session.save({"W": _ONE})
    with (
        pytest.raises(NameCollisionError, match="'state/W' and 'state/w'|'W' and 'w'"),
        ckptcore.partial(merging / "c", layout="zarr3", context=_FAST) as session,
    ):
        session.save({"w": _TWO})
    ckptcore.partial(merging / "c", context=_FAST).finalize()
    assert ckptcore.load(merging / "c")["W"].tolist() == [1] * 3


def test_a_checkpoint_with_another_spelling_is_not_replaced(merging: Path) -> None:
    _save(merging / "model", {"w": _ONE})
    with pytest.raises(NameCollisionError, match="treats the name as 'model'"):
        _save(merging / "Model", {"w": _TWO}, overwrite="non-atomic")
    assert ckptcore.load(merging / "model")["w"].tolist() == [1] * 3
    _save(merging / "model", {"w": _TWO}, overwrite="non-atomic")
    assert os.listdir(merging) == ["model"]


@pytest.mark.parametrize("length", [229, 255, 256, 300])
def test_a_name_that_is_too_long_has_a_remedy_before_anything_is_written(length: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidLocationError, match="at most 228.*Choose a shorter name"):
        _save(tmp_path / ("n" * length), {"w": _ONE})
    assert os.listdir(tmp_path) == []


def test_a_base_or_a_member_is_not_deleted_by_another_spelling(merging: Path) -> None:
    _save(merging / "Base", {"w": _ONE, "v": _ONE})
    with pytest.raises(NameCollisionError, match="cannot refer to .*treats the name as 'Base'"):
        _save(merging / "update", {"w": _TWO}, strategy=ckptcore.Update(merging / "base"))
    _save(merging / "update", {"w": _TWO}, strategy=ckptcore.Update(merging / "Base"))
    ckptcore.save_checkpointables(merging / "several", {"m": {"w": _ONE}}, context=_FAST)
    for name in ("base", "several/M"):
        with pytest.raises(NameCollisionError, match="cannot delete .*treats the name as"):
            ckptcore.delete(merging / name, context=_FAST)
    assert ckptcore.load(merging / "update")["v"].tolist() == [1] * 3
    assert ckptcore.verify(merging / "several").ok


def test_two_processes_that_write_the_same_name_are_refused(tmp_path: Path) -> None:
    """The leader cannot see this from the names, so every file is created exclusively."""
    location = resolve_location(tmp_path / "c", runtime_of(_FAST).storages, to_write=True)
    claim = Claim(new_save_id(), "2026-01-01T00:00:00+00:00")
    transaction = location.commit_method.begin(location, claim, overwrite=False)
    other = location.commit_method.store_of(location, claim.save_id, is_new=True)
    transaction.store.open_writer("a", 1).abort()
    transaction.store.put("a", b"1")
    for write in (partial(other.open_writer, "a", 1), partial(other.put, "a", b"1")):
        with pytest.raises(NameCollisionError, match="the layout wrote a twice"):
            write()
    transaction.abort()


@pytest.mark.lives(
    "eCryptfs",
    "FUSE by fusepy, with names of 143 bytes",
    "saves and loads; longer names are refused before anything is written",
    "names of checkpoints have at most 116 bytes; leases in place of locks, as on FUSE",
)
@pytest.mark.parametrize("options", ["names=143", "names=143,silent"])
def test_long_names_are_refused_by_the_path_that_was_given(options: str, mounts: Mounts) -> None:
    directory = mounts.odd(options)
    fits = "n" * 116
    _save(directory / fits, {"w": _ONE})
    assert ckptcore.load(directory / fits)["w"].tolist() == [1] * 3
    for name in ("n" * 117, "n" * 143):
        with pytest.raises(InvalidLocationError, match=r"Choose a shorter name. Nothing was changed") as caught:
            _save(directory / name, {"w": _ONE})
        assert str(caught.value).startswith(f"{directory / name}: ")
    if "silent" not in options:
        with pytest.raises(InvalidLocationError, match=r"is the name of a file or directory in it and has 150 bytes"):
            _objects(directory / "c", "m" * 150)
    assert os.listdir(directory) == [fits]


def test_a_long_name_is_refused_on_every_file_system(tmp_path: Path) -> None:
    with pytest.raises(InvalidLocationError, match="allows at most 228"):
        _save(tmp_path / ("n" * 229), {"w": _ONE})
    _save(tmp_path / ("n" * 228), {"w": _ONE})


@pytest.mark.lives(
    "mount points",
    "Linux 6.18, tmpfs and bind mounts",
    "refused before anything is written, with the directory to use",
    "nothing, in a directory below it",
)
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_point_is_refused_before_anything_is_written(kind: str, mounts: Mounts, tmp_path: Path) -> None:
    if kind == "tmpfs":
        at = mounts.tmpfs()
    else:
        (at := tmp_path / "with space").mkdir()
        (source := tmp_path / "source").mkdir()
        mounts.mount(at, "mount", "--bind", str(source))
    before = sorted(os.listdir(tmp_path))
    for overwrite in (False, True, "non-atomic", "keep-other-files"):
        with pytest.raises(InvalidLocationError, match=f"{at} is a mount point.*such as {at}/checkpoint"):
            _save(at, {"w": _ONE}, overwrite=overwrite)
    with pytest.raises(InvalidLocationError, match="is a mount point"), ckptcore.partial(at, context=_FAST) as session:
        session.save({"w": _ONE})
    assert sorted(os.listdir(tmp_path)) == before and os.listdir(at) == []
    _save(at / "checkpoint", {"w": _ONE})
    assert ckptcore.load(at / "checkpoint")["w"].tolist() == [1] * 3


def test_a_directory_of_a_lower_layer_is_refused_before_anything_is_written(mounts: Mounts) -> None:
    lower = mounts.overlay() / "lower"
    with pytest.raises(AtomicityError, match=f"{lower} holds a checkpoint.*Nothing was changed"):
        _save(lower, {"w": _ONE}, overwrite=True)
    assert os.listdir(lower.parent) == ["lower"]


_WITHOUT_ACCENTS: Final = """
import sys
import numpy as np
import ckptcore
from ckptcore.errors import InvalidLocationError
place, e = sys.argv[1], chr(0xE9)
state = {"w": np.ones(2)}
with ckptcore.Checkpointer(f"{place}/run") as run:
    run.save(1, {e: np.ones(2)})
    run.wait()
    assert run.load(1)[e].tolist() == [1, 1]
for refused in [
    lambda: ckptcore.save(f"{place}/{e}", state),
    lambda: ckptcore.load(f"{place}/{e}"),
    lambda: ckptcore.save(f"file://{place}/%C3%A9", state),
    lambda: ckptcore.save(f"{place}/array", {e: np.ones(2)}, layout="zarr3"),
    lambda: ckptcore.save_checkpointables(f"{place}/objects", {e: state}),
]:
    try:
        refused()
    except InvalidLocationError as error:
        assert "PYTHONUTF8=1" in str(error), error
    else:
        raise AssertionError("not refused")
"""


def test_a_locale_that_cannot_encode_accents(tmp_path: Path) -> None:
    """Only names of files with accents are refused."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", _WITHOUT_ACCENTS, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(tmp_path) == ["run"]
