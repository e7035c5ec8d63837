"""A power loss at each step of a save to a simulated disk. The disk keeps synced data, and any part of other data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import pytest
from ckptcore_orbax import OcdbtLayout
from ckptcore_testing.faults import SimulatedCrash
from ckptcore_testing.locations import SCHEME, simulated_context
from ckptcore_testing.simulated_disk import SimulatedDisk

import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import CheckpointError
from ckptcore.runtime import runtime_of
from tests.crashes.states import make_composite, make_state, version_at

_OLD, _NEW, _NEXT = 1, 2, 3
_LOCATION: Final = f"{SCHEME}://runs/a/step_1"

Task = Callable[[ckptcore.Context], None]


def _save(context: ckptcore.Context) -> None:
    ckptcore.save(_LOCATION, make_state(_NEW), context=context)


def _overwrite(context: ckptcore.Context) -> None:
    ckptcore.save(_LOCATION, make_state(_NEW), overwrite=True, context=context)


def _overwrite_beside_others(context: ckptcore.Context) -> None:
    ckptcore.save(_LOCATION, make_state(_NEW), overwrite="keep-other-files", context=context)


def _overwrite_several_files(context: ckptcore.Context) -> None:
    layout = SafetensorsLayout(max_file_bytes=200)
    ckptcore.save(_LOCATION, make_state(_NEW), layout=layout, overwrite=True, context=context)


def _overwrite_by_database(context: ckptcore.Context) -> None:
    ckptcore.save(_LOCATION, make_state(_NEW), layout=OcdbtLayout(), overwrite=True, context=context)


def _overwrite_by_compressed_database(context: ckptcore.Context) -> None:
    layout = OcdbtLayout(compression="zstd", data_file_bytes=1000)
    ckptcore.save(_LOCATION, make_state(_NEW), layout=layout, overwrite=True, context=context)


def _overwrite_in_background(context: ckptcore.Context) -> None:
    ckptcore.save_async(_LOCATION, make_state(_NEW), overwrite=True, context=context).result()


def _save_composite(context: ckptcore.Context) -> None:
    ckptcore.save_checkpointables(_LOCATION, make_composite(_NEW), context=context)


def _overwrite_by_composite(context: ckptcore.Context) -> None:
    ckptcore.save_checkpointables(_LOCATION, make_composite(_NEW), overwrite=True, context=context)


def _delete(context: ckptcore.Context) -> None:
    ckptcore.delete(_LOCATION, context=context)


_TASKS: Final[dict[str, tuple[Task, bool, set[int | None]]]] = {
    # name: (task, True if there is an old checkpoint, versions that may exist afterwards)
    "save": (_save, False, {None, _NEW}),
    "overwrite": (_overwrite, True, {_OLD, _NEW}),
    "overwrite beside other files": (_overwrite_beside_others, True, {_OLD, _NEW}),
    "overwrite with several files": (_overwrite_several_files, True, {_OLD, _NEW}),
    "overwrite by a database": (_overwrite_by_database, True, {_OLD, _NEW}),
    "overwrite by a compressed database": (_overwrite_by_compressed_database, True, {_OLD, _NEW}),
    "overwrite in the background": (_overwrite_in_background, True, {_OLD, _NEW}),
    "save a composite": (_save_composite, False, {None, _NEW}),
    "overwrite by a composite": (_overwrite_by_composite, True, {_OLD, _NEW}),
    "delete": (_delete, True, {_OLD, None}),
}


def _disk(old: bool, crash_at: int | None = None) -> SimulatedDisk:
    disk = SimulatedDisk(crash_at=crash_at)
    if old:
        ckptcore.save(_LOCATION, make_state(_OLD), context=simulated_context(disk))
    return disk


def _version_on(disk: SimulatedDisk) -> int | None:
    return version_at(_LOCATION, context=simulated_context(disk))


def _assert_next_save_cleans_up(disk: SimulatedDisk) -> None:
    context = simulated_context(disk)
    ckptcore.save(_LOCATION, make_state(_NEXT), overwrite=True, context=context)
    assert _version_on(disk) == _NEXT
    storage = runtime_of(context).registry.storage(SCHEME)(f"{SCHEME}://runs/a", ckptcore.protocols.StorageOptions())
    assert list(storage.list()) == ["step_1/checkpoint.json", "step_1/model.safetensors"]


def _lose_power_at_each_step(name: str, survivors: int) -> None:
    """Lose power at each step of a task, and check the disks that may result.

    These disks keep nothing, everything or only the names of unsynced data, and `survivors` of them keep a random part.
    """
    task, old, allowed = _TASKS[name]
    chance = random.Random(0)
    whole = _disk(old)
    before = len(whole.steps)
    task(simulated_context(whole))
    assert len(whole.steps) - before > 5
    done = None if name == "delete" else _NEW
    for survivor in whole.after_power_loss(chance, survivors):
        assert _version_on(survivor) == done, "what returned is not durable"
    versions = set()
    for crash_at in range(before + 1, len(whole.steps)):
        disk = _disk(old, crash_at)
        with pytest.raises(SimulatedCrash):
            task(simulated_context(disk))
        for survivor in disk.after_power_loss(chance, survivors):
            where = f"before step {crash_at}: {whole.steps[crash_at]}"
            version = _version_on(survivor)
            assert version in allowed, where
            versions.add(version)
            _assert_next_save_cleans_up(survivor)
    assert versions == allowed


@pytest.mark.parametrize("name", [name for name in _TASKS if "database" not in name])
def test_a_power_loss_at_each_step_keeps_a_valid_state(name: str) -> None:
    _lose_power_at_each_step(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", _TASKS)
def test_a_power_loss_with_partial_writes_keeps_a_valid_state(name: str, full: bool) -> None:
    _lose_power_at_each_step(name, 8 if full else 2)


def test_a_loss_without_durability_is_detected() -> None:
    """Without durability a power loss can destroy the checkpoint. This shows that the tests above detect losses."""
    chance = random.Random(0)
    disk = _disk(old=True)
    ckptcore.save(_LOCATION, make_state(_NEW), overwrite=True, context=simulated_context(disk, "none"))
    lost = 0
    for survivor in disk.after_power_loss(chance, 30):
        try:
            lost += _version_on(survivor) not in (_OLD, _NEW)
        except (CheckpointError, KeyError):  # without its root, the checkpoint looks like one of other software
            lost += 1
    assert lost
