"""Golden checkpoints of every feature. Each loads, and a new save of its state has the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import ckptcore
from ckptcore import CheckpointReader
from ckptcore.commit.root_json import HEAD_BYTES, read_head
from ckptcore.errors import UncommittedCheckpointError
from tests.golden.features import FEATURES, METADATA, host_state, parts_state, save_feature, sessions, sharded_state
from tests.golden.independent_reader import NotCommitted, read_checkpoint
from tests.golden.test_independent_reader import CHECKPOINTS, assert_same_tree, assert_same_value


def _files(directory: Path) -> dict[str, bytes]:
    """Return all files in a directory, except administrative files of runs, which contain times and processes."""
    paths = [path for path in directory.rglob("*") if path.is_file() and ".ckptcore" not in path.parts]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_each_golden_checkpoint_has_a_feature() -> None:
    assert {path.name for path in CHECKPOINTS.iterdir()} == set(FEATURES)


@pytest.mark.parametrize("name", FEATURES)
def test_a_save_writes_the_bytes_of_the_golden_checkpoint(name: str, tmp_path: Path) -> None:
    save_feature(name, tmp_path)
    written, golden = _files(tmp_path / name), _files(CHECKPOINTS / name)
    assert sorted(written) == sorted(golden)
    for key, data in golden.items():
        assert written[key] == data, key


def _whole_rows() -> Any:
    return np.arange(12, dtype=np.float32).reshape(4, 3)


def _sharded(at: Path) -> None:
    loaded = ckptcore.load(at)
    own = {name: array for rank in (0, 1) for name, array in sharded_state(rank)["own"].items()}
    assert_same_value(loaded, {"rows": _whole_rows(), "shared": np.arange(5), "own": own})


def _export(at: Path) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_same_value(ckptcore.load(at), {"model": {"w": weights}, "step": 7})
    assert_same_value(ckptcore.load(at / "weights"), {"w": weights})
    assert_same_tree(read_checkpoint(at / "weights")[0], {"w": weights})
    roots = [(path / "checkpoint.json").read_bytes()[:HEAD_BYTES] for path in (at, at / "weights")]
    assert [head and head.role for head in map(read_head, roots)] == ["checkpoint", "export"]


def _step(at: Path) -> None:
    reader = CheckpointReader(at)
    assert reader.steps == (3,)
    assert_same_value(reader.load(), {"w": np.arange(3, dtype=np.int32)})
    metrics = ckptcore.metadata(at / "3").metrics
    assert metrics["loss"] == 0.5 and np.isnan(metrics["bad"])
    assert ckptcore.metadata(at / "3").timeline


def _partial(at: Path) -> None:
    with pytest.raises(UncommittedCheckpointError, match="1 complete session"):
        ckptcore.load(at / "c")
    copy = at / "finalized"
    shutil.copytree(at / ".c.partial.ckptcore", at / ".finalized.partial.ckptcore")
    ckptcore.partial(copy).save(sessions()[1])
    ckptcore.partial(copy).finalize(metadata=METADATA)
    _finalized(copy)


def _finalized(at: Path) -> None:
    expected = {**sessions()[0], **sessions()[1]}
    assert_same_value(ckptcore.load(at), expected)
    assert_same_tree(read_checkpoint(at)[0], expected)


def _hosts(at: Path) -> None:
    for host in (0, 1):
        copies = at / f"host-{host}" / "1" / "checkpoint.copies"
        shutil.copytree(at / f"host-{host}" / "1", at / "whole", dirs_exist_ok=True)
        for copy in copies.iterdir() if copies.exists() else ():
            (box,) = ckptcore.load(copy)
            assert box.size and np.isin(box, host_state(0)["weight"]).all()
    rows = np.repeat(np.array([0, 1], np.float32), 6).reshape(4, 3)
    assert_same_value(ckptcore.load(at / "whole"), {"rows": rows, "weight": host_state(0)["weight"]})
    shutil.rmtree(at / "whole")


def _claim(at: Path) -> None:
    with pytest.raises(UncommittedCheckpointError):
        ckptcore.load(at)
    with pytest.raises(NotCommitted):
        read_checkpoint(at)


def _parts(at: Path) -> None:
    assert_same_value(ckptcore.load(at), parts_state())
    tree, custom = read_checkpoint(at)
    assert_same_tree(tree, parts_state())
    assert custom == {**METADATA, "long": "ä" * 50_000} == ckptcore.metadata(at).custom


_EXPECT: Final[Mapping[str, Callable[[Path], None]]] = {
    "parts": _parts,
    "sharded": _sharded,
    "export": _export,
    "step": _step,
    "partial": _partial,
    "finalized": _finalized,
    "hosts": _hosts,
    "claim": _claim,
}


@pytest.mark.parametrize("name", _EXPECT)
def test_a_golden_checkpoint_loads(name: str, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / name, tmp_path / name)
    _EXPECT[name](tmp_path / name)


@pytest.mark.parametrize("name", FEATURES)
def test_the_head_of_every_root_is_short(name: str) -> None:
    roots = list((CHECKPOINTS / name).rglob("checkpoint*.json"))
    heads = [path for path in roots if path.name in ("checkpoint.json", "checkpoint.partial.json")]
    assert heads
    for path in heads:
        assert read_head(path.read_bytes()[:HEAD_BYTES]) is not None, path
