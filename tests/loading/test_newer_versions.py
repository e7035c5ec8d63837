"""Files of a newer format version. Errors say that they are newer, not that they are damaged or missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash
from ckptcore_testing.hostile_json import sealed

import ckptcore
from ckptcore.commit.leases import decode_holder, new_holder
from ckptcore.errors import CheckpointError, CheckpointExistsError, UnsupportedVersionError
from ckptcore.installed import version_of
from ckptcore.policies import LatestN
from plugins.tools.tests.cli.conftest import Run, run  # noqa: F401  # a fixture

_STATE: Final = {"w": np.ones(3), "n": 1}
_CHECKSUM_BYTES: Final = 40


def _make_newer(root: Path) -> None:
    """Change a root to version 2 with a new field, written by release 9.1.0, with a correct checksum."""
    body = root.read_bytes()[:-_CHECKSUM_BYTES].replace(b'"version":1', b'"version":2', 1)
    body = body.replace(f'{{"ckptcore":"{version_of("ckptcore")}"}}'.encode(), b'{"ckptcore":"9.1.0"}')
    root.write_bytes(sealed(body + b',"new":{"kind":"unknown"}}'))


def _one(place: Path) -> None:
    ckptcore.save(place, _STATE)
    _make_newer(place / "checkpoint.json")


def _composite(place: Path) -> None:
    ckptcore.save_checkpointables(place, {"a": _STATE, "b": _STATE})
    _make_newer(place / "checkpoint.json")


def _member(place: Path) -> None:
    ckptcore.save_checkpointables(place, {"a": _STATE, "b": _STATE})
    _make_newer(place / "a/checkpoint.json")


def _partial(place: Path) -> None:
    ckptcore.partial(place).save({"a": np.ones(3)})
    _make_newer(place.parent / f".{place.name}.partial.ckptcore/checkpoint.partial.json")


def _session(place: Path) -> None:
    ckptcore.partial(place).save({"a": np.ones(3)})
    hidden = place.parent / f".{place.name}.partial.ckptcore"
    (table,) = hidden.glob("checkpoint.*.session-0")
    data = table.read_bytes().replace(b'"version":1', b'"version":2', 1)
    table.write_bytes(data)
    listed = hidden / "checkpoint.partial.json"
    document = json.loads(listed.read_bytes())
    document["sessions"][0][7] = f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}"
    listed.write_bytes(sealed(document))


def _base(place: Path) -> None:
    base = place.parent / "base"
    ckptcore.save(base, {"w": np.arange(1000)})
    ckptcore.save(place, {"n": 1}, strategy=ckptcore.Update(base=base))
    assert ckptcore.load(place)["n"] == 1
    _make_newer(base / "checkpoint.json")


_READS: Final[dict[str, Callable[[Path], object]]] = {
    "load": ckptcore.load,
    "load_into": lambda place: ckptcore.load_into(place, {"w": np.zeros(3), "n": 0}),
    "load_checkpointables": ckptcore.load_checkpointables,
    "metadata": ckptcore.metadata,
    "open": lambda place: np.asarray(ckptcore.open(place)["w"]),
    "verify": ckptcore.verify,
    "copy": lambda place: ckptcore.copy(place, place.parent / "copy"),
    "convert": lambda place: ckptcore.copy(place, place.parent / "copy", layout="dcp"),
    "update": lambda place: ckptcore.save(place.parent / "u", _STATE, strategy=ckptcore.Update(base=place)),
}
_PARTS: Final = {"load_checkpointables", "metadata", "verify", "copy", "convert"}


@pytest.mark.parametrize(
    ("write", "reads"),
    [(_one, _READS.keys()), (_composite, _READS.keys()), (_member, _PARTS), (_partial, {"load", "metadata", "verify"})],
)
def test_a_newer_root_is_refused_by_every_read(write: Callable[[Path], None], reads: set[str], tmp_path: Path) -> None:
    place = tmp_path / "c"
    write(place)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in reads:
        with pytest.raises(UnsupportedVersionError) as raised:
            _READS[name](place)
        said = str(raised.value)
        assert str(place) in said and "has format version 2" in said, name
        assert f"ckptcore {version_of('ckptcore')} reads up to 1; upgrade ckptcore to load it" in said
        assert "written by ckptcore 9.1.0" in said or write is _partial
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(place, _STATE)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    ckptcore.delete(place)  # needs only the head of a root


def test_sessions_of_a_newer_version_are_not_finalized(tmp_path: Path) -> None:
    for write in (_partial, _session):
        write(tmp_path / write.__name__)
        with pytest.raises(UnsupportedVersionError, match="version"):
            ckptcore.partial(tmp_path / write.__name__).finalize()
    with pytest.raises(UnsupportedVersionError):
        ckptcore.partial(tmp_path / "_partial").save({"b": np.ones(3)})


def test_a_newer_base_is_named(tmp_path: Path) -> None:
    _base(tmp_path / "c")
    with pytest.raises(UnsupportedVersionError, match=r"base.*format version 2"):
        ckptcore.load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="refer to its arrays"):
        ckptcore.delete(tmp_path / "base")  # an older release does not delete bases of updates


def test_a_run_keeps_newer_steps(tmp_path: Path, run: Run) -> None:  # noqa: F811
    """An older release neither resumes below such a step, nor replaces it, nor deletes it."""
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save_blocking(step, _STATE)
    _make_newer(tmp_path / "2/checkpoint.json")
    with ckptcore.Checkpointer(tmp_path, preservation_policy=LatestN(1)) as checkpointer:
        with pytest.raises(UnsupportedVersionError, match="upgrade"):
            checkpointer.load()
        with pytest.raises(CheckpointExistsError, match="already has step 2"):
            checkpointer.save_blocking(2, _STATE)
        checkpointer.save_blocking(3, _STATE)
        checkpointer.wait()
        assert checkpointer.steps == (2, 3)
    for command in ("ls", "steps"):
        result = run(command, tmp_path)
        assert result.exit_code == 0 and "unreadable" in result.stdout and "format version 2" in result.stdout
    assert run("gc", tmp_path, "--policy", "latest_n=1", "--yes").exit_code == 0
    assert (tmp_path / "2/checkpoint.json").exists()


def test_an_older_release_respects_owners_of_newer_versions() -> None:
    """Records of owners, leases and pins keep the fields of version 1, so that both releases respect each other."""
    record: dict[str, Any] = json.loads(new_holder(60.0, number=7).encode())
    newer = decode_holder(json.dumps({**record, "version": 2, "cluster": "a"}).encode())
    assert newer is not None and newer.number == 7 and newer.lease_seconds == 60.0


def test_metadata_of_a_run_has_no_version(tmp_path: Path) -> None:
    """The file is the user's JSON alone, so every release reads it."""
    with ckptcore.Checkpointer(tmp_path, metadata={"version": 2, "lr": 0.1}) as checkpointer:
        assert checkpointer.root_metadata == {"version": 2, "lr": 0.1}


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"])
def test_fields_that_a_newer_release_adds_are_ignored(layout: str, tmp_path: Path) -> None:
    """A release may add a field to a root without a new version, if older releases read the rest correctly."""
    ckptcore.save(tmp_path / "c", _STATE, layout=layout)
    root = tmp_path / "c/checkpoint.json"
    root.write_bytes(sealed({**json.loads(root.read_bytes()), "new": {"kind": "unknown"}}))
    assert ckptcore.load(tmp_path / "c")["n"] == 1 and ckptcore.verify(tmp_path / "c").state == "sound"


def test_a_layout_of_a_newer_release_is_named(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", _STATE)
    root = tmp_path / "c/checkpoint.json"
    root.write_bytes(sealed({**json.loads(root.read_bytes()), "layout": "safetensors9"}))
    with pytest.raises(CheckpointError, match="safetensors9"):
        ckptcore.load(tmp_path / "c")
