"""Versions of one process: deltas, their numbers, full versions, restarts, and publishes that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan, FullAfter
from ckptcore_testing.locations import faulty_context, new_place, store_at, through
from ckptcore_testing.trees import same_value
from ckptcore_versions import follow
from ckptcore_versions.publishing import version_saves

import ckptcore
from ckptcore import select
from ckptcore.errors import (
    BackgroundSaveError,
    DirectoryInUseError,
    InvalidLocationError,
    StorageFullError,
    TreeMismatchError,
)
from ckptcore.opening.open_checkpoints import open_checkpoint
from plugins.versions.tests.published import CONTEXT, base_of, load, location, publisher, weights
from plugins.versions.tests.watched_deltas import WatchedDeltas


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new directory of versions: on a file system, which has renames, or in memory, with conditional puts."""
    return new_place(request.param, tmp_path)


@pytest.mark.parametrize("background", [False, True])
def test_each_version_has_the_weights_that_were_published(place: str, background: bool) -> None:
    with publisher(place) as versions:
        for number in (1, 2, 5):
            given = weights(number)
            versions.publish(number, given, background=background)
            given["embedding"][:] = 7  # the weights may change now
            given["layers"][0]["w"][:] = 7
        versions.wait()
        assert versions.latest == 5
    assert [base_of(place, number) for number in (1, 2, 5)] == [None, 1, 2]
    for number in (1, 2, 5):
        assert same_value(load(place, number), weights(number))
        ckptcore.verify(location(place, number), context=CONTEXT)


@pytest.mark.parametrize("number", [7, 6, 0])
@pytest.mark.parametrize("background", [False, True])
def test_a_number_that_is_not_higher_than_the_newest_is_refused(number: int, background: bool, place: str) -> None:
    with publisher(place) as versions:
        versions.publish(7, weights(7), background=True)
        with pytest.raises(ValueError, match=rf"version={number}: .*version 7 already.*publish version 8"):
            versions.publish(number, weights(1), background=background)
        versions.publish(8, weights(8))
    assert same_value(load(place, 8), weights(8))
    with publisher(place) as versions, pytest.raises(ValueError, match="version 8 already"):
        versions.publish(number, weights(1))


@pytest.mark.parametrize(("every", "full"), [(1, [1, 2, 3, 4, 5]), (3, [1, 4]), (50, [1])])
def test_a_version_is_full_after_a_number_of_deltas(every: int, full: list[int], place: str) -> None:
    with publisher(place, full_every=every) as versions:
        for number in range(1, 4):
            versions.publish(number, {"w": np.arange(1000.0), "bias": np.arange(number)})
    with publisher(place, full_every=every) as versions:  # a restart does not begin to count again
        for number in range(4, 6):
            versions.publish(number, {"w": np.arange(1000.0), "bias": np.arange(number)})
    assert [number for number in range(1, 6) if base_of(place, number) is None] == full


def test_a_version_is_full_once_the_deltas_take_as_many_bytes_as_a_full_version(place: str) -> None:
    """These weights have nothing in common, so that a delta is about as long as a full version, but has no header."""
    random = np.random.default_rng(0)
    with publisher(place) as versions:
        for number in range(1, 6):
            versions.publish(number, {"w": random.integers(0, 256, 100_000, np.uint8)})
    assert [base_of(place, number) for number in range(1, 6)] == [None, 1, 2, None, 4]


def test_a_full_version_on_request_needs_no_earlier_version(place: str) -> None:
    with publisher(place) as versions:
        versions.publish(1, weights(1))
        versions.publish(2, weights(2), full=True)
        versions.publish(3, weights(3))
    assert [base_of(place, number) for number in (1, 2, 3)] == [None, None, 2]
    ckptcore.delete(location(place, 1))
    assert same_value(load(place, 3), weights(3))


def test_arrays_may_come_go_and_change_their_shape(place: str) -> None:
    states: list[dict[str, Any]] = [
        {"a": np.arange(4.0), "b": np.arange(6)},
        {"a": np.arange(5.0), "c": np.arange(3)},
        {"a": np.arange(5.0) + 1, "b": np.arange(6), "c": np.arange(3.0)},
    ]
    with publisher(place, full_every=9) as versions:
        for number, state in enumerate(states, 1):
            versions.publish(number, {**state, "w": np.zeros(1000)})
    assert [base_of(place, number) for number in (1, 2, 3)] == [None, 1, 2]
    for number, state in enumerate(states, 1):
        assert same_value(load(place, number), {**state, "w": np.zeros(1000)})


