"""Long chains in the format of slime, versions that arrive in any order, and the memory and requests of reads."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.cases import refused
from ckptcore_tools import run_steps
from ckptcore_tools.copies import copy_steps
from ckptcore_tools.run_steps import find_steps, read_steps
from ckptcore_versions.following.follower import FOLLOWED_NAMES
from ckptcore_versions.slime import delta_index
from ckptcore_versions.slime import layout as slime
from ckptcore_versions.slime.layout import SlimeLayout

import ckptcore
from ckptcore.errors import CorruptCheckpointError
from ckptcore.opening import derived
from plugins.versions.tests.held import HeldState
from plugins.versions.tests.held import version_at as held_version_at
from plugins.versions.tests.slime_files import INDEX, pull, version_at, write_delta, write_file

CONTEXT = ckptcore.Context(durability="none")
ROWS, COLUMNS = 40, 25


def states(count: int) -> Iterator[dict[str, bytes]]:
    """Yield the tensors of versions 0, 1 and so on."""
    rng = np.random.default_rng(5)
    tensors = {"w": rng.integers(0, 256, ROWS * COLUMNS, np.uint8), "b": rng.integers(0, 256, 64, np.uint8)}
    for _ in range(count):
        yield {name: tensor.tobytes() for name, tensor in tensors.items()}
        tensors["w"][rng.integers(0, ROWS * COLUMNS, 20)] ^= rng.integers(1, 256, 20).astype(np.uint8)
        if rng.random() < 0.3:
            tensors["b"][3] ^= 1


def write_full(directory: Path, number: int, state: Mapping[str, bytes]) -> None:
    tensors = {"w": ("U8", [ROWS, COLUMNS], state["w"]), "b": ("F32", [16], state["b"])}
    write_file(version_at(directory, number) / "model.safetensors", tensors)


def write_versions(directory: Path, count: int, encodings: tuple[str, ...] = ("xor",)) -> list[dict[str, bytes]]:
    """Write a full version 0 and deltas. Return the tensors of each version."""
    written = list(states(count))
    write_full(directory, 0, written[0])
    for number in range(1, count):
        encoding = encodings[number % len(encodings)]
        write_delta(directory, number, written[number - 1], written[number], encoding)
    return written


def loaded(version: Path, **options: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in ckptcore.load(version, context=CONTEXT, **options).items()}


def test_encodings_differ_along_a_chain(tmp_path: Path) -> None:
    written = write_versions(tmp_path, 12, ("xor", "overwrite"))
    for number, state in enumerate(written):
        assert loaded(version_at(tmp_path, number)) == state
        assert pull(tmp_path, number, written[0]) == state
    report = ckptcore.verify(version_at(tmp_path, 11))
    assert report.state == "complete" and report.unverified == ("../weight_v000000/model.safetensors",)


@pytest.mark.slow
def test_a_thousand_versions_of_other_software(tmp_path: Path) -> None:
    written = write_versions(tmp_path, 1001, ("xor", "overwrite", "xor_sparse"))
    for number in (1000, 999, 500, 1):
        assert loaded(version_at(tmp_path, number)) == written[number]
    reader = ckptcore.CheckpointReader(tmp_path)
    assert tuple(reader.steps) == tuple(range(1001))
    assert ckptcore.verify(version_at(tmp_path, 1000)).ok


@pytest.mark.slow
def test_a_thousand_versions_of_ckptcore(tmp_path: Path) -> None:
    before: dict[str, Any] = {}
    for number, state in enumerate(states(1001), start=1):
        arrays = {"w": np.frombuffer(state["w"], np.uint8), "b": np.frombuffer(state["b"], np.float32)}
        base = str(version_at(tmp_path, number - 1))
        held = HeldState(held_version_at(base, number - 1), before) if before else None
        layout = SlimeLayout().numbered(number).against(held)
        ckptcore.save(version_at(tmp_path, number), arrays, layout=layout, context=CONTEXT)
        before = arrays
    last = version_at(tmp_path, 1001)
    assert loaded(last) == state
    assert pull_iteratively(tmp_path, 1001) == state
    assert ckptcore.verify(last).state == "sound"
    assert ckptcore.CheckpointReader(tmp_path).latest == 1001


def pull_iteratively(directory: Path, last: int) -> dict[str, bytes]:
    """Pull versions one by one, as an engine does."""
    state = pull(directory, 1)
    for number in range(2, last + 1):
        other = directory / "one"
        shutil.copytree(version_at(directory, number), version_at(other, 1))
        index = json.loads((version_at(other, 1) / INDEX).read_text())
        index["metadata"] |= {"version": "000001", "base_version": "000000"}
        (version_at(other, 1) / INDEX).write_text(json.dumps(index))
        state = pull(other, 1, state)
        shutil.rmtree(other)
    return state


def test_a_late_joiner_needs_no_version_before_the_last_full_one(tmp_path: Path) -> None:
    written = write_versions(tmp_path, 9)
    shutil.rmtree(version_at(tmp_path, 5))
    write_full(tmp_path, 5, written[5])
    for number in range(5):
        shutil.rmtree(version_at(tmp_path, number))
    assert loaded(version_at(tmp_path, 8)) == written[8]
    assert tuple(ckptcore.CheckpointReader(tmp_path).steps) == (5, 6, 7, 8)


def test_versions_arrive_in_any_order(tmp_path: Path) -> None:
    """As on a file system of another host, whose listings lag behind."""
    written = write_versions(tmp_path / "source", 6)
    order = list(range(6))
    random.Random(2).shuffle(order)
    assert order[0] != 0
    reader = ckptcore.CheckpointReader(tmp_path / "copy")
    there: set[int] = set()
    for number in order:
        shutil.copytree(version_at(tmp_path / "source", number), version_at(tmp_path / "copy", number))
        there.add(number)
        reader.reload()
        assert reader.latest == max(there)
        for version in there:
            if there.issuperset(range(version)):
                assert loaded(version_at(tmp_path / "copy", version)) == written[version]
            else:
                missing = max(set(range(version)) - there)
                text = f"weight_v{missing:06d}"
                location = version_at(tmp_path / "copy", version)
                refused(lambda location=location: loaded(location), text, error=CorruptCheckpointError)  # type: ignore[misc]


def test_a_reader_loads_the_newest_version_that_is_complete(tmp_path: Path) -> None:
    written = write_versions(tmp_path, 6)
    version_at(tmp_path, 4).rename(tmp_path / "late")
    reader = ckptcore.CheckpointReader(tmp_path, context=CONTEXT)
    assert reader.load()["w"].tobytes() == written[3]["w"]
    (tmp_path / "late").rename(version_at(tmp_path, 4))
    reader = ckptcore.CheckpointReader(tmp_path, context=CONTEXT)
    assert reader.load()["w"].tobytes() == written[5]["w"]


def test_a_list_of_steps_names_the_version_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens no chain, and inspects a version at most twice: as a step, and as the base of others."""
    write_versions(tmp_path, 8)
    shutil.rmtree(version_at(tmp_path, 2))
    inspected: list[str] = []

    def inspect(store: Any) -> Any:
        inspected.append(str(store))
        return delta_index.inspect_delta(store)

    monkeypatch.setattr(slime, "inspect_delta", inspect)
    monkeypatch.setattr(run_steps, "_THREADS", 1)
    steps = find_steps(str(tmp_path), FOLLOWED_NAMES, CONTEXT)
    numbers = [0, 1, 3, 4, 5, 6, 7]
    inspected.clear()
    found = {
        status.step: [problem.key for problem in status.problems] for status in read_steps(steps, numbers, CONTEXT)
    }
    assert found == {number: [] if number < 2 else ["../weight_v000002"] for number in numbers}
    assert len(inspected) <= 2 * len(numbers)


