"""Runs whose steps have unknown names. A run continues with these names, or an error lists them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import InvalidLocationError, StorageError
from ckptcore.policies import LatestN
from ckptcore.step_names import StepNameFormat, StepNames
from tests.checkpointer.runs import Watch, assert_is_step, save_steps, store_of, through, tree, watched
from tests.checkpointer.test_jobs import SIZE, job


def save_as(directory: str, *names: str) -> None:
    """Save checkpoints under names with a number, as another program would."""
    for name in names:
        ckptcore.save(f"{directory}/{name}", tree(int(re.findall("[0-9]+", name)[-1])))


def names_in(directory: str) -> set[str]:
    return {name for name in store_of(directory).list_names() if not name.startswith(".")}


@pytest.mark.parametrize(
    ("names", "next_name"),
    [
        (["ppo_networks_50", "ppo_networks_100"], "ppo_networks_101"),
        (["model_00000050", "model_00000100"], "model_00000101"),
        (["run-a.50", "run-a.100"], "run-a.101"),
        (["Epoch9", "Epoch100"], "Epoch101"),
    ],
)
def test_a_run_continues_with_the_prefix_of_its_steps(directory: str, names: list[str], next_name: str) -> None:
    save_as(directory, *names)
    store_of(directory).put("logs_3/events", b"x")
    store_of(directory).put("notes", b"x")
    first = int(re.findall("[0-9]+", names[0])[-1])
    assert CheckpointReader(directory).steps == (first, 100)
    with Checkpointer(directory) as run:
        assert run.latest == 100
        assert_is_step(run.load(), 100)
        save_steps(run, [101])
        assert list(run.steps) == [first, 100, 101]
        run.reload()
        assert list(run.steps) == [first, 100, 101]
    assert f"{next_name}/" in names_in(directory)
    with Checkpointer(directory) as run:
        assert run.steps == (first, 100, 101)


def test_a_run_writes_the_names_that_the_caller_chooses(directory: str) -> None:
    save_as(directory, "ppo_1", "ppo_2")
    with Checkpointer(directory, step_names=StepNames.of("step_0000")) as run:
        assert list(run.steps) == [1, 2]
        save_steps(run, [3])
        run.reload()
        assert list(run.steps) == [1, 2, 3]
    assert "step_0003/" in names_in(directory)


def test_several_prefixes_are_an_error_with_the_possible_choices(directory: str) -> None:
    save_as(directory, "actor_09", "actor_10", "critic_2")
    for opens in (Checkpointer, CheckpointReader):
        with pytest.raises(InvalidLocationError, match=r"StepNames\.of\('actor_10'\) or StepNames\.of\('critic_2'\)"):
            opens(directory)
    with Checkpointer(directory, step_names=StepNames.of("actor_10")) as run:
        assert run.steps == (9, 10)
    with Checkpointer(directory, step_names=StepNames(read=())) as run:
        assert run.latest is None
        save_steps(run, [5])
    with Checkpointer(directory) as run:
        assert run.steps == (5,)


def test_other_names_are_ignored_if_a_step_has_a_known_name(directory: str) -> None:
    save_as(directory, "3", "export_500", "best_2")
    assert CheckpointReader(directory).steps == (3,)


def test_a_checkpoint_that_was_not_saved_as_a_step_is_never_deleted(directory: str) -> None:
    save_as(directory, "init_0")
    with Checkpointer(directory, preservation_policy=LatestN(1)) as run:
        assert run.latest == 0
        save_steps(run, [1, 2, 3])
    assert names_in(directory) == {"init_0/", "init_3/"}


@pytest.mark.parametrize("name", ["checkpoint_0.5", "checkpoint_-0.19632871448993683", "model_1e5", "loss=-3"])
def test_a_name_with_another_number_is_not_a_step(directory: str, name: str) -> None:
    ckptcore.save(f"{directory}/{name}", tree(1))
    with pytest.raises(InvalidLocationError, match=r"no whole number.*ckptcore\.load\(") as raised:
        CheckpointReader(directory)
    way = re.findall(r"ckptcore\.load\('(.*?)'\)", str(raised.value))
    assert_is_step(ckptcore.load(way[0]), 1)


@pytest.mark.brings("run of `ModelCheckpoint` or `BackupAndRestore`", "keras", "refused")
@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["model_01.keras", "model_02.keras"], "model_02.keras"),
        (["model.05.weights.h5"], "model.05.weights.h5"),
        (["01-2.38.keras", "02-2.36.keras"], "02-2.36.keras"),
        (["latest.weights.h5", "training_metadata.json"], "latest.weights.h5"),
        (["m.01.h5"], "m.01.h5"),
    ],
)
def test_files_of_keras_are_named(directory: str, names: list[str], named: str) -> None:
    for name in names:
        store_of(directory).put(name, b"\x89HDF\r\n\x1a\n")
    way = "to read such names as steps|its name has no whole number|no installed layout reads it"
    with pytest.raises(InvalidLocationError, match=f"checkpoint {re.escape(named)}: ({way})"):
        Checkpointer(directory)
    with Checkpointer(directory, step_names=StepNames(read=())) as run:
        save_steps(run, [1])
    assert CheckpointReader(directory).latest == 1


def test_the_remedy_for_numbered_safetensors_files_works(directory: str) -> None:
    ckptcore.save(f"{directory}-other", tree(7))
    (key,) = [key for key in store_of(f"{directory}-other").list("") if key.endswith(".safetensors")]
    data = store_of(f"{directory}-other").get(key)
    for step in (7, 12):
        store_of(directory).put(f"ckpt_{step}.safetensors", data)
    with pytest.raises(InvalidLocationError, match="ckpt_12") as raised:
        CheckpointReader(directory)
    (way,) = re.findall(r"step_names=(StepNames\(read=\[.*?\]\))", str(raised.value))
    reader = CheckpointReader(directory, step_names=eval(way))
    assert reader.steps == (7, 12)
    assert (reader.load(7)["w"] == 7).all()
    with Checkpointer(directory, step_names=StepNames(read=[StepNameFormat("ckpt_", None, ".safetensors")])) as run:
        save_steps(run, [13])
        assert run.steps == (7, 12, 13)


def test_a_checkpoint_of_other_software_is_not_a_run(directory: str) -> None:
    """Files of one checkpoint, such as shards, are not steps."""
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "rank_0.pt", "rank_1.pt"):
        store_of(directory).put(name, b"x")
    assert CheckpointReader(directory).latest is None


@pytest.mark.parametrize(
    "keys",
    [
        ["logs/events.out.tfevents.1.host.2.0"],
        ["version_0/hparams.yaml", "version_1/hparams.yaml"],
        ["config.json", "notes.txt", "data_1.npz", "tokenizer_2.json"],
        ["2024/photo.png", "run_3/log.txt"],
        ["wandb/run-20240101_1/files/config.yaml", "checkpoints.txt"],
        ["5.orbax-checkpoint-tmp-17/default/_METADATA", "ppo_6.orbax-checkpoint-tmp/default/_METADATA"],
    ],
)
def test_a_new_run_can_begin_in_a_directory_with_other_files(directory: str, keys: list[str]) -> None:
    for key in keys:
        store_of(directory).put(key, b"{}")
    with Checkpointer(directory) as run:
        assert run.latest is None
        save_steps(run, [1])
        assert run.steps == (1,)


def test_initial_weights_of_a_run_are_not_a_step(directory: str) -> None:
    ckptcore.save(f"{directory}-other", tree(7))
    (key,) = [key for key in store_of(f"{directory}-other").list("") if key.endswith(".safetensors")]
    store_of(directory).put("model.safetensors", store_of(f"{directory}-other").get(key))
    ckptcore.save(f"{directory}/init", tree(0))
    assert CheckpointReader(directory).latest is None


@pytest.mark.parametrize(
    "part",
    [
        "global_step_100/actor/model_world_size_2_rank_0.pt",
        "iter_0000100/mp_rank_00/model_optim_rng.pt",
        "epoch_100/model.h5",
    ],
)
def test_the_error_names_a_part_of_a_step(directory: str, part: str) -> None:
    store_of(directory).put(part, b"x")
    with pytest.raises(InvalidLocationError, match=f"has files of a checkpoint, such as {part}"):
        CheckpointReader(directory)


def test_a_reader_sees_a_run_that_begins_later(directory: str) -> None:
    reader = CheckpointReader(directory)
    assert reader.latest is None
    save_as(directory, "ppo_3")
    assert reader.wait_for_new_step(timeout=0) == 3
    save_as(directory, "ppo_4")
    assert reader.wait_for_new_step(timeout=0) == 4


def test_all_ranks_continue_under_the_same_names(directory: str) -> None:
    save_as(directory, "ppo_1", "ppo_2")

    def work(run: Checkpointer, rank: int) -> Any:
        assert run.latest == 2
        assert_is_step(run.load(), 2)
        save_steps(run, [3])
        return list(run.steps)

    steps, _ = job(directory, work)
    assert steps == [[1, 2, 3]] * len(steps)
    assert "ppo_3/" in names_in(directory)


def test_all_ranks_raise_the_error(directory: str) -> None:
    save_as(directory, "actor_1", "critic_1")
    with pytest.raises(ExceptionGroup) as raised:
        job(directory, lambda run, rank: None)
    assert len(raised.value.exceptions) == SIZE
    assert all("several kinds of names" in str(error) for error in raised.value.exceptions)


def test_opening_a_run_with_steps_takes_one_small_request(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, range(5))
    save_as(directory, "export_1", "export_2")
    watch = Watch()
    CheckpointReader(through(directory), context=watched(watch))
    assert watch.operations[0].name == "list_names" and len(watch.operations) == 2


def test_an_entry_that_cannot_be_read_does_not_hide_the_others(directory: str) -> None:
    save_as(directory, "ppo_1", "ppo_2", "closed_3")

    def deny(name: str, keys: Any) -> None:
        if any(key.startswith("closed_3") for key in keys):
            raise StorageError("permission denied")

    watch = Watch()
    watch.before = deny
    reader = CheckpointReader(through(directory), context=watched(watch))
    assert reader.steps == (1, 2)


@pytest.mark.parametrize("key", ["epoch=0-step=5.ckpt", "100/rank.metadata", "ppo_100/rank.metadata", "ckpt_3.pt"])
def test_the_error_names_steps_of_a_layout_that_is_not_installed(
    directory: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(directory).put(key, b"x")
    assert CheckpointReader(directory).latest is None
    monkeypatch.setattr("ckptcore.distributions.find_spec", lambda package: None)
    with pytest.raises(InvalidLocationError, match=rf"{re.escape(key)}.*pip install 'ckptcore\[dcp\]'"):
        CheckpointReader(directory)