def test_selected_leaves_alone_are_versions(place: str) -> None:
    """Adapters are published for engines that hold the weights below them."""
    tied = np.zeros(3)

    def model(number: int) -> dict[str, Any]:
        return {
            "base": {"w": np.zeros((50, 50)), "tied": tied},
            "lora": {"a": np.full((2, 50), number), "tied": tied, "rank": 2},
            "layers": [np.zeros(4), {"lora": np.full(3, number)}],
        }

    with publisher(place, select=select.glob("**/lora", "lora")) as versions:
        versions.publish(1, model(1))
        versions.publish(2, model(2))
    assert base_of(place, 2) == 1
    for number in (1, 2):
        whole = model(number)
        assert same_value(load(place, number), {"lora": whole["lora"], "layers": {1: whole["layers"][1]}})


def test_adapters_are_selected_by_names_with_dots(place: str, tmp_path: Path) -> None:
    """As in the state of a module. An engine loads them alone, and keeps the weights below them."""
    names = ["base.weight", "layers.0.q.lora_A.weight", "layers.0.q.lora_B.weight"]
    model = {name: np.ones((3, 4)) for name in names}
    pattern = select.glob("**/*lora_*")
    with publisher(place, select=pattern) as versions, follow(place, cache=tmp_path / "cache") as follower:
        versions.publish(1, model)
        version = follower.next_version(0)
    assert version is not None and list(version.arrays) == names[1:]
    engine = {name: np.zeros((3, 4)) for name in names}
    version.load_into({name: array for name, array in engine.items() if "lora_" in name})
    assert [array.mean() for array in engine.values()] == [0, 1, 1]


def test_a_selection_of_nothing_names_the_leaves(place: str) -> None:
    model = {f"w{number:02}": np.zeros(1) for number in range(20)}
    error = pytest.raises(TreeMismatchError, match="the leaves are w00, w01, .*w09 and others. Nothing was written")
    with publisher(place, select=select.glob("**/lora_*")) as versions, error:
        versions.publish(1, model)


def test_a_selection_of_nothing_is_refused(place: str) -> None:
    with publisher(place, select=select.glob("adapter")) as versions:
        with pytest.raises(TreeMismatchError, match="no weights to publish"):
            versions.publish(1, weights(1))
        assert versions.latest is None


@pytest.mark.parametrize("nothing", [None, {}, {"scale": 1.5}])
def test_weights_without_arrays_are_refused(place: str, nothing: Any) -> None:
    with publisher(place) as versions:
        versions.publish(1, weights(1))
        with pytest.raises(TreeMismatchError, match=r"no arrays.*no weights to publish.*Nothing was written"):
            versions.publish(2, nothing)
        versions.publish(2, weights(2))
    assert same_value(load(place, 2), weights(2))


def test_a_restarted_trainer_continues_from_the_last_version(place: str) -> None:
    with publisher(place, run="first") as versions:
        versions.publish(1, weights(1))
    with publisher(place) as versions:
        versions.publish(2, weights(2))
    assert base_of(place, 2) == 1
    assert same_value(load(place, 2), weights(2))


def test_a_second_trainer_is_refused(place: str) -> None:
    with publisher(place) as versions:
        versions.publish(1, weights(1))
        with pytest.raises(DirectoryInUseError):
            publisher(place)


def _flip(place: str, number: int) -> None:
    """Damage an array of a version."""
    store = store_at(location(place, number))
    key = next(key for key in store.list() if not key.endswith(".json"))
    data = bytearray(store.get(key))
    data[-9] ^= 1
    store.put(key, bytes(data))


def _cut_root(place: str, number: int) -> None:
    store = store_at(location(place, number))
    store.put("checkpoint.json", store.get("checkpoint.json")[:-20])


