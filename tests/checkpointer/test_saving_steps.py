"""Steps that a Checkpointer saves: when it saves, and under which names."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidLocationError,
    UnknownPluginError,
    UnsupportedLeafError,
)
from ckptcore.policies import (
    AnySave,
    ContinuousCheckpointing,
    CustomSave,
    EpochInterval,
    FixedInterval,
    InitialSave,
    LatestN,
    SaveContext,
    SavePolicy,
    SpecificSteps,
    TimeInterval,
)
from ckptcore.step_names import StepNameFormat, StepNames
from tests.checkpointer.runs import (
    ROOT,
    Gate,
    Watch,
    assert_is_step,
    keys_of,
    save_steps,
    store_of,
    through,
    tree,
    watched,
)


def test_a_tree_is_restored(directory: str) -> None:
    with Checkpointer(directory) as run:
        assert run.latest is None and list(run.steps) == []
        handle = run.save(3, tree(3))
        assert handle is not None
        handle.result()
        assert run.latest == 3 and list(run.steps) == [3]
        assert_is_step(run.load(), 3)
        assert run.restored_step == 3 and run.skipped_steps == ()
        assert run.save_blocking(4, tree(4)) is True
        assert run.latest == 4
    assert ckptcore.load(f"{directory}/4")["step"] == 4, "a step is an ordinary checkpoint"
    with CheckpointReader(directory) as reader:
        assert list(reader.steps) == [3, 4]
        assert_is_step(reader.load(3), 3)
        assert reader.restored_step == 3


def test_several_objects_are_restored(directory: str) -> None:
    generator = np.random.default_rng(1)
    with Checkpointer(directory) as run:
        handle = run.save_checkpointables(7, {"model": tree(7), "rng": generator})
        assert handle is not None
        expected = generator.integers(1000, size=4)  # the generator may advance after the call
        run.wait()
        other = np.random.default_rng(2)
        loaded = run.load_checkpointables(abstract={"model": None}, into={"rng": other})
        assert_is_step(loaded["model"], 7)
        assert loaded["rng"] is other
        assert (other.integers(1000, size=4) == expected).all()
        assert list(run.load_checkpointables(7, ["model"])) == ["model"]
        with pytest.raises(InvalidLocationError):
            run.save_checkpointables(8, {"": tree(8)})
        assert list(run.steps) == [7]


def test_metadata_of_a_step_is_stored(directory: str) -> None:
    with Checkpointer(directory, metadata={"run": "a", "tags": [1, None]}) as run:
        before = time.time()
        run.save(
            1,
            tree(1),
            metrics={"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "loss": float(np.float32(0.5))},
            metadata={"note": "first"},
            epoch=2,
        )
        run.wait()
        info = run.step_info(1)
        assert info.step == 1
        assert abs(info.created - before) < 3600
        assert math.isnan(info.metrics["nan"])
        assert (info.metrics["inf"], info.metrics["-inf"], info.metrics["loss"]) == (math.inf, -math.inf, 0.5)
        assert run.metadata(1).custom == {"note": "first"}
        assert run.root_metadata == {"run": "a", "tags": [1, None]}
    with Checkpointer(directory) as run:
        assert run.root_metadata == {"run": "a", "tags": [1, None]}, "None keeps the stored metadata"
        assert run.step_info(1).metrics["loss"] == 0.5
    with Checkpointer(directory, metadata={}):
        assert CheckpointReader(directory).root_metadata == {}


@pytest.mark.parametrize("number", [2**1024, -(10**5000)], ids=["large", "larger"])
def test_numbers_that_cannot_be_stored_are_refused_by_name(directory: str, number: int) -> None:
    with Checkpointer(directory) as run:
        with pytest.raises(ValueError, match=r"metrics={'loss': ...}: no float is as large. Nothing was written"):
            run.save(1, tree(1), metrics={"loss": number})
        with pytest.raises(ValueError, match=r"epoch= must fit into 64 bits.*Nothing was written"):
            run.save(1, tree(1), epoch=number)
        with pytest.raises(
            ValueError, match=r"step= must fit into 64 bits.*from 0 to 2\*\*63 - 1. Nothing was written"
        ):
            run.save(number, tree(1))
        assert list(run.steps) == []


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**5000], ids=["large", "small", "larger"])
def test_steps_that_do_not_fit_into_64_bits_are_refused_by_name(directory: str, number: int) -> None:
    with Checkpointer(directory) as run:
        run.save_blocking(1, tree(1))
        for call in (run.metadata, run.step_info, run.delete, run.load):
            with pytest.raises(ValueError, match=r"step= must fit into 64 bits.*; a step is a whole number from 0"):
                call(number)
            with pytest.raises(CheckpointNotFoundError, match="-9223372036854775808"):
                call(-(2**63))


def test_the_smallest_epoch_is_stored_and_the_next_refused(directory: str) -> None:
    with Checkpointer(directory) as run:
        run.save_blocking(1, tree(1), epoch=-(2**63))
        assert json.loads(store_of(directory).get(f"1/{ROOT}"))["progress"]["epoch"] == -(2**63)
        assert run.load(1)
        with pytest.raises(ValueError, match="epoch= must fit into 64 bits"):
            run.save(2, tree(2), epoch=-(2**63) - 1)


@pytest.mark.parametrize("metadata", [{"x": math.nan}, {"x": object()}, {1: 2}, {"x": {1: 2}}])
def test_metadata_of_a_directory_must_be_json(directory: str, metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata= must be JSON"):
        Checkpointer(directory, metadata=metadata)
    Checkpointer(directory).close()  # the directory was released


def test_damaged_metadata_of_a_directory_can_be_written_again(directory: str) -> None:
    Checkpointer(directory, metadata={"a": 1}).close()
    store_of(directory).put(".ckptcore/metadata.json", b"[]")
    with pytest.raises(ckptcore.CheckpointError, match="write it again"):
        print(CheckpointReader(directory).root_metadata)
    with Checkpointer(directory, metadata={"a": 2}) as run:
        assert run.root_metadata == {"a": 2}


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6]),
        (FixedInterval(3), [0, 3, 6]),
        (SpecificSteps([2, 5]), [2, 5]),
        (InitialSave(), [0]),
        (AnySave([FixedInterval(4), SpecificSteps([5])]), [0, 4, 5]),
        (EpochInterval(2), [0, 4]),
        (TimeInterval(10_000), [0]),
        (ContinuousCheckpointing(10_000), [0]),
        (CustomSave(lambda context: context.step == 1 or context.last_step == 1), [1, 2]),
    ],
)
def test_the_policy_decides_which_steps_are_saved(directory: str, policy: SavePolicy | None, saved: list[int]) -> None:
    with Checkpointer(directory, save_policy=policy) as run:
        for step in range(7):
            wanted = run.should_save(step, epoch=step // 2)
            assert wanted is run.should_save(step, epoch=step // 2), "asking changes nothing"
            handle = run.save(step, tree(step), epoch=step // 2)
            assert (handle is not None) is wanted
            run.wait()
        assert list(run.steps) == saved
        assert run.save_blocking(101, tree(101), epoch=99) is (policy is None)


def test_force_saves_regardless_of_the_policy(directory: str) -> None:
    def refuse(context: SaveContext) -> bool:
        raise AssertionError("it is not asked")

    with Checkpointer(directory, save_policy=CustomSave(refuse)) as run:
        assert run.save(1, tree(1), force=True) is not None
        assert run.save_checkpointables(2, {"a": tree(2)}, force=True) is not None
        assert run.save_blocking(3, tree(3), force=True)
        run.wait()
        assert list(run.steps) == [1, 2, 3]


def test_an_epoch_that_was_saved_is_not_saved_again_after_a_resume(directory: str) -> None:
    with Checkpointer(directory, save_policy=EpochInterval(1)) as run:
        assert run.save(5, tree(5), epoch=1) is not None
        assert run.save(6, tree(6), epoch=1) is None
    with Checkpointer(directory, save_policy=EpochInterval(1)) as run:
        assert run.save(6, tree(6), epoch=1) is None
        assert run.save(7, tree(7), epoch=2) is not None
        with pytest.raises(ValueError, match="has no epoch"):
            run.save(8, tree(8))


def test_the_time_of_the_last_save_is_taken_from_an_earlier_run(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1])
    with Checkpointer(directory, save_policy=TimeInterval(10_000)) as run:
        assert not run.should_save(2)
    with Checkpointer(directory, save_policy=InitialSave()) as run:
        assert not run.should_save(2)


def test_a_save_that_cannot_start_is_not_counted_by_policies(directory: str) -> None:
    with Checkpointer(directory, save_policy=EpochInterval(1)) as run:
        with pytest.raises(UnsupportedLeafError):
            run.save(1, {"x": object()}, epoch=0)
        assert run.should_save(1, epoch=0)
        with pytest.raises(UnsupportedLeafError):
            run.save_blocking(1, {"x": object()}, epoch=0)
        assert run.save(1, tree(1), epoch=0) is not None
        assert run.save(2, tree(2), epoch=0) is None


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 2**63, None])
def test_a_step_is_an_integer(directory: str, step: Any) -> None:
    with Checkpointer(directory) as run:
        for call in (
            lambda: run.save(step, tree(1)),
            lambda: run.save_blocking(step, tree(1)),
            lambda: run.should_save(step),
        ):
            with pytest.raises((TypeError, ValueError), match="step"):
                call()
        assert run.latest is None


def test_an_existing_step_is_replaced_only_on_request(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1])
        for _ in range(2):
            with pytest.raises(CheckpointExistsError, match=r"already has step 1 .*overwrite=True"):
                run.save(1, tree(2))
            with pytest.raises(CheckpointExistsError):
                run.save_blocking(1, tree(2))
        assert_is_step(run.load(1), 1)
        if "://" in directory:
            handle = run.save(1, tree(2), overwrite=True)
            assert handle is not None
            with pytest.raises(AtomicityError, match="non-atomic"):
                handle.result()
            assert_is_step(run.load(1), 1)
        run.save_blocking(1, tree(5), overwrite="non-atomic" if "://" in directory else True)
        assert_is_step(run.load(1), 5)
        assert list(run.steps) == [1]
        with pytest.raises(ValueError, match="overwrite"):
            run.save(1, tree(2), overwrite="perhaps")  # type: ignore[arg-type]


def test_a_step_is_found_under_any_of_its_names(directory: str) -> None:
    with Checkpointer(directory, step_names=StepNames.of("step_00000010")) as run:
        save_steps(run, [10])
        assert f"step_00000010/{'checkpoint.json'}" in keys_of(directory)
    with Checkpointer(directory) as run:
        assert list(run.steps) == [10]
        with pytest.raises(CheckpointExistsError, match="already has step 10 .step_00000010"):
            run.save(10, tree(11))
        save_steps(run, [20])
        assert list(run.steps) == [10, 20]
        run.save_blocking(10, tree(12), overwrite="non-atomic")
        assert_is_step(run.load(10), 12)
        assert not any(key.startswith("10/") for key in keys_of(directory)), "it is replaced where it is"
    with Checkpointer(directory, step_names=StepNames(write=StepNameFormat("ck-"), read=())) as run:
        assert list(run.steps) == []
        save_steps(run, [10])
        assert_is_step(run.load(), 10)


def test_steps_of_other_software_are_found(local: str) -> None:
    numpy_safetensors = pytest.importorskip("safetensors.numpy")
    for step in (7, 9):
        path = Path(local) / f"step_{step}"
        path.mkdir(parents=True)
        numpy_safetensors.save_file({"w": np.full(3, step, np.float32)}, path / "model.safetensors")
    (Path(local) / "step_8").mkdir()
    (Path(local) / "step_8" / "notes.txt").write_text("no checkpoint")
    (Path(local) / "11").write_text("a file")
    with Checkpointer(local, preservation_policy=LatestN(1)) as run:
        assert list(run.steps) == [7, 9] and run.latest == 9
        assert (run.load()["w"] == 9).all()
        assert (run.load(7)["w"] == 7).all()
        assert math.isnan(run.step_info(7).created)
        save_steps(run, [10, 12, 13])
        assert list(run.steps) == [7, 9, 13], "what others wrote is not deleted, and counts for nothing"
        with pytest.raises(CheckpointExistsError):
            run.save(7, tree(7))
        with pytest.raises(CheckpointExistsError):
            run.save(7, tree(7), overwrite=True)
        with pytest.raises(ckptcore.CheckpointError, match="not written by ckptcore"):
            run.delete(7)
        save_steps(run, [8])
        assert_is_step(run.load(8), 8)
    assert (Path(local) / "step_7" / "model.safetensors").exists()
    assert (Path(local) / "step_8" / "notes.txt").exists()


def test_saves_run_during_the_training_loop(directory: str) -> None:
    watch = Watch()
    gate = Gate(watch)
    with Checkpointer(through(directory), context=watched(watch)) as run:
        state = tree(1)
        handle = run.save(1, state)
        state["w"][:] = 99  # the save owns its memory
        assert handle is not None and gate.arrived.wait(60)
        assert not handle.done() and run.latest is None
        gate.open()
        handle.result()
        assert_is_step(run.load(), 1)


def test_invalid_arguments_are_refused(directory: str) -> None:
    with pytest.raises(ValueError, match="when_busy='never'"):
        Checkpointer(directory, when_busy="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="if_in_use='kill'"):
        Checkpointer(directory, if_in_use="kill")  # type: ignore[arg-type]
    with pytest.raises(UnknownPluginError):
        Checkpointer("nothing://x")