def test_versions_are_copied_without_the_first_which_engines_have(tmp_path: Path) -> None:
    written = write_versions(tmp_path / "source", 4)
    version_at(tmp_path / "source", 0).rename(version_at(tmp_path, 0))
    report = copy_steps(tmp_path / "source", tmp_path / "copy")
    assert sorted(report.steps) == [1, 2, 3] and not report.damaged
    version_at(tmp_path, 0).rename(version_at(tmp_path / "copy", 0))
    assert loaded(version_at(tmp_path / "copy", 3)) == written[3]


# --- boxes, windows, requests


def test_boxes_and_memory_of_any_order_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only a few frames fit into memory."""
    written = write_versions(tmp_path, 20, ("xor", "overwrite"))
    whole = np.frombuffer(written[-1]["w"], np.uint8).reshape(ROWS, COLUMNS)
    for most in (1 << 20, 100, 1):
        monkeypatch.setattr(derived, "_CHANGES_BYTES", most)
        assert loaded(version_at(tmp_path, 19)) == written[-1]
        target: dict[str, Any] = {"w": np.zeros((ROWS, COLUMNS), np.uint8, order="F"), "b": np.zeros(16, np.float32)}
        ckptcore.load_into(version_at(tmp_path, 19), target, context=CONTEXT)
        assert np.array_equal(target["w"], whole)
        opened = ckptcore.open(version_at(tmp_path, 19), context=CONTEXT)
        boxes: list[Any] = [np.s_[2:7, 3:], np.s_[39], np.s_[:, 4], np.s_[...]]
        for box in boxes:
            assert np.array_equal(opened["w"][box], whole[box])


def test_frames_of_a_long_chain_are_not_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, count = 1 << 20, 24
    rng = np.random.default_rng(1)
    monkeypatch.setattr(derived, "_CHANGES_BYTES", nbytes)
    before = rng.integers(0, 256, nbytes, np.uint8)
    ckptcore.save(version_at(tmp_path, 1), {"w": before}, layout=SlimeLayout(), context=CONTEXT)
    for number in range(2, count + 1):  # frames that zstd cannot compress, as large as the array
        held = HeldState(held_version_at(str(version_at(tmp_path, number - 1)), number - 1), {"w": before})
        before = rng.integers(0, 256, nbytes, np.uint8)
        layout = SlimeLayout().against(held)
        ckptcore.save(version_at(tmp_path, number), {"w": before}, layout=layout, context=CONTEXT)
    ckptcore.load(version_at(tmp_path, 2), context=CONTEXT)
    tracemalloc.start()
    try:
        array = ckptcore.load(version_at(tmp_path, count), context=CONTEXT)["w"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.tobytes() == before.tobytes()
    assert peak < 8 * nbytes, f"{peak / nbytes:.1f} arrays"


def test_listing_steps_reads_each_version_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_versions(tmp_path, 12)
    inspected = 0

    def inspect(store: Any) -> Any:
        nonlocal inspected
        inspected += 1
        return delta_index.inspect_delta(store)

    monkeypatch.setattr(slime, "inspect_delta", inspect)
    assert tuple(ckptcore.CheckpointReader(tmp_path).steps) == tuple(range(12))
    assert inspected <= 12
