"""Remedies in the errors of copies, exports, plans and commands. Each test follows an error, and checks the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.cases import refused
from ckptcore_tools.copies.copying import copy_checkpoint
from ckptcore_tools.dry_run import WriteForecast
from ckptcore_tools.exports import Export, WithExports
from ckptcore_tools.policy_text import format_preservation, parse_preservation

import ckptcore
from ckptcore import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    PluginError,
    SaveLostError,
    TreeMismatchError,
)
from ckptcore.events import Event
from ckptcore.model import JSON
from ckptcore.policies import AnyPreservation, CustomPreservation, LatestN
from ckptcore.protocols import Snapshot, WriteStore
from ckptcore.step_names import StepNames
from plugins.tools.tests.cli.conftest import Run, run  # noqa: F401  # imported as a fixture

VALUES = np.arange(1 << 16, dtype=np.float64)
STATE = {"model": {"w": VALUES, "b": np.ones(3)}, "step": 7}


def saved(location: Path, state: Any = STATE, **options: Any) -> Path:
    """Save a tree, and return its location."""
    ckptcore.save(location, state, **options)
    return location


def assert_saved(location: Path | str) -> None:
    """Check that a checkpoint has the state."""
    loaded = ckptcore.load(location)
    assert np.array_equal(loaded["model"]["w"], VALUES)
    assert loaded["step"] == 7


def damage(directory: Path) -> None:
    """Change a byte of the largest file."""
    file = max(directory.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# --- copies -----------------------------------------------------------------------------------------------------------


def update(directory: Path) -> Path:
    """Save an update with an array in its base."""
    base = saved(directory / "base")
    return saved(directory / "a", {"new": VALUES + 1}, strategy=ckptcore.Update(base=base))


@pytest.mark.parametrize("make", [lambda directory: saved(directory / "a"), update], ids=["complete", "update"])
def test_a_committed_copy_that_is_damaged(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Without `overwrite`, the next copy would consider the damaged copy complete."""
    source = make(tmp_path)
    ckptcore.copy(source, tmp_path / "b")
    damage(tmp_path / "b")
    copy = partial(ckptcore.copy, source, tmp_path / "b", verify="read-back")
    refused(copy, "Copy again with overwrite=True", error=CorruptCheckpointError)
    refused(copy, "Copy again with overwrite=True", error=CorruptCheckpointError)
    copy(overwrite=True)
    copy()
    assert_saved(tmp_path / "b")


def test_a_copy_that_is_damaged_before_its_commit(tmp_path: Path) -> None:
    def damage_copy(done: int, total: int) -> None:
        if done:
            for hidden in tmp_path.glob(".b.*"):
                damage(hidden)

    copy = partial(ckptcore.copy, saved(tmp_path / "a"), tmp_path / "b", verify="read-back")
    text = refused(
        lambda: copy(progress=damage_copy), "differs from the source in 1 of 1", error=CorruptCheckpointError
    )
    assert text.endswith(". Copy again")
    copy()
    assert_saved(tmp_path / "b")


def test_a_copy_that_is_deleted_right_after_its_commit(tmp_path: Path) -> None:
    def delete(event: Event) -> None:
        if event.phase == "commit":
            ckptcore.delete(tmp_path / "b")

    source = update(tmp_path)
    refused(
        lambda: ckptcore.copy(source, tmp_path / "b", context=Context(observers=[delete])),
        "was replaced or deleted right after the copy. Copy again",
        error=SaveLostError,
    )
    ckptcore.copy(source, tmp_path / "b")
    assert_saved(tmp_path / "b")


def test_a_copy_that_was_stopped_resumes(tmp_path: Path) -> None:
    source, done = saved(tmp_path / "a", {**STATE, "x": np.zeros(1 << 22)}), []
    refused(
        lambda: copy_checkpoint(
            source,
            tmp_path / "b",
            Context(),
            progress=lambda nbytes, total: done.append(nbytes),
            is_stopped=lambda: any(done),
        ),
        "Copy again to resume it",
        error=CancelledError,
    )
    ckptcore.copy(source, tmp_path / "b")
    assert_saved(tmp_path / "b")


