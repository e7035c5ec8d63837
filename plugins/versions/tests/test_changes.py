"""Changes between versions of a chain, applied to a local copy of the older one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.arrays import assert_same_bits
from ckptcore_versions.changes import Changes
from ckptcore_versions.chunks import part_of
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.layout import DeltaLayout

import ckptcore
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Box, HostArray
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import open_checkpoint
from plugins.versions.tests.held import HeldState, version_at

CONTEXT = ckptcore.Context(durability="none")


def weights(number: int) -> dict[str, Any]:
    """Return weights: `w` changes in places, `frozen` never. `new` is new in version 2; `bias` gets another shape."""
    large = np.random.default_rng(0).standard_normal((800, 600)).astype(np.float32)
    for step in range(1, number + 1):
        large[step * 100 : step * 100 + 30, ::7] *= np.float32(1.0001)
    state: dict[str, Any] = {
        "w": large,
        "frozen": np.ones((200, 300), np.float32),
        "scalar": np.array(number, np.int32),
    }
    if number >= 2:
        state["new"] = np.arange(1000.0) + number
    return {**state, "bias": np.full(7 if number < 3 else 9, number, np.float32)}


def save_chain(directory: Path, count: int) -> None:
    ckptcore.save(directory / "v0", weights(0), context=CONTEXT)
    for number in range(1, count):
        held = HeldState(version_at(f"{directory}/v{number - 1}"), weights(number - 1))
        ckptcore.save(directory / f"v{number}", weights(number), layout=DeltaLayout().against(held), context=CONTEXT)


def opened(directory: Path, number: int) -> Checkpoint:
    return open_checkpoint(f"{directory}/v{number}", CONTEXT)


def changes(directory: Path, held: int, number: int) -> tuple[Changes, Checkpoint]:
    checkpoint = opened(directory, number)
    found = Changes.between(version_at(f"{directory}/v{held}"), checkpoint)
    assert found is not None
    return found, checkpoint


def leaf_of(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.tree.paths.index((name,))


@pytest.mark.parametrize(("held", "number"), [(0, 1), (1, 2), (0, 4), (2, 4), (3, 4)])
def test_applied_changes_give_the_later_version(held: int, number: int, tmp_path: Path) -> None:
    save_chain(tmp_path, number + 1)
    between, checkpoint = changes(tmp_path, held, number)
    old, new = weights(held), weights(number)
    targets: list[tuple[int, Box, HostArray]] = []
    for name in ("w", "frozen", "scalar"):
        elements = old[name].copy()
        targets.append((leaf_of(checkpoint, name), Box.whole(elements.shape), elements))
    between.apply(targets)
    for (leaf, _, elements), name in zip(targets, ("w", "frozen", "scalar"), strict=True):
        assert_same_bits(elements, new[name], f"{name} {leaf}")


def test_changed_boxes_contain_every_change_and_little_else(tmp_path: Path) -> None:
    save_chain(tmp_path, 3)
    between, checkpoint = changes(tmp_path, 0, 2)
    old, new = weights(0)["w"], weights(2)["w"]
    boxes = between.boxes(leaf_of(checkpoint, "w"), Box.whole(old.shape))
    patched = old.copy()
    for box in boxes:
        patched[box.slices] = new[box.slices]
    assert_same_bits(patched, new, "w")
    assert 0 < sum(box.size for box in boxes) < 0.3 * old.size
    assert between.boxes(leaf_of(checkpoint, "frozen"), Box.whole((200, 300))) == []
    part = Box((90, 10), (120, 600))
    assert all(part.contains(box) for box in between.boxes(leaf_of(checkpoint, "w"), part))


def test_arrays_that_the_held_version_lacks_are_listed_whole(tmp_path: Path) -> None:
    save_chain(tmp_path, 5)
    between, checkpoint = changes(tmp_path, 1, 4)
    assert between.deltas(leaf_of(checkpoint, "new")) is None
    assert between.boxes(leaf_of(checkpoint, "new"), Box((5,), (10,))) == [Box((5,), (10,))]
    assert between.deltas(leaf_of(checkpoint, "bias")) is None
    later, checkpoint = changes(tmp_path, 3, 4)
    deltas = later.deltas(leaf_of(checkpoint, "new"))
    assert deltas is not None
    assert len(deltas) == 1


@pytest.mark.parametrize("box", [Box((0, 0), (400, 600)), Box((0, 200), (800, 400)), Box((105, 3), (311, 597))])
def test_a_shard_reads_only_its_chunks(box: Box, tmp_path: Path) -> None:
    save_chain(tmp_path, 4)
    between, checkpoint = changes(tmp_path, 0, 3)
    shard = weights(0)["w"][box.slices].copy()
    leaf = leaf_of(checkpoint, "w")
    between.apply([(leaf, box, shard)])
    assert_same_bits(shard, weights(3)["w"][box.slices], str(box))


def test_strided_and_partial_targets_are_changed_in_place(tmp_path: Path) -> None:
    save_chain(tmp_path, 2)
    between, checkpoint = changes(tmp_path, 0, 1)
    memory = np.zeros((600, 800), np.float32)
    turned = memory.T  # not contiguous
    turned[...] = weights(0)["w"]
    halves = [Box((0, 0), (250, 600)), Box((250, 0), (800, 600))]
    leaf = leaf_of(checkpoint, "w")
    between.apply([(leaf, half, part_of(turned, half, Box.whole((800, 600)))) for half in halves])
    assert_same_bits(np.ascontiguousarray(turned), weights(1)["w"], "w")


def test_a_version_outside_of_the_chain_has_no_changes(tmp_path: Path) -> None:
    save_chain(tmp_path, 3)
    versions = [version_at(f"{tmp_path}/v{number}") for number in range(3)]
    checkpoint = opened(tmp_path, 1)
    assert Changes.between(versions[0], checkpoint) is not None
    for other in (
        versions[2],
        versions[1],
        versions[0]._replace(name="v7"),
        versions[0]._replace(save_id="0" * 16),
        versions[0]._replace(digest="0" * 64),
    ):
        assert Changes.between(other, checkpoint) is None
    assert Changes.between(versions[0], opened(tmp_path, 0)) is None  # a full version


def test_an_update_and_a_version_of_another_layout_have_no_changes(tmp_path: Path) -> None:
    save_chain(tmp_path, 2)
    update = ckptcore.Update(base=tmp_path / "v1")
    ckptcore.save(tmp_path / "update", {"scalar": np.array(1, np.int32)}, strategy=update, context=CONTEXT)
    checkpoint = open_checkpoint(tmp_path / "update", CONTEXT)
    assert Changes.between(version_at(f"{tmp_path}/v1"), checkpoint) is None


def test_another_copy_of_the_held_version_is_noticed(tmp_path: Path) -> None:
    save_chain(tmp_path, 2)
    between, checkpoint = changes(tmp_path, 0, 1)
    elements = weights(0)["w"]
    elements[110, 1] += 1
    with pytest.raises(CorruptCheckpointError, match="differ from those that were saved"):
        between.apply([(leaf_of(checkpoint, "w"), Box.whole(elements.shape), elements)])


def test_damaged_changes_are_noticed(tmp_path: Path) -> None:
    save_chain(tmp_path, 2)
    (file,) = (tmp_path / "v1").glob("deltas.*")
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    between, checkpoint = changes(tmp_path, 0, 1)
    targets = [
        (leaf_of(checkpoint, name), Box.whole(array.shape), array.copy())
        for name, array in weights(0).items()
        if between.deltas(leaf_of(checkpoint, name)) is not None
    ]
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        between.apply(targets)


def test_a_held_version_of_other_software_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "v0").mkdir()
    import safetensors.numpy

    safetensors.numpy.save_file(weights(0), tmp_path / "v0" / "model.safetensors")
    base = BaseVersion("v0", "", "", 0)
    layout = DeltaLayout().against(HeldState(base, weights(0)))
    ckptcore.save(tmp_path / "v1", weights(1), layout=layout, context=CONTEXT)
    between = Changes.between(base, opened(tmp_path, 1))
    assert between is not None
    elements = weights(0)["w"]
    between.apply([(leaf_of(opened(tmp_path, 1), "w"), Box.whole(elements.shape), elements)])
    assert_same_bits(elements, weights(1)["w"], "w")
