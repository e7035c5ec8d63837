"""Damaged bases: the error names the base. The files of the update itself are sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ckptcore_orbax import Zarr3Layout
from ckptcore_testing.faults import FailAt, FaultPlan
from ckptcore_testing.hostile_json import sealed
from ckptcore_testing.locations import faulty_context, new_place, through

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InsufficientMemoryError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.loading import reading
from ckptcore.loading.reading import allocate_for
from ckptcore.model import ArraySpec, HostArray
from ckptcore.opening.checkpoint import Checkpoint


def _cut(base: Path) -> None:
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:100])


def _lose(base: Path) -> None:
    (base / "model.safetensors").unlink()


def _flip(base: Path) -> None:
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (base / "model.safetensors").write_bytes(content)


def _garble(base: Path) -> None:
    (base / "checkpoint.json").write_text("nothing")


def _empty(base: Path) -> None:
    (base / "checkpoint.json").write_bytes(b"")


def _renew(base: Path) -> None:
    (base / "checkpoint.json").write_bytes(sealed({"format": "ckptcore", "version": 99, "state": "committed"}))


@pytest.mark.parametrize("damage", [_cut, _lose, _flip, _garble, _empty, _renew])
def test_the_error_names_the_base(damage: Callable[[Path], None], tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", {"a": np.ones(1000), "c": np.ones(3)})
    ckptcore.save(tmp_path / "update", {"c": np.zeros(3)}, strategy=ckptcore.Update(tmp_path / "base"))
    with ckptcore.open(tmp_path / "update") as checkpoint:
        damage(tmp_path / "base")
        looks: list[Callable[[], object]] = [lambda: ckptcore.load(tmp_path / "update"), lambda: checkpoint["a"][5:9]]
        for look in looks:
            with pytest.raises(CheckpointError) as caught:
                look()
            assert str(tmp_path / "base") in str(caught.value)
            assert "is in c" not in str(caught.value), "that is an array of the update, in a file of the same name"
            if damage in (_garble, _empty, _renew):
                break  # an open checkpoint has already read its roots
    with pytest.raises(UnsupportedVersionError if damage is _renew else CorruptCheckpointError):
        ckptcore.copy(tmp_path / "update", tmp_path / "copied")
    assert not (tmp_path / "copied").exists()
    if damage is not _renew:
        assert not ckptcore.verify(tmp_path / "update").ok


def test_arrays_of_bases_are_verified_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array larger than the memory can be verified."""
    big = np.arange(5 << 20, dtype=np.float64).reshape(5 << 10, 1 << 10)
    ckptcore.save(tmp_path / "base", {"big": big, "none": np.ones((0, 3)), "one": np.float64(3)})
    ckptcore.save(tmp_path / "update", {"n": 1}, strategy=ckptcore.Update(tmp_path / "base"))
    taken: list[int] = []

    def noting(checkpoint: Checkpoint, leaf: int, spec: ArraySpec) -> HostArray:
        taken.append(spec.nbytes)
        return allocate_for(checkpoint, leaf, spec)

    monkeypatch.setattr("ckptcore.inspection.verify.allocate_for", noting)
    report = ckptcore.verify(tmp_path / "update")
    assert report.ok and report.nbytes > big.nbytes
    assert max(taken) <= 1 << 24 and sum(taken) == big.nbytes + 8
    content = bytearray((tmp_path / "base" / "model.safetensors").read_bytes())
    content[-(20 << 20)] ^= 1
    (tmp_path / "base" / "model.safetensors").write_bytes(content)
    assert [problem.arrays for problem in ckptcore.verify(tmp_path / "update").problems] == [("big",)]


@pytest.mark.parametrize("layout", ["safetensors", "zarr3", "dcp"])
def test_an_array_larger_than_memory_is_neither_sound_nor_damaged(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` reads an array in parts.

    If a part does not fit into memory, it raises an error and does not report damage.
    """
    elements = np.arange(5.0 * (1 << 20))
    ckptcore.save(tmp_path / "base", {"w": elements, "v": 1}, layout=layout)
    ckptcore.save(tmp_path / "update", {"v": 2}, strategy=ckptcore.Update(tmp_path / "base"))
    others = {"zarr3": Zarr3Layout(chunk_bytes=1 << 24), "safetensors": ckptcore.SafetensorsLayout(standalone=True)}
    ckptcore.save(tmp_path / "other", {"w": elements}, layout=others.get(layout, layout))
    (tmp_path / "other" / "checkpoint.json").unlink()
    most = 1 << 24

    def bounded(spec: ArraySpec) -> HostArray:
        if spec.nbytes > most:
            raise InsufficientMemoryError(f"not enough memory for {spec}")
        return np.empty(spec.shape, spec.numpy_dtype)

    monkeypatch.setattr(reading, "allocate", bounded)
    assert ckptcore.verify(tmp_path / "other").ok
    most = 100
    for name in ("other", "update"):
        with pytest.raises(InsufficientMemoryError):
            ckptcore.verify(tmp_path / name)


def test_a_failed_read_of_a_base_is_a_storage_error(tmp_path: Path) -> None:
    run, state = new_place("file", tmp_path), {"a": np.ones(2), "step": 1}
    ckptcore.save(f"{run}/0/1", state)
    plan = FaultPlan()
    ckptcore.save(
        through(f"{run}/0/2"),
        {"step": 2},
        strategy=ckptcore.Update(through(f"{run}/0/1")),
        context=faulty_context(run, plan),
    )
    looks = [
        operation.number
        for operation in plan.operations
        if operation.name == "get" and operation.keys[0].endswith("1/checkpoint.json")
    ]
    assert len(looks) == 2, "when it is opened, and before the commit"
    for number in looks:
        failing = faulty_context(run, FaultPlan(FailAt(number, StorageError("the network is down"))))
        with pytest.raises(StorageError, match="the network is down"):
            ckptcore.save(
                through(f"{run}/0/3"), {"step": 3}, strategy=ckptcore.Update(through(f"{run}/0/1")), context=failing
            )
        ckptcore.save(f"{run}/0/3", {"step": 3}, strategy=ckptcore.Update(f"{run}/0/1"))
        ckptcore.delete(f"{run}/0/3")