def test_values_of_verify(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    text = refused(
        lambda: ckptcore.copy(source, tmp_path / "b", verify="yes"),  # type: ignore[call-overload]
        "verify='yes': expected one of ",
        error=ValueError,
    )
    for number, choice in enumerate(eval(f"({text.rpartition('expected one of ')[2]})")):
        ckptcore.copy(source, tmp_path / str(number), verify=choice)
        assert_saved(tmp_path / str(number))


@pytest.mark.parametrize(
    ("wrong", "text", "right"),
    [
        ({"tied": "once"}, "pass subtree='model', or subtree=() for everything", {"tied": "once", "subtree": "model"}),
        ({"tied": "once"}, "pass subtree='model', or subtree=() for everything", {"tied": "once", "subtree": ()}),
        ({"subtree": "model", "layout": "dcp"}, "Pass 'safetensors' or", {"subtree": "model", "layout": "safetensors"}),
        (
            {"subtree": "model", "layout": ckptcore.SafetensorsLayout(max_file_bytes=0)},
            "SafetensorsLayout whose max_file_bytes is at least 1",
            {"subtree": "model", "layout": ckptcore.SafetensorsLayout(max_file_bytes=1)},
        ),
        ({"subtree": "model", "layout": "dcp"}, "or omit the subtree", {"layout": "dcp"}),
        ({"subtree": "model", "verify": "read-back"}, "omit layout and subtree", {"verify": "read-back"}),
    ],
)
def test_options_that_exclude_each_other(
    tmp_path: Path, wrong: dict[str, Any], text: str, right: dict[str, Any]
) -> None:
    copy: Any = partial(ckptcore.copy, saved(tmp_path / "a"), tmp_path / "b")
    refused(lambda: copy(**wrong), text, error=ValueError)
    copy(**right)
    loaded = ckptcore.load(tmp_path / "b")
    assert np.array_equal(loaded["w"] if right.get("subtree") == "model" else loaded["model"]["w"], VALUES)


@pytest.mark.parametrize(
    ("wrong", "text", "right"),
    [
        ("modl", "did you mean 'model'? Give an existing subtree, or () for the whole tree", "model"),
        ("modl", "did you mean 'model'? Give an existing subtree, or () for the whole tree", ()),
        ("model/w/x", "model/w is a leaf. Give an existing subtree, or () for the whole tree", "model"),
    ],
)
def test_subtrees(tmp_path: Path, wrong: str, text: str, right: str | tuple[()]) -> None:
    source = saved(tmp_path / "a")
    refused(lambda: ckptcore.copy(source, tmp_path / "b", subtree=wrong), text, error=TreeMismatchError)
    ckptcore.copy(source, tmp_path / "b", subtree=right)
    loaded = ckptcore.load(tmp_path / "b")
    assert np.array_equal(loaded["w"] if right else loaded["model"]["w"], VALUES)


def test_subtrees_of_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "a", {"net": STATE, "other": {"n": 1}})
    copy = partial(ckptcore.copy, destination=tmp_path / "b")
    text = "subtree='model' does not start with the name of a checkpointable. Expected one of 'net', 'other'"
    refused(lambda: copy(tmp_path / "a", subtree="model"), text, error=TreeMismatchError)
    copy(tmp_path / "a", subtree="net/model")
    assert np.array_equal(ckptcore.load(tmp_path / "b")["w"], VALUES)
    text = refused(
        lambda: copy(tmp_path / "a", subtree=()), "by its own location, such as ", error=CompositeCheckpointError
    )
    copy(text.rpartition("such as ")[2], subtree=(), overwrite=True)
    assert np.array_equal(ckptcore.load(tmp_path / "b")["model"]["w"], VALUES)


def test_transforms_and_a_subtree(tmp_path: Path) -> None:
    transforms = [ckptcore.transforms.Rename("model/{name}", "weights/{name}")]
    source = saved(tmp_path / "a")
    refused(
        lambda: ckptcore.copy(source, tmp_path / "b", subtree="weights", transforms=transforms),  # type: ignore[call-overload]
        "copy twice, first with transforms",
        error=ValueError,
    )
    ckptcore.copy(source, tmp_path / "b", layout="safetensors", transforms=transforms)
    ckptcore.copy(tmp_path / "b", tmp_path / "c", subtree="weights")
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], VALUES)


def test_files_to_add(tmp_path: Path) -> None:
    source, config = saved(tmp_path / "a"), tmp_path / "config.json"
    copy = partial(ckptcore.copy, source, tmp_path / "b", subtree="model")
    refused(lambda: copy(files=[config]), "is not a file; check the path", error=InvalidLocationError)
    config.write_text("{}")
    taken = config.rename(tmp_path / "model.safetensors")
    refused(lambda: copy(files=[taken]), "Rename the file. Nothing was written")
    copy(files=[taken.rename(config)])
    assert (tmp_path / "b" / "config.json").read_text() == "{}"
    assert np.array_equal(ckptcore.load(tmp_path / "b")["w"], VALUES)


