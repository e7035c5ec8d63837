"""Listings of a run: how often it lists its directory, and which entries are steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import CorruptCheckpointError
from tests.checkpointer.runs import ROOT, Watch, remove, save_steps, store_of, through, tree, watched


def root_of_a_step(directory: str) -> bytes:
    """Return the root of a step, to be stored under many names."""
    ckptcore.save(f"{directory}-one/1", tree(1))
    return store_of(f"{directory}-one").get(f"1/{ROOT}")


def test_opening_a_run_with_many_steps_lists_once(directory: str) -> None:
    data = root_of_a_step(directory)
    store = store_of(directory)
    for step in range(200):
        store.put(f"{step}/{ROOT}", data)
    watch = Watch()
    context = watched(watch)
    reader = CheckpointReader(through(directory), context=context)
    assert watch.count("list_names") == 1 and len(watch.operations) == 2, "one small request: is the newest one a step?"
    for _ in range(3):
        assert reader.latest == 199
    assert len(watch.operations) == 2, "it is remembered"
    assert len(reader.steps) == 200
    assert watch.count("list_names") == 1
    assert len(watch.operations) <= 201
    assert len(reader.steps) == 200
    assert len(watch.operations) <= 201
    before = len(watch.operations)
    reader.reload()
    assert (reader.latest, len(reader.steps)) == (199, 200)
    assert len(watch.operations) == before + 1, "a listing says that they are still there"


def test_opening_to_write_lists_the_steps_once(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, range(5))
    watch = Watch()
    with Checkpointer(through(directory), context=watched(watch)) as run:
        assert run.latest == 4
        run.wait()
        top = [
            operation for operation in watch.operations if operation.name == "list_names" and operation.keys == ("",)
        ]
        assert len(top) == 1
        before = len(watch.operations)
        run.save_blocking(5, tree(5))
        assert (run.latest, run.steps) == (5, (0, 1, 2, 3, 4, 5))
        listed = [operation.keys for operation in watch.operations[before:] if operation.name == "list_names"]
        # A save lists the remains of failed saves at its own location, but does not read other steps.
        assert listed.count(("",)) <= 1


def test_a_load_does_not_list_the_steps(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, range(5))
    watch = Watch()
    reader = CheckpointReader(through(directory), context=watched(watch))
    before = len(watch.operations)
    reader.load(2)
    assert _listings(watch, before) == 0
    reader.load()  # lists, because another job may have saved a step
    assert _listings(watch, before) == 1


def test_the_owner_of_a_directory_loads_without_listing_it(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, range(5))
    watch = Watch()
    with Checkpointer(through(directory), context=watched(watch)) as run:
        before = len(watch.operations)
        run.load()
        assert _listings(watch, before) == 0


def _listings(watch: Watch, since: int) -> int:
    return sum(operation.name == "list_names" and operation.keys == ("",) for operation in watch.operations[since:])


def test_an_uncommitted_claim_is_not_a_step(memory: str) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1])
    store_of(memory).put(f"2/{ROOT}", encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    reader = CheckpointReader(memory)
    assert (reader.latest, reader.steps) == (1, (1,))
    assert reader.load()["step"] == 1


def test_a_reader_uses_its_list_of_steps_until_it_lists_again(directory: str) -> None:
    with Checkpointer(directory) as run:
        reader = CheckpointReader(directory)
        assert reader.latest is None
        save_steps(run, [1, 2])
        assert reader.latest is None
        reader.reload()
        assert list(reader.steps) == [1, 2]
        run.delete(1)
        run.wait()
        assert list(reader.steps) == [1, 2]
        reader.reload()
        assert list(reader.steps) == [2]


def test_a_listing_does_not_undo_concurrent_changes_of_this_process(directory: str) -> None:
    watch = Watch()
    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, [1, 2])
        changed: list[Sequence[str]] = []

        def change(name: str, keys: Sequence[str]) -> None:
            if name == "list_names" and tuple(keys) == ("",) and not changed:
                changed.append(keys)
                run.save_blocking(3, tree(3))
                run.delete(1)
                run.wait()

        watch.after = change
        run.reload()
        assert list(run.steps) == [2, 3] and run.latest == 3
        assert changed
        run.reload()
        assert list(run.steps) == [2, 3]


def test_a_step_that_lost_its_root_is_listed_and_not_loaded(local: str) -> None:
    """Without the root, structure, values and checksums are lost. The run resumes from the previous step."""
    with Checkpointer(local) as run:
        save_steps(run, [1, 2])
        remove(local, f"2/{ROOT}")
    with Checkpointer(local) as run:
        assert list(run.steps) == [1, 2]
        assert (run.load()["w"] == 1).all()
        with pytest.raises(CorruptCheckpointError, match="checkpoint.json is missing"):
            run.load(2)
