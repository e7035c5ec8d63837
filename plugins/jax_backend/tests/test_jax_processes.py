"""Which of several processes owns a box. Devices with the process numbers of other processes simulate a job."""

from dataclasses import dataclass

import pytest
from ckptcore_jax.shardings import placement_of, shards_of

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArraySpec, Box, Shard
from ckptcore.planning import uncovered


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"


@dataclass(frozen=True)
class Layout:
    """A sharding as one process sees it. Every `copies` devices hold one row of the first axis."""

    devices: tuple[Device, ...]
    process: int
    copies: int
    memory_kind: str | None = None

    @property
    def device_set(self):
        return set(self.devices)

    @property
    def addressable_devices(self):
        return {device for device in self.devices if device.process_index == self.process}

    def devices_indices_map(self, shape):
        return {
            device: (slice(number // self.copies, number // self.copies + 1), slice(None))
            for number, device in enumerate(self.devices)
        }


def seen_by(process: int, copies: int, order=range(8)) -> Layout:
    return Layout(tuple(Device(number, number // 2) for number in order), process, copies)


@pytest.mark.parametrize("order", [range(8), (0, 2, 4, 6, 1, 3, 5, 7), (7, 0, 1, 6, 5, 2, 3, 4)])
@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_every_box_has_one_owner_among_the_processes(copies, order):
    shape = (8 // copies, 3)
    owned, replicas = [], {}
    for process in range(4):
        for shard in shards_of(seen_by(process, copies, order), shape, process, 4):
            replicas.setdefault(shard.box, []).append((shard.replica, shard.replicas))
            if shard.replica == 0:
                owned.append(shard.box)
    assert uncovered(ArraySpec(shape, "int8"), owned) is None
    for numbers in replicas.values():
        assert sorted(numbers) == [(number, len(numbers)) for number in range(len(numbers))]


def test_a_placement_has_all_cuts_but_only_the_boxes_of_its_process():
    for process in range(4):
        placement = placement_of(seen_by(process, 1), (8, 3))
        assert placement.cuts == ((1, 2, 3, 4, 5, 6, 7), ())
        assert list(placement.boxes) == [Box((row, 0), (row + 1, 3)) for row in (2 * process, 2 * process + 1)]
        assert not placement.local
        assert placement.notes == {"sharding": {"type": "Layout", "devices": 8}}


def test_array_of_one_process_counts_as_replicated_on_all():
    here = Layout((Device(0, 2), Device(1, 2)), 2, 1)
    assert [(shard.box.start, shard.replica, shard.replicas) for shard in shards_of(here, (2, 3), 2, 4)] == [
        ((0, 0), 2, 4),
        ((1, 0), 2, 4),
    ]


@pytest.mark.parametrize("owners", [(0, 1), (1, 1)])
def test_a_process_without_devices_of_an_array_has_no_shards(owners):
    away = Layout((Device(0, owners[0]), Device(1, owners[1])), 2, 1)
    assert shards_of(away, (2, 3), 2, 4) is None


def test_replicas_are_counted_among_the_processes_with_the_array():
    """Only processes that hold a box are counted. Each gets its position among them, and their number."""
    for place, process in enumerate((1, 3)):
        sharding = Layout((Device(2, 1), Device(6, 3)), process, 2)
        assert shards_of(sharding, (1, 3), place, 2) == (Shard(Box((0, 0), (1, 3)), place, 2),)


@pytest.mark.parametrize(("copies", "replicas"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_replicas_are_counted_equally_on_each_process(copies, replicas):
    for process in range(5):  # the last process holds no box
        assert placement_of(seen_by(process, copies), (8 // copies, 3)).replicas == replicas


def test_array_of_one_process_has_equal_notes_on_all():
    assert {
        placement_of(Layout((Device(4, 2), Device(5, 2)), process, 1), (2, 3)).replicas for process in range(3)
    } == {None}


def test_boxes_with_unequal_numbers_of_holders_are_not_shared():
    uneven = Layout((Device(0, 0), Device(1, 0), Device(2, 1), Device(4, 2)), 0, 2)
    assert placement_of(uneven, (2, 3)).replicas == 1


def test_a_process_that_saves_alone_must_hold_every_box():
    with pytest.raises(UnsupportedLeafError, match="saves alone but has only 2 of 8 boxes"):
        shards_of(seen_by(1, 1), (8, 3), 0, 1)
    assert shards_of(seen_by(1, 8), (1, 3), 0, 1) == (Shard(Box((0, 0), (1, 3)), 0, 1),)