def test_destinations(tmp_path: Path) -> None:
    """Each error says to choose another destination, and the copy wrote nothing."""
    state = {"model": STATE, "other": {"n": 1}}
    for name in "ac":
        ckptcore.save_checkpointables(tmp_path / name, state)
    based = saved(tmp_path / "based", {"new": VALUES}, strategy=ckptcore.Update(base=saved(tmp_path / "base")))
    for source, destination in (
        (tmp_path / "a", tmp_path / "a"),
        (tmp_path / "a" / "model", tmp_path / "a"),
        (tmp_path / "a", tmp_path / "a" / "model"),
        (tmp_path / "a" / "model", tmp_path / "c" / "further"),
    ):
        refused(
            lambda: ckptcore.copy(source, destination, overwrite=True),  # noqa: B023
            "Give another destination",
            error=InvalidLocationError,
        )
    refused(
        lambda: ckptcore.copy(based, tmp_path / "base", layout="dcp", overwrite=True),
        "Give another destination",
        error=InvalidLocationError,
    )
    for name in "ac":
        assert_saved(tmp_path / name / "model")
        assert ckptcore.load_checkpointables(tmp_path / name)["other"] == {"n": 1}
    for number, source in enumerate((tmp_path / "a" / "model", based)):
        ckptcore.copy(source, tmp_path / str(number), overwrite=True)
        assert_saved(tmp_path / str(number))