@pytest.mark.parametrize("damage", [_flip, _cut_root])
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_restarted_trainer_writes_a_full_version_if_the_last_one_is_damaged(
    damage: Callable[[str, int], None], damaged: int, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    with publisher(place) as versions:
        versions.publish(1, {"w": np.arange(1000)})
        versions.publish(2, {"w": np.arange(1000) + 2})
    damage(place, damaged)
    with publisher(place, full_every=9) as versions:
        versions.publish(3, {"w": np.arange(1000) + 3})
        versions.publish(4, {"w": np.arange(1000) + 4})
    assert [base_of(place, number) for number in (3, 4)] == [None, 3]
    assert "version 3 is written as a full version" in caplog.text
    assert same_value(load(place, 4), {"w": np.arange(1000) + 4})


class _Broken(Exception):
    """The layout failed."""


def test_a_publish_that_fails_in_the_middle_is_repeated(place: str) -> None:
    """Some elements of the base were replaced already, so the base is read again."""
    fails = False

    def take(name: str) -> None:
        if fails and name == "layers.0.w":
            raise _Broken

    with publisher(place, layout=WatchedDeltas(taking=take), full_every=9) as versions:
        versions.publish(1, weights(1), full=True)
        fails = True
        for number in (2, 3):
            with pytest.raises(_Broken):
                versions.publish(number, weights(number))
        assert versions.latest == 1
        fails = False
        versions.publish(3, weights(3))
        versions.publish(4, weights(4), background=True).result()
        fails = True
        versions.publish(5, weights(5), background=True)
        with pytest.raises(BackgroundSaveError, match="v000005 failed"):
            versions.publish(6, weights(6))
        fails = False
        versions.publish(6, weights(6))
    assert same_value(load(place, 3), weights(3))
    assert same_value(load(place, 6), weights(6))


def test_a_full_disk_fails_one_version_only(place: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan(FullAfter(30_000))
    context = faulty_context(place, plan)
    caplog.set_level(logging.ERROR)
    with publisher(through(place), context=context) as versions:
        versions.publish(1, {"w": np.zeros(2000)})
        with pytest.raises(StorageFullError, match="full"):
            versions.publish(2, {"w": np.random.default_rng(0).standard_normal(2000)})
        plan._room = None
        versions.publish(2, {"w": np.full(2000, 2.0)})
    assert base_of(place, 2) == 1
    assert same_value(load(place, 2), {"w": np.full(2000, 2.0)})


def test_wrong_arguments_are_refused(place: str) -> None:
    for number in (0, 1001):
        with pytest.raises(ValueError, match=f"full_every={number}: .*from 1 to 1000"):
            publisher(place, full_every=number)
    with pytest.raises(InvalidLocationError, match="base_directory='s3://bucket': expected a directory on a local"):
        publisher(place, base_directory="s3://bucket")
    with pytest.raises(TypeError, match="run=3: expected the name"):
        publisher(place, run=3)
    with pytest.raises(TypeError, match="select='lora'"):
        publisher(place, select="lora")
    with pytest.raises(TypeError, match="cannot write versions"):
        publisher(place, layout="safetensors")
    with pytest.raises(InvalidLocationError, match="base_directory='s3://bucket': expected a directory on a local"):
        publisher(place, base_directory="s3://bucket")
    with publisher(place) as versions:
        with pytest.raises(TypeError, match="version='1'"):
            versions.publish("1", weights(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"step=1\.5"):
            versions.publish(1, weights(1), step=1.5)  # type: ignore[arg-type]
        for step in (2**63, 10**5000):
            with pytest.raises(ValueError, match="step= must fit into 64 bits"):
                versions.publish(1, weights(1), step=step)
        with pytest.raises(ValueError, match="step -1"):
            versions.publish(-1, weights(1))
        assert versions.latest is None
    assert "v000001" not in store_at(place).list_names()


def test_a_version_that_was_replaced_meanwhile_is_no_base(
    place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open the version after another program replaced it, although the leader saw the earlier one."""
    with publisher(place) as versions:
        versions.publish(1, weights(1))

    def replace_and_open(at: Any, context: ckptcore.Context) -> Any:
        ckptcore.save(location(place, 1), weights(9), overwrite="non-atomic")
        return open_checkpoint(at, context)

    monkeypatch.setattr(version_saves, "open_checkpoint", replace_and_open)
    with publisher(place) as versions:
        versions.publish(2, weights(2))
    assert base_of(place, 2) is None
    assert "not the version that" in caplog.text
    assert same_value(load(place, 2), weights(2))


def test_a_publish_does_not_wait_for_other_saves_of_its_context(place: str, tmp_path: Path) -> None:
    """A checkpoint of the training may take minutes."""
    published = threading.Event()

    def take(name: str) -> None:
        assert published.wait(60)

    context = replace(CONTEXT)
    with publisher(place, context=context, base_directory=tmp_path / "base") as versions:
        layout = WatchedDeltas(taking=take)
        saved = ckptcore.save_async(f"{place}-training/1", weights(1), layout=layout, context=context)
        versions.publish(1, weights(1))
        published.set()
        saved.result()
    assert same_value(load(place, 1), weights(1))
