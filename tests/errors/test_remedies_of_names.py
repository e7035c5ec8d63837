"""Names of ckptcore in errors about names of other libraries. Each test runs the code in the text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.other_libraries import ARGUMENTS, ATTRIBUTES
from ckptcore.step_names import StepNameFormat, StepNames
from tests.errors.refusals import ONE

STATE = {"name": np.arange(16.0)}


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """Return the objects that the names in the code refer to."""
    context = ckptcore.Context(durability="none")
    ckptcore.save(tmp_path / "stored", STATE, context=context)
    with ckptcore.Checkpointer(tmp_path / "run", context=context) as checkpointer:
        for step in (1, 2):
            checkpointer.save_blocking(step, STATE, metrics={"loss": 3 - step})
    return {
        "ckptcore": ckptcore,
        "stored": tmp_path / "stored",
        "directory": tmp_path / "run",
        "path": tmp_path / "path",
        "source": tmp_path / "stored",
        "destination": tmp_path / "path",
        "state": {"name": STATE["name"].copy()},
        "abstract": {"name": ckptcore.AbstractArray((16,), "float64")},
        "name": "name",
        "other": tmp_path / "other",
        "object": STATE["name"],
        "n": 1,
        "seconds": 1e-9,
    }


def _run(code: str, names: dict[str, Any]) -> Any:
    for abbreviated, whole in {
        "save_policy=...": "save_policy=ckptcore.policies.FixedInterval(1)",
        "preservation_policy=...": "preservation_policy=ckptcore.policies.LatestN(2)",
        "BestN(...)": "BestN(1, 'loss', 'min')",
        "CustomSave(...)": "CustomSave(lambda context: True)",
        "JobOptions(...)": "JobOptions(coordinator=ckptcore.context.SingleProcess())",
        "{scheme: {...}}": "{'file': {'direct_io': True}}",
    }.items():
        code = code.replace(abbreviated, whole)
    return eval(code, names)


@pytest.mark.parametrize(
    ("attribute", "code"),
    [
        ("restore", "ckptcore.load(path, abstract)"),
        ("restore", "ckptcore.load_into(path, state)"),
        ("pytree_metadata", "ckptcore.metadata(path)"),
        ("safe_open", "ckptcore.open(path)"),
    ],
)
def test_recommended_functions_that_read(attribute: str, code: str, names: dict[str, Any]) -> None:
    refused(lambda: getattr(ckptcore, attribute), code, error=AttributeError)
    names["state"]["name"] *= 0
    result = _run(code, {**names, "path": names["stored"]})
    match attribute:
        case "restore":
            assert same_value(names["state"] if result is None else result, STATE)
        case "pytree_metadata":
            assert result.abstract["name"].shape == (16,)
        case _:
            slicing = "checkpoint['name'][0:8]"
            refused(lambda: ckptcore.safe_open, slicing, error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
            with result as checkpoint:
                assert same_value(_run(slicing, {"checkpoint": checkpoint}), STATE["name"][:8])


@pytest.mark.parametrize(
    ("attribute", "code"),
    [
        ("save_pytree", "ckptcore.save(path, state)"),
        ("async_save", "ckptcore.save_async(path, state)"),
        ("consolidate", 'ckptcore.copy(source, destination, layout="safetensors")'),
        ("Composite", "ckptcore.save_checkpointables(path, {name: object})"),
    ],
)
def test_recommended_functions_that_write(attribute: str, code: str, names: dict[str, Any]) -> None:
    refused(lambda: getattr(ckptcore, attribute), code, error=AttributeError)
    handle = _run(code, names)
    if attribute == "async_save":
        refused(lambda: ckptcore.wait_until_finished, "handle.result() of ckptcore.save_async", error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
        handle.result()
    load = ckptcore.load_checkpointables if attribute == "Composite" else ckptcore.load
    assert same_value(load(names["path"]), STATE)


def test_files_of_other_software(names: dict[str, Any]) -> None:
    text = refused(lambda: ckptcore.FileSystemWriter, "a path, and layout=", error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
    _run(f"ckptcore.save(path, state, {text.partition('and ')[2].removesuffix(' to write')})", names)
    assert (names["path"] / ".metadata").exists()
    assert same_value(ckptcore.load(names["path"]), STATE)


def test_runs(names: dict[str, Any]) -> None:
    newest = "ckptcore.CheckpointReader(directory).latest"
    refused(lambda: ckptcore.latest_step, newest, error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
    assert _run(newest, names) == 2
    create = "ckptcore.Checkpointer(directory, save_policy=..., preservation_policy=...)"
    refused(lambda: ckptcore.CheckpointManager, create, error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
    refused(lambda: ckptcore.wait_until_finished, "or Checkpointer.wait()", error=AttributeError)  # type: ignore[attr-defined]  # a name of another library
    with _run(create, names) as checkpointer:
        checkpointer.save(3, STATE)
        checkpointer.wait()
        assert list(checkpointer.steps) == [2, 3]
        assert same_value(checkpointer.load(), STATE)


METHODS = {name: hint for name, hint in ATTRIBUTES["Checkpointer"].items() if "(step, state)" in hint}


@pytest.mark.parametrize("attribute", METHODS)
def test_recommended_methods_that_save(attribute: str, names: dict[str, Any]) -> None:
    code = METHODS[attribute].removeprefix("the handle of ").partition(")")[0] + ")"
    with ckptcore.Checkpointer(names["directory"]) as checkpointer:
        refused(lambda: getattr(checkpointer, attribute), f"use {METHODS[attribute]}", error=AttributeError)
        handle = _run(f"checkpointer.{code}", {**names, "checkpointer": checkpointer, "step": 3})
        if "handle.done()" in METHODS[attribute]:
            handle.result()
            assert _run("handle.done()", {"handle": handle})
        checkpointer.wait()
        assert same_value(checkpointer.load(3), STATE)


def test_recommended_methods_that_read_and_delete(names: dict[str, Any]) -> None:
    with ckptcore.Checkpointer(names["directory"]) as checkpointer:
        names |= {"checkpointer": checkpointer, "step": 1, "target": names["state"]}
        names |= {"metric": "loss", "mode": "min"}
        for attribute, code, expected in (
            ("all_steps", "steps", lambda result: list(result) == [1, 2]),
            ("latest_step", "latest", lambda result: result == 2),
            ("best_step", "best(metric, mode)", lambda result: result == 2),
            ("item_metadata", "metadata(step)", lambda result: result.abstract["name"].shape == (16,)),
            ("load_checkpoint", "load(step)", lambda result: same_value(result, STATE)),
            ("load_pytree", "load(step, abstract)", lambda result: same_value(result, STATE)),
            ("restore", "load_into(target)", lambda result: same_value(names["target"], STATE)),
            ("reached_preemption", "preempted", lambda result: not result),
            ("check_for_errors", "wait()", lambda result: result is None),
            ("remove_checkpoint", "delete(step)", lambda result: list(checkpointer.steps) == [2]),
        ):
            refused(lambda attribute=attribute: getattr(checkpointer, attribute), code, error=AttributeError)  # type: ignore[misc]  # the lambda has a default
            assert expected(_run(f"checkpointer.{code}", names)), attribute


OPTIONS = {name: hint for name, hint in ARGUMENTS.items() if re.match(r"\w+=", hint)}


@pytest.mark.parametrize("argument", OPTIONS)
def test_recommended_options_are_accepted(argument: str, names: dict[str, Any]) -> None:
    """The functions that have the recommended argument accept it, with the value in the error."""
    option, owner, _ = re.fullmatch(r"(\w+=.*?)( of Checkpointer)?((?:, or |; ).*)?", OPTIONS[argument]).groups()  # type: ignore[union-attr]  # they match
    keyword = option.partition("=")[0]
    if keyword == "select":
        assert same_value(_run(f"ckptcore.load(stored, {option})", names), STATE)
        return
    if owner is not None or keyword not in {*inspect.signature(ckptcore.save).parameters, "matching"}:
        create: Any = ckptcore.Checkpointer
        refused(lambda: create(names["directory"], **{argument: 1}), f"use {option}", error=TypeError)
        with _run(f"ckptcore.Checkpointer(directory, {option})", names) as checkpointer:
            assert checkpointer.save(3, STATE, metrics={"loss": 0}, epoch=1) is not None
            checkpointer.wait()
            assert same_value(checkpointer.load(3), STATE)
        return
    function: Any = ckptcore.load if keyword == "matching" else ckptcore.save
    refused(lambda: function(names["path"], STATE, **{argument: 1}), f"use {option}", error=TypeError)
    if keyword == "matching":
        target = {"name": ONE * 0, "more": ONE}
        ckptcore.save(names["path"], {"name": ONE, "unexpected": ONE})
        _run(f"ckptcore.load_into(path, target, {option})", {**names, "target": target})
        assert same_value(target, {"name": ONE, "more": ONE})
    else:
        _run(f"ckptcore.save(path, state, {option})", names)
        assert same_value(ckptcore.load(names["path"]), STATE)


@pytest.mark.parametrize(
    ("function", "argument", "hint", "follow"),
    [
        ("save", "custom_metadata", "metadata", lambda path, more: ckptcore.save(path, STATE, metadata={"a": 1})),
        ("save", "checkpoint_path", "the first argument", lambda path, more: ckptcore.save(path, STATE)),
        ("save", "pytree", "the second argument: one tree", lambda path, more: ckptcore.save(path, STATE)),
        ("save", "blocking", "save_async", lambda path, more: ckptcore.save_async(path, STATE).result()),
        ("load", "args", "abstract, the second argument", lambda path, more: ckptcore.load(more, STATE)),
        ("load", "map_location", "abstract: its leaves state", lambda path, more: ckptcore.load(more, STATE)),
        ("load", "mmap", "ckptcore.open(path)", lambda path, more: {"name": ckptcore.open(more)["name"][()]}),
        ("load", "weights_only", "nothing: a load never runs code", lambda path, more: ckptcore.load(more)),
    ],
)
def test_remedies_in_words_for_unknown_arguments(
    function: str, argument: str, hint: str, follow: Callable[[Path, Path], Any], names: dict[str, Any]
) -> None:
    call = getattr(ckptcore, function)
    refused(lambda: call(names["path"], STATE, **{argument: 1}), f"use {hint}", error=TypeError)
    loaded = follow(names["path"], names["stored"])
    assert same_value(ckptcore.load(names["path"]) if loaded is None else loaded, STATE)


def test_the_argument_item_names_of_orbax(names: dict[str, Any]) -> None:
    save: Any = ckptcore.save
    hint = "use save_checkpointables and load_checkpointables"
    refused(lambda: save(names["path"], STATE, item_names=["model"]), hint, error=TypeError)
    ckptcore.save_checkpointables(names["path"], {"model": STATE})
    assert same_value(ckptcore.load_checkpointables(names["path"], ["model"]), {"model": STATE})


@pytest.mark.parametrize("argument", ["options", "save_decision_policy", "step_prefix"])
def test_arguments_of_orbax_for_runs(argument: str, names: dict[str, Any]) -> None:
    create: Any = ckptcore.Checkpointer
    text = refused(lambda: create(names["directory"], **{argument: 1}), "; use ", error=TypeError)
    given = {
        "save_policy": ckptcore.policies.SpecificSteps([5]),
        "preservation_policy": ckptcore.policies.LatestN(1),
        "step_names": StepNames(read=[StepNameFormat("")], write=StepNameFormat("step_")),
    }
    used = text.partition("; use ")[2].removesuffix(" of Checkpointer").split(" and ")
    with create(names["directory"], **{option: given[option] for option in used}) as checkpointer:
        saved = [step for step in (4, 5) if checkpointer.save(step, STATE) is not None]
        checkpointer.wait()
        assert saved == ([5] if "save_policy" in used else [4, 5])
        assert list(checkpointer.steps) == ([5] if "preservation_policy" in used else [1, 2, *saved])
        assert (names["directory"] / "step_5").is_dir() == ("step_names" in used)