def test_a_single_file_is_copied_with_its_directory(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    text = refused(
        lambda: ckptcore.copy(source / "model.safetensors", tmp_path / "b"), "Give the directory that contains it"
    )
    assert "or copy the file with another program" in text
    ckptcore.copy(source, tmp_path / "b")
    assert_saved(tmp_path / "b")


# --- steps ------------------------------------------------------------------------------------------------------------


def test_directories_without_steps(tmp_path: Path, run: Run) -> None:  # noqa: F811
    copy = partial(ckptcore.copy_steps, tmp_path / "run", tmp_path / "b")
    refused(copy, "does not exist or is empty: check the path", error=CheckpointNotFoundError)
    final = saved(tmp_path / "run" / "final")
    refused(copy, "has no committed steps, but 'final/': copy a checkpoint", error=CheckpointNotFoundError)
    ckptcore.copy(final, tmp_path / "final")
    assert_saved(tmp_path / "final")
    saved(tmp_path / "run" / "of_run_3")
    saved(tmp_path / "run" / "other_4")
    refused(copy, "pass step_names=StepNames.of('of_run_3') or StepNames.of('other_4')", error=CheckpointError)
    names = StepNames.of("of_run_3")
    assert list(copy(step_names=names).steps) == [3]
    assert_saved(tmp_path / "b" / "of_run_3")
    text = refused(
        lambda: copy(steps=[4], step_names=names), "no committed step 4; the newest: 3", error=CheckpointNotFoundError
    )
    assert "reload" not in text
    failed = run("copy", "--steps", "3", tmp_path / "run", tmp_path / "c")
    assert "pass --named of_run_3 or --named other_4" in failed.stderr
    assert "StepNames" not in failed.stderr
    assert run("copy", "--steps", "3", "--named", "of_run_3", tmp_path / "run", tmp_path / "c").exit_code == 0
    assert_saved(tmp_path / "c" / "of_run_3")


def test_a_step_that_is_damaged_at_the_destination(tmp_path: Path, run: Run) -> None:  # noqa: F811
    saved(tmp_path / "run" / "3")
    copy = ("copy", "--verify", tmp_path / "run", tmp_path / "b")
    assert run(*copy).exit_code == 0
    damage(tmp_path / "b")
    failed = run(*copy, "--json")
    assert failed.exit_code == 1
    (step,) = json.loads(failed.stdout)["steps"]
    assert "Copy again with --overwrite: " in step["error"]
    assert "Copy again with --overwrite: " in " ".join(run(*copy).stdout.split())
    assert run(*copy, "--overwrite").exit_code == 0
    assert_saved(tmp_path / "b" / "3")


def test_a_step_with_two_names(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "step_3")
    saved(tmp_path / "b" / "3")
    copy = partial(ckptcore.copy_steps, tmp_path / "run")
    refused(lambda: copy(tmp_path / "b"), "Delete one, or copy to another directory")
    copy(tmp_path / "c")
    assert_saved(tmp_path / "c" / "step_3")
    ckptcore.delete(tmp_path / "b" / "3")
    copy(tmp_path / "b")
    assert_saved(tmp_path / "b" / "step_3")


# --- exports ----------------------------------------------------------------------------------------------------------


def test_subtrees_of_exports(tmp_path: Path) -> None:
    state = {"net": STATE, "other": {"n": 1}}

    def save(subtree: str) -> None:
        exports = [Export(location=tmp_path / "e", subtree=subtree)]
        ckptcore.save_checkpointables(tmp_path / "a", state, strategy=WithExports(exports), overwrite=True)

    text = refused(lambda: save("model"), "Expected one of 'net', 'other'", error=TreeMismatchError)
    assert "subtree='model' does not start with the name of a checkpointable" in text
    assert not (tmp_path / "a").exists()
    save("net/model")
    assert np.array_equal(ckptcore.load(tmp_path / "e")["w"], VALUES)
    assert list(ckptcore.load_checkpointables(tmp_path / "a")) == ["net", "other"]


def test_an_export_in_the_directory_of_a_checkpointable(tmp_path: Path) -> None:
    def save(location: Path) -> None:
        exports = [Export(location=location, subtree="net")]
        ckptcore.save_checkpointables(tmp_path / "a", {"net": STATE}, strategy=WithExports(exports))

    text = "an export cannot use the directory of 'net' of "
    assert "Give it another location. Nothing was written" in refused(
        lambda: save(tmp_path / "a" / "net"), text, error=InvalidLocationError
    )
    assert not list(tmp_path.iterdir())
    save(tmp_path / "a" / "exported")
    assert_saved(tmp_path / "a" / "exported")
    assert_saved(tmp_path / "a" / "net")


def test_exports_of_steps_to_one_directory(tmp_path: Path) -> None:
    def save(*directories: str) -> None:
        exports = [ckptcore.StepExport(directory=tmp_path / name) for name in directories]
        with ckptcore.Checkpointer(tmp_path / "run", strategy=ckptcore.StepExports(exports)) as checkpointer:
            checkpointer.save(3, STATE)

    for directories in (("run",), ("e", "e")):
        refused(lambda: save(*directories), "Give it another directory", error=ValueError)  # noqa: B023
    save("e", "f")
    for name in ("run", "e", "f"):
        assert_saved(tmp_path / name / "3")


@pytest.mark.parametrize(
    ("locations", "text", "instead"),
    [
        (["a"], "Give each its own location", ["e"]),
        (["e", "e"], "Give each its own location", ["e", "f"]),
        (["e/f", "e"], "Give it another location, or one inside", ["e/f", "e/g"]),
        (["e/f", "e"], "Give it another location, or one inside", ["e/f", "e/f/g"]),
    ],
)
def test_locations_of_exports(tmp_path: Path, locations: list[str], text: str, instead: list[str]) -> None:
    def save(names: list[str]) -> None:
        saved(tmp_path / "a", strategy=WithExports([Export(location=tmp_path / name) for name in names]))

    refused(lambda: save(locations), text, error=InvalidLocationError)
    assert not list(tmp_path.iterdir())
    save(instead)
    for name in ("a", *instead):
        assert_saved(tmp_path / name)


def test_exports_of_two_strategies(tmp_path: Path) -> None:
    first, second = Export(location=tmp_path / "e"), Export(location=tmp_path / "f")
    refused(
        lambda: WithExports([second], WithExports([first])), "Pass all exports to one WithExports", error=ValueError
    )
    saved(tmp_path / "a", strategy=WithExports([first, second]))
    for name in "aef":
        assert_saved(tmp_path / name)


# --- plans ------------------------------------------------------------------------------------------------------------


class Eager(ckptcore.SafetensorsLayout):
    """A layout that takes elements before it passes segments to the store."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the arrays, but take the elements of the first one early."""
        snapshot.take(0)
        return super().write(snapshot, store)


class Forecasting(Eager):
    """A layout that also implements `forecast`."""

    def forecast(self, snapshot: Snapshot, store: WriteStore) -> WriteForecast:
        """Return the segments without taking elements."""
        return WriteForecast(super(Eager, self).write(snapshot, store))


def test_plans_of_layouts_that_take_elements() -> None:
    refused(
        lambda: ckptcore.plan({"w": VALUES}, layout=Eager()),
        "Implement ckptcore_tools.dry_run.ForecastingLayout.forecast()",
        error=PluginError,
    )
    assert ckptcore.plan({"w": VALUES}, layout=Forecasting()).array_bytes == VALUES.nbytes


# --- policies ---------------------------------------------------------------------------------------------------------


def test_policies_as_text() -> None:
    """Each example in the errors is a valid policy, and so is the list of all examples."""
    custom = CustomPreservation(lambda steps, context: [True] * len(steps))
    first = refused(lambda: format_preservation(custom), "the policies that have one are ", error=ValueError)
    other = refused(lambda: parse_preservation("newest=3"), "Policies: ", error=ValueError)
    examples = first.partition("the policies that have one are ")[2]
    assert f"Policies: {examples}; commas separate policies, and a step is kept if any of them keeps it" in other
    for example in examples.split(", "):
        assert format_preservation(parse_preservation(format_preservation(parse_preservation(example)))) in (
            example,
            format_preservation(parse_preservation(example)),
        )
    assert isinstance(parse_preservation(examples.replace(", ", ",")), AnyPreservation)
    assert parse_preservation("latest_n=3") == LatestN(3)
