"""Updates protect their bases from deletion.

This holds for updates of any name and version, and even if the root of the base is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.faults import FailAt, FaultPlan, Step
from ckptcore_testing.hostile_json import sealed
from ckptcore_testing.locations import faulty_context, new_place, store_at, through

import ckptcore
from ckptcore.errors import CheckpointReferredError, InvalidLocationError, SaveLostError, StoragePermissionError


class _Meanwhile(FaultPlan):
    """A plan without faults. Runs a function while a deletion searches for updates, before it lists the directory."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """See `FaultPlan.begin`."""
        if name == "list_names" and tuple(keys) == ("",):
            self._act()
        return super().begin(name, keys, offset, nbytes)


@pytest.fixture
def run(run: str) -> str:
    """A directory with a checkpoint, which is the base of updates."""
    ckptcore.save(f"{run}/1", {"a": np.ones(4), "n": 1})
    return run


@pytest.mark.parametrize("name", [".best", "best.ckptcore", "1.base", "x\ny", "ü %2F?#", "-rf"])
def test_an_update_with_any_name_protects_its_base(name: str, run: str) -> None:
    if run.startswith("file") and "?" in name:
        name = "ü"
    ckptcore.save(f"{run}/{name}", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(f"{run}/1")
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, {"n": step})
            checkpointer.wait()
        with pytest.raises(CheckpointReferredError):
            checkpointer.delete(1)
    assert ckptcore.load(f"{run}/{name}")["a"].sum() == 4
    assert ckptcore.CheckpointReader(run).steps == (1, 3)


@pytest.mark.parametrize("name", ["2", "best"])
def test_an_update_of_a_newer_version_protects_its_base(name: str, run: str) -> None:
    """An older ckptcore must not delete arrays to which a checkpoint of a newer version refers."""
    ckptcore.save(f"{run}/{name}", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    root = store_at(f"{run}/{name}").get("checkpoint.json")
    store_at(f"{run}/{name}").put("checkpoint.json", sealed({**json.loads(root), "version": 99}))
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(f"{run}/1")
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
        checkpointer.save(3, {"n": 3})
        checkpointer.wait()
        with pytest.raises(CheckpointReferredError):
            checkpointer.delete(1)
    store_at(f"{run}/{name}").put("checkpoint.json", root)
    assert ckptcore.load(f"{run}/{name}")["a"].sum() == 4


@pytest.mark.parametrize("damage", ["newer", "cut"])
def test_an_update_protects_a_base_with_an_unreadable_root(damage: str, run: str) -> None:
    """Without a readable root, ckptcore cannot tell whether the update refers to this save.

    The root might be restored.
    """
    ckptcore.save(f"{run}/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))
    root = store_at(f"{run}/1").get("checkpoint.json")
    store_at(f"{run}/1").put(
        "checkpoint.json", sealed({**json.loads(root), "version": 99}) if damage == "newer" else root[:-3]
    )
    with pytest.raises(CheckpointReferredError, match="2 in the same directory"):
        ckptcore.delete(f"{run}/1")
    with ckptcore.Checkpointer(run) as checkpointer, pytest.raises(CheckpointReferredError):
        checkpointer.delete(1)
    store_at(f"{run}/1").put("checkpoint.json", root)
    assert ckptcore.load(f"{run}/2")["a"].sum() == 4
    ckptcore.delete(f"{run}/2")
    store_at(f"{run}/1").put("checkpoint.json", root[:-3])
    ckptcore.delete(f"{run}/1")


def test_hidden_bases_and_updates_inside_their_base_are_refused(run: str) -> None:
    ckptcore.save(f"{run}/.hidden", {"a": np.ones(2)})
    with pytest.raises(InvalidLocationError, match=r"which has a hidden name.*Nothing was written"):
        ckptcore.save(f"{run}/2", {}, strategy=ckptcore.Update(f"{run}/.hidden"))
    anywhere = ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere"))
    for below in ("1/2", "1/2/3"):
        with pytest.raises(InvalidLocationError, match="/1, which (is a checkpoint|contains it)"):
            ckptcore.save(f"{run}/{below}", {}, strategy=ckptcore.Update(f"{run}/1"), context=anywhere)


def test_an_update_of_one_checkpointable_protects_all_of_them(run: str) -> None:
    anywhere = ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere"))
    ckptcore.save_checkpointables(f"{run}/2", {"model": {"a": np.ones(4)}, "other": {"b": 1}})
    ckptcore.save(f"{run}/3", {"n": 2}, strategy=ckptcore.Update(f"{run}/2/model"), context=anywhere)
    with pytest.raises(CheckpointReferredError, match="3 in the same directory"):
        ckptcore.delete(f"{run}/2")
    with ckptcore.Checkpointer(run) as checkpointer, pytest.raises(CheckpointReferredError):
        checkpointer.delete(2)
    assert ckptcore.load(f"{run}/3", context=anywhere)["a"].sum() == 4


def test_a_step_that_an_update_replaced_after_its_root_was_read(tmp_path: Path) -> None:
    run = f"{tmp_path}/run"
    for step in (1, 2, 3):
        ckptcore.save(f"{run}/{step}", {"a": np.ones(4), "n": step})
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(3)) as checkpointer:
        checkpointer.save(4, {"n": 4})
        checkpointer.wait()  # the checkpointer has read all roots for its policy
        ckptcore.save(f"{run}/4", {"n": 5}, strategy=ckptcore.Update(f"{run}/2"), overwrite=True)
        checkpointer.save(5, {"n": 5})
        checkpointer.wait()
        with pytest.raises(CheckpointReferredError):
            checkpointer.delete(2)
    assert ckptcore.load(f"{run}/4")["a"].sum() == 4


def test_a_base_stays_visible_while_a_deletion_searches_for_updates(tmp_path: Path) -> None:
    """At this moment, a garbage collection removes nothing, and a load finds the base."""
    run = new_place("file", tmp_path)
    ckptcore.save(f"{run}/1", {"a": np.ones(4), "n": 1})
    looks: list[None] = []

    def refuse() -> None:
        looks.append(None)
        ckptcore.Checkpointer(run).close()
        ckptcore.save(f"{run}/2", {"n": 2})
        assert ckptcore.load(f"{run}/1")["a"].sum() == 4
        raise CheckpointReferredError("an update was saved meanwhile")

    with pytest.raises(CheckpointReferredError, match="an update was saved meanwhile"):
        ckptcore.delete(through(f"{run}/1"), context=faulty_context(run, _Meanwhile(refuse)))
    assert len(looks) == 1
    assert ckptcore.load(f"{run}/1")["a"].sum() == 4


def test_a_deletion_whose_marker_was_removed_deletes_nothing(tmp_path: Path) -> None:
    run = new_place("memory", tmp_path)
    ckptcore.save(f"{run}/1", {"a": np.ones(4)})
    lost: list[str] = []

    def lose() -> None:
        store = store_at(run)
        lost.extend(f".ckptcore/deleting/{name}" for name in store.list_names(".ckptcore/deleting/"))
        store.delete(lost)

    with pytest.raises(SaveLostError):
        ckptcore.delete(through(f"{run}/1"), context=faulty_context(run, _Meanwhile(lose)))
    assert len(lost) == 1
    assert ckptcore.load(f"{run}/1")["a"].sum() == 4


def test_a_deletion_without_permission_to_list_deletes_nothing(run: str) -> None:
    plan = FaultPlan()
    ckptcore.save(f"{run}/2", {"n": 2})
    ckptcore.delete(through(f"{run}/2"), context=faulty_context(run, plan))
    listing = next(
        operation.number for operation in plan.operations if operation.name == "list_names" and operation.keys == ("",)
    )
    failing = faulty_context(run, FaultPlan(FailAt(listing, StoragePermissionError("you may not list"))))
    with pytest.raises(StoragePermissionError, match="may not list") as caught:
        ckptcore.delete(through(f"{run}/1"), context=failing)
    assert "Nothing was deleted: to find checkpoints that refer to" in str(caught.value.__notes__)
    assert ckptcore.load(f"{run}/1")["n"] == 1
