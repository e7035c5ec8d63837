"""Remedies in errors about Orbax, AXLearn and zarr. Each test follows the remedy, and checks the loaded values."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_orbax.zarr import stored_arrays
from ckptcore_orbax.zarr.formats import Compression
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
VALUES = np.arange(600.0).reshape(20, 30)


# --- saves that did not finish ----------------------------------------------------------------------------------------


def copies(source: str, directory: Path, damage: Callable[[Path], object]) -> tuple[Path, Path]:
    """Copy a golden step twice, and damage the copy with the later step. Return the sound and the damaged copy."""
    sound, damaged = directory / "step_00000004", directory / "step_00000005"
    for step in (sound, damaged):
        shutil.copytree(GOLDEN / source, step)
    damage(damaged)
    return sound, damaged


@pytest.mark.parametrize(
    ("source", "damage", "text"),
    [
        (
            "axlearn/step_00000004",
            lambda step: (step / "index").unlink(),
            " has arrays of AXLearn, but index, which a save",
        ),
        (
            "v1_processes",
            lambda step: next(step.rglob("manifest.ocdbt")).unlink(),
            " has databases of processes but no manifest.ocdbt: the save ended before it merged them",
        ),
    ],
)
def test_load_another_step(tmp_path: Path, source: str, damage: Any, text: str) -> None:
    sound, damaged = copies(source, tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        ckptcore.load(damaged)
    assert str(damaged) in str(caught.value) and text in str(caught.value)
    assert str(caught.value).endswith("Load another step")
    assert same_value(ckptcore.load(sound), ckptcore.load(GOLDEN / source))
    with ckptcore.CheckpointReader(tmp_path) as run:
        assert run.latest == 4


def test_random_keys_of_two_implementations(tmp_path: Path) -> None:
    def damage(step: Path) -> None:
        first = next(step.rglob("array_metadatas/process_0"))
        document = json.loads(first.read_text())
        document["array_metadatas"][0]["array_metadata"]["ext_metadata"] = {"random_key_impl": "rbg"}
        (first.parent / "process_9").write_text(json.dumps(document))
        document["array_metadatas"][0]["array_metadata"]["ext_metadata"] = {"random_key_impl": "fry"}
        document["array_metadatas"] = document["array_metadatas"][:1]
        first.write_text(json.dumps(document))

    sound, damaged = copies("v1_default", tmp_path, damage)
    with pytest.raises(
        CheckpointError, match="contains random keys of .*: restore the checkpoint from a copy, or load"
    ):
        ckptcore.load(damaged)
    shutil.rmtree(damaged)
    shutil.copytree(sound, damaged)
    assert same_value(ckptcore.load(damaged), ckptcore.load(GOLDEN / "v1_default"))


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [OcdbtLayout, Zarr3Layout, ZarrLayout])
def test_names_of_compressions(tmp_path: Path, layout: Any) -> None:
    with pytest.raises(ValueError, match=r"^compression='zip': expected one of ") as caught:
        layout(compression="zip")
    listed = re.fullmatch(r".*expected one of (.*), or one with a level such as '(.*)'", str(caught.value))
    assert listed is not None
    for name in (*listed[1].split(", "), listed[2]):
        ckptcore.save(tmp_path / name, {"w": VALUES}, layout=layout(compression=name))
        assert same_value(ckptcore.load(tmp_path / name), {"w": VALUES})


def test_names_of_codecs() -> None:
    wrong: Any = "lz4"
    with pytest.raises(ValueError, match=r"Compression\(name='lz4'\): give one of ") as caught:
        Compression(wrong)
    names: Any = str(caught.value).partition("give one of ")[2].split(", ")
    assert [Compression(name).name for name in names] == ["zstd", "gzip", "blosc"]


def test_chunks_that_are_too_large_for_blosc(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.int8(1), (1 << 31,))  # takes one byte of memory
    with pytest.raises(
        CheckpointError,
        match=r"^w: .*: its chunks have 2147483648 bytes; blosc allows 2147483631; give a smaller chunk_b",
    ):
        ckptcore.save(tmp_path / "c", {"w": huge}, layout=Zarr3Layout(compression="blosc", chunk_bytes=None))
    smaller = Zarr3Layout(compression="blosc", chunk_bytes=1 << 20)
    assert ckptcore.plan({"w": huge}, layout=smaller).array_bytes == huge.nbytes
    ckptcore.save(tmp_path / "c", {"w": huge[: 1 << 22]}, layout=smaller)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": np.ones(1 << 22, np.int8)})


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="has a name of .* bytes; OCDBT allows at most .*: shorten the keys. Nothing"
    ):
        ckptcore.save(tmp_path / "c", {"k" * 70_000: VALUES}, layout="ocdbt")
    shorter = {"k" * 1000: VALUES}
    ckptcore.save(tmp_path / "c", shorter, layout="ocdbt")
    assert same_value(ckptcore.load(tmp_path / "c"), shorter)


def test_temporary_directories(tmp_path: Path) -> None:
    temporary = tmp_path / "5.orbax-checkpoint-tmp"
    shutil.copytree(GOLDEN / "v1_default", temporary)
    with pytest.raises(
        CheckpointError, match="did not finish. Load another step; if you know that it is complete, rename"
    ):
        ckptcore.load(temporary)
    temporary.rename(tmp_path / "5")
    assert same_value(ckptcore.load(tmp_path / "5"), ckptcore.load(GOLDEN / "v1_default"))


def test_arrays_of_too_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_arrays, "MAX_CHUNKS", 100)
    values = np.arange(598.0)
    with pytest.raises(CheckpointError, match="at most 100 can be read; give a larger chunk_bytes, or use shard bound"):
        ckptcore.save(tmp_path / "c", {"w": values}, layout=Zarr3Layout(chunk_bytes=8))
    ckptcore.save(tmp_path / "c", {"w": values}, layout=Zarr3Layout(chunk_bytes=800))
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": values})
