"""Loads of the newest step: they skip damaged steps, and no other steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    StorageError,
    TargetUndefinedError,
    TreeMismatchError,
    UnknownCheckpointableError,
    UnsupportedVersionError,
)
from ckptcore.policies import EpochInterval
from tests.checkpointer.runs import (
    ROOT,
    Watch,
    array_key,
    assert_is_step,
    cut,
    flip,
    remove,
    save_steps,
    store_of,
    through,
    tree,
    watched,
)


def damaged_root(directory: str, step: str) -> None:
    """Flip a bit in the root."""
    flip(directory, f"{step}/{ROOT}", 200)


def short_root(directory: str, step: str) -> None:
    """Truncate the root."""
    cut(directory, f"{step}/{ROOT}")


def empty_root(directory: str, step: str) -> None:
    """Empty the root."""
    store_of(directory).put(f"{step}/{ROOT}", b"")


def flipped_bit(directory: str, step: str) -> None:
    """Flip a bit in an array."""
    flip(directory, array_key(directory, step))


def short_file(directory: str, step: str) -> None:
    """Truncate the file with the arrays."""
    cut(directory, array_key(directory, step))


def missing_file(directory: str, step: str) -> None:
    """Delete the file with the arrays."""
    remove(directory, array_key(directory, step))


DAMAGES: Final[list[Callable[[str, str], None]]] = [
    damaged_root, short_root, empty_root, flipped_bit, short_file, missing_file,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_load_falls_back_from_a_damaged_step(directory: str, damage: Callable[[str, str], None]) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [10, 20, 30])
    damage(directory, "30")
    with Checkpointer(directory) as run:
        assert_is_step(run.load(abstract=None), 20)
        assert run.restored_step == 20
        (skipped,) = run.skipped_steps
        assert skipped.step == 30 and skipped.reason
        with pytest.raises(CorruptCheckpointError):
            run.load(30)
        assert_is_step(run.load(10), 10)
        assert run.restored_step == 10 and run.skipped_steps == ()
        # A step that was found damaged is replaced without `overwrite`.
        save_steps(run, [30])
        with pytest.raises(CheckpointExistsError):
            run.save(30, tree(31))
        assert_is_step(run.load(), 30)
        assert run.skipped_steps == ()
    with CheckpointReader(directory) as reader:
        assert_is_step(reader.load(), 30)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_load_falls_back_from_a_damaged_checkpointable(directory: str, damage: Callable[[str, str], None]) -> None:
    with Checkpointer(directory) as run:
        for step in (10, 20):
            run.save_checkpointables(step, {"model": tree(step), "rng": np.random.default_rng(step)})
        run.wait()
        damage(directory, "20/model")
        target = np.random.default_rng(3)
        loaded = run.load_checkpointables(abstract={"model": None}, into={"rng": target})
        assert_is_step(loaded["model"], 10)
        assert target.integers(1 << 40) == np.random.default_rng(10).integers(1 << 40)
        assert [skip.step for skip in run.skipped_steps] == [20]


def test_a_load_falls_back_from_a_damaged_root_of_several_checkpointables(directory: str) -> None:
    with Checkpointer(directory) as run:
        for step in (10, 20):
            run.save_checkpointables(step, {"model": tree(step)})
        run.wait()
        damaged_root(directory, "20")
        assert_is_step(run.load_checkpointables()["model"], 10)


def test_a_load_falls_back_from_damaged_files_of_an_object(directory: str) -> None:
    iterators = pytest.importorskip("grain")

    def iterator() -> Any:
        return iter(iterators.MapDataset.range(100).to_iter_dataset())

    data = iterator()
    with Checkpointer(directory) as run:
        for step in (1, 2):
            next(data)
            run.save_checkpointables(step, {"data": data, "model": tree(step)})
        run.wait()
        store = store_of(directory)
        (key,) = [key for key in store.list("2/data") if not key.startswith("2/data/checkpoint.")]
        flip(directory, key, 0)
        other = iterator()
        assert_is_step(run.load_checkpointables(abstract={"model": None}, into={"data": other})["model"], 1)
        assert next(other) == 1


def test_a_claim_is_ignored_without_a_warning(memory: str) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1])
        store_of(memory).put(f"2/{ROOT}", encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
        reader = CheckpointReader(memory)
        assert_is_step(reader.load(), 1)
        assert reader.skipped_steps == ()
        with pytest.raises(CheckpointNotFoundError):
            reader.load(2)


def test_the_error_lists_all_broken_steps(directory: str) -> None:
    with Checkpointer(directory) as run:
        with pytest.raises(CheckpointNotFoundError, match="no committed step"):
            run.load()
        save_steps(run, [1, 2, 3])
        for step in "123":
            flipped_bit(directory, step)
        with pytest.raises(CorruptCheckpointError) as caught:
            run.load()
        assert all(f"step {step}: " in str(caught.value) for step in (1, 2, 3))
        assert [skip.step for skip in run.skipped_steps] == [3, 2, 1]
        assert run.restored_step is None
        with pytest.raises(TargetUndefinedError, match="none of the steps"):
            run.load_into(target())


def test_a_mismatch_is_raised_without_a_fallback(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
        with pytest.raises(TreeMismatchError):
            run.load(abstract={"other": ckptcore.AbstractArray((3, 5), "float32")})
        with pytest.raises(CompositeCheckpointError):
            run.load_checkpointables(abstract=["model"])
        run.save_checkpointables(3, {"model": tree(3), "other": tree(4)})
        run.wait()
        with pytest.raises(UnknownCheckpointableError):
            run.load_checkpointables(abstract=["modle"])
        with pytest.raises(CompositeCheckpointError):
            run.load()
        assert run.skipped_steps == () and run.restored_step is None


def test_a_storage_error_is_not_treated_as_damage(directory: str) -> None:
    watch = Watch()
    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, [1, 2])

        def fail(name: str, keys: Any) -> None:
            if name == "get_into":
                raise StorageError("unplugged")

        watch.before = fail
        with pytest.raises(StorageError, match="unplugged"):
            run.load()
        watch.before = lambda name, keys: None
        assert_is_step(run.load(), 2)


def newer_version(directory: str, step: str) -> None:
    """Set a newer format version in a step."""
    store = store_of(directory)
    store.put(f"{step}/{ROOT}", sealed({**json.loads(store.get(f"{step}/{ROOT}")), "version": 99}))


def test_a_newer_format_version_is_not_treated_as_damage(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
    newer_version(directory, "2")
    with Checkpointer(directory) as run:
        with pytest.raises(UnsupportedVersionError, match="upgrade"):
            run.load()
        assert_is_step(run.load(1), 1)


def target() -> dict[str, Any]:
    """Return arrays for a load to fill."""
    return {"b": np.full(7, -1), "step": -1, "w": np.full((3, 5), -1, np.float32)}


def test_a_partly_filled_target_is_filled_completely_from_the_older_step(directory: str) -> None:
    big = {"a": np.arange(1 << 20), "z": np.arange(1 << 20)}
    into = {"a": np.zeros(1 << 20, np.int64), "z": np.zeros(1 << 20, np.int64)}
    with Checkpointer(directory) as run:
        run.save_blocking(1, big)
        run.save_blocking(2, {name: 2 * array for name, array in big.items()})
        flip(directory, array_key(directory, "2"), -1)
        with pytest.raises(TargetUndefinedError):
            run.load_into(into, step=2)
        filled = into["a"].any() or into["z"].any()
        assert filled, "otherwise this shows nothing"
        for array in into.values():
            array[:] = 0
        assert run.load_into(into) is into
        assert run.restored_step == 1
        for name, array in big.items():
            assert (into[name] == array).all()
        flip(directory, array_key(directory, "1"), -1)
        with pytest.raises(TargetUndefinedError, match="none of the steps"):
            run.load_into(into)


def test_a_changed_target_is_reported_with_any_later_error(directory: str) -> None:
    """The newer step fills a part of the target. The older step differs or is damaged, so it changes nothing."""
    into = {"a": np.zeros(1 << 20, np.int64), "z": np.zeros(1 << 20, np.int64)}
    with Checkpointer(directory) as run:
        run.save_blocking(1, {"other": np.zeros(3)})
        run.save_blocking(2, {"a": np.arange(1 << 20), "z": np.arange(1 << 20)})
        flip(directory, array_key(directory, "2"), -1)
        with pytest.raises(TargetUndefinedError, match="target was partly overwritten, and step 1 in") as caught:
            run.load_into(into)
        assert isinstance(caught.value.__cause__, TreeMismatchError)
        damaged_root(directory, "1")
        with pytest.raises(TargetUndefinedError, match="none of the steps"):
            run.load_into(into)


def test_the_run_continues_from_the_loaded_step(directory: str) -> None:
    """The epoch of the damaged step is saved again, and the loaded step is kept."""
    with Checkpointer(directory) as run:
        for step, epoch in [(10, 1), (20, 2), (30, 3)]:
            run.save(step, tree(step), epoch=epoch)
    flipped_bit(directory, "30")
    with Checkpointer(directory, save_policy=EpochInterval(1)) as run:
        assert not run.should_save(30, epoch=3)
        run.load()
        assert run.should_save(30, epoch=3)
        assert not run.should_save(21, epoch=2)
        assert run.save(30, tree(30), epoch=3) is not None
        assert not run.should_save(31, epoch=3)
        run.wait()
        run.delete(30)
        assert run.should_save(29, epoch=3)


def test_a_reader_finds_newer_steps(directory: str) -> None:
    with Checkpointer(directory) as run:
        reader = CheckpointReader(directory)
        with pytest.raises(CheckpointNotFoundError):
            reader.load()
        save_steps(run, [1])
        assert_is_step(reader.load(), 1)
        save_steps(run, [2])
        run.delete(1)
        run.wait()
        assert_is_step(reader.load(), 2)
        assert reader.skipped_steps == () and reader.restored_step == 2


def test_a_step_with_a_missing_checkpointable_is_skipped(directory: str) -> None:
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {"model": {"w": step}, "optimizer": {"m": step}})
            checkpointer.wait()
    ckptcore.delete(f"{directory}/2/optimizer")
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.load_checkpointables() == {"model": {"w": 1}, "optimizer": {"m": 1}}
        assert checkpointer.restored_step == 1
        (skipped,) = checkpointer.skipped_steps
        assert skipped.step == 2 and "optimizer" in skipped.reason
        assert checkpointer.load_checkpointables(abstract=["model"]) == {"model": {"w": 2}}
        assert checkpointer.load_checkpointables(2) == {"model": {"w": 2}}
