"""Remedies in errors about arguments and options. Each test follows the text of a remedy."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import Checkpointer, Context, Matching, SafetensorsLayout, policies, select
from ckptcore.builtin.safetensors_files import read_header
from ckptcore.context import IOOptions, JobOptions, MemoryOptions, PluginOptions, ReadGroups, ReplicaOptions
from ckptcore.errors import TreeMismatchError
from ckptcore.protocols import Coordinator
from ckptcore.step_names import StepNameFormat, StepNames
from tests.errors.refusals import ONE, TWO


def _choices(text: str) -> list[str]:
    """Return the values after "expected one of", evaluated as Python code."""
    listed = text.rpartition("expected one of ")[2].removesuffix(", or ReadGroups")
    return list(eval(f"({listed},)"))


@pytest.mark.parametrize(
    ("create", "advice", "right"),
    [
        (lambda: SafetensorsLayout(stem="-model"), "such as 'model' or 'adapter_model'", {"stem": "adapter_model"}),
        (lambda: SafetensorsLayout(stem="a/b"), "use ASCII letters, digits, '_', '-' and '.'", {"stem": "a_b-1.c"}),
        (lambda: SafetensorsLayout(stem="checkpoint.model"), "use another stem", {"stem": "model.checkpoint"}),
        (
            lambda: SafetensorsLayout(metadata={"config": {"a": 1}}),  # type: ignore[dict-item]  # wrong on purpose
            "or json.dumps(...) of the value",
            {"metadata": {"config": '{"a": 1}'}},
        ),
        (
            lambda: SafetensorsLayout(metadata={"__ckptcore__": "1"}),
            "are reserved; use another name",
            {"metadata": {"ckptcore": "1"}},
        ),
    ],
)
def test_wrong_options_of_safetensors(create: Callable[[], object], advice: str, right: Any, tmp_path: Path) -> None:
    refused(create, advice, error=ValueError)
    ckptcore.save(tmp_path / "c", {"w": ONE}, layout=SafetensorsLayout(**right))
    file = tmp_path / "c" / f"{right.get('stem', 'model')}.safetensors"
    header = read_header(lambda start, stop: file.read_bytes()[start:stop], file.stat().st_size, file.name)
    assert right.get("metadata", {}).items() <= (header.metadata or {}).items()
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


@pytest.mark.parametrize(
    ("create", "option"),
    [
        (lambda choice: JobOptions(reads=choice), "reads"),
        (lambda choice: Context(durability=choice), "durability"),
        (lambda choice: Context(when_busy=choice), "when_busy"),
        (lambda choice: Matching(missing=choice), "missing"),
        (lambda choice: Matching(unexpected=choice), "unexpected"),
        (lambda choice: Matching(sequences=choice), "sequences"),
        (lambda choice: Matching(keys=choice), "keys"),
        (lambda choice: Matching(values=choice), "values"),
    ],
)
def test_every_word_that_an_error_lists_is_accepted(create: Callable[[Any], Any], option: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    choices = _choices(refused(lambda: create("some"), f"({option}='some')", error=ValueError))
    assert len(choices) > 1
    for choice in choices:
        made = create(choice)
        options: dict[str, Any] = {"matching": made} if isinstance(made, Matching) else {}
        if isinstance(made, Context):
            options = {"context": made}
        elif isinstance(made, JobOptions):
            options = {"context": Context(job=made)}
        assert same_value(ckptcore.load(tmp_path / "c", {"w": TWO}, **options), {"w": ONE})


@pytest.mark.parametrize(
    ("name", "group"), [("io", IOOptions), ("memory", MemoryOptions), ("job", JobOptions), ("plugins", PluginOptions)]
)
def test_options_that_must_be_in_a_group(name: str, group: type, tmp_path: Path) -> None:
    create: Any = Context
    text = refused(lambda: create(**{name: 3}), f"ckptcore.context.{group.__name__}(...)", error=TypeError)
    code = text.rpartition("expected ")[2].replace("(...)", "()")
    ckptcore.save(tmp_path / "c", {"w": ONE}, context=create(**{name: eval(code, {"ckptcore": ckptcore})}))
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


@pytest.mark.parametrize("groups", [[[0, 0]], [[0, 1], [1]], [[-1]], [[True]]])
def test_wrong_groups_of_ranks(groups: Any, tmp_path: Path) -> None:
    refused(lambda: ReadGroups(groups), "give each rank once, in one group, as an int of 0 or more", error=ValueError)
    ckptcore.save(tmp_path / "c", {"w": ONE})

    network = ThreadNetwork(2)

    def load(coordinator: Coordinator) -> Any:
        collectives = network.collectives(coordinator.rank)
        job = JobOptions(coordinator=coordinator, collectives=collectives, reads=ReadGroups([[1, 0]]))
        return ckptcore.load(tmp_path / "c", context=Context(job=job))

    assert all(same_value(loaded, {"w": ONE}) for loaded in ThreadJob(2).run(load))


@pytest.mark.parametrize(
    ("create", "option", "value", "right"),
    [
        (IOOptions, "threads", 0, [1, None]),
        (MemoryOptions, "save_bytes", 0, [1, None]),
        (MemoryOptions, "load_bytes", -1, [1, None]),
        (MemoryOptions, "exchange_bytes", 0, [1]),
        (MemoryOptions, "exchange_bytes", None, [1]),
        (ReplicaOptions, "piece_bytes", 0, [1]),
        (ReplicaOptions, "most", 0, [1]),
        (ReplicaOptions, "objects", "any", ["refuse", "lowest_rank"]),
    ],
)
def test_wrong_numbers_in_options(create: Any, option: str, value: Any, right: list[Any], tmp_path: Path) -> None:
    """None is accepted if an error advises it."""
    text = refused(lambda: create(**{option: value}), f"({option}={value!r}): ", error=ValueError)
    assert ("or None" in text) == (None in right)
    for number, accepted in enumerate(right):
        made = create(**{option: accepted})
        group = {IOOptions: "io", MemoryOptions: "memory"}.get(create, "job")
        options: dict[str, Any] = {group: JobOptions(replicas=made) if group == "job" else made}
        context = Context(**options)
        ckptcore.save_async(tmp_path / f"{number}", {"w": ONE, "v": TWO}, context=context).result()
        assert same_value(ckptcore.load(tmp_path / f"{number}", context=context), {"w": ONE, "v": TWO})


def test_wrong_options_of_local_storage(tmp_path: Path) -> None:
    def save(**options: Any) -> None:
        ckptcore.save(tmp_path / "c", {"w": ONE}, overwrite=True, context=Context(storage={"file": options}))

    for wrong in ({"direct": True}, {"direct_io": "yes"}):
        refused(lambda wrong=wrong: save(**wrong), "has the option direct_io, True or False", error=ValueError)  # type: ignore[misc]  # the lambda has a default
    for value in (True, False):
        save(direct_io=value)
        assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_every_value_of_overwrite_that_an_error_lists_is_accepted(tmp_path: Path) -> None:
    text = refused(lambda: ckptcore.save(tmp_path / "c", {}, overwrite=1.5), "expected True", error=ValueError)  # type: ignore[arg-type]  # wrong on purpose
    for number, choice in enumerate(eval(text.partition("expected ")[2].replace(" or ", ", "))):
        for value in (TWO, ONE) if choice else (ONE,):
            ckptcore.save(tmp_path / f"{number}", {"w": value}, overwrite=choice)
        assert same_value(ckptcore.load(tmp_path / f"{number}"), {"w": ONE})


def test_a_framework_and_an_abstract_tree(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    load: Any = ckptcore.load
    refused(lambda: load(tmp_path / "c", {"w": TWO}, framework="numpy"), "pass only one of the two", error=ValueError)
    assert same_value(load(tmp_path / "c", framework="numpy"), {"w": ONE})
    assert same_value(load(tmp_path / "c", {"w": TWO}), {"w": ONE})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda: StepNameFormat("1"), lambda: StepNameFormat("step_")),
        (lambda: StepNameFormat("a/b"), lambda: StepNameFormat("step_")),
        (lambda: StepNameFormat("s", 1000), lambda: StepNameFormat("s", 8)),
        (lambda: StepNames(read="step_"), lambda: StepNames(read=[StepNameFormat("step_", None)])),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: StepNames("step_"), lambda: StepNames(StepNameFormat("step_", width=8))),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_wrong_names_of_steps(wrong: Callable[[], Any], right: Callable[[], Any], tmp_path: Path) -> None:
    text = refused(wrong, ": give ", error=Exception)
    made = right()
    if "such as StepNameFormat" in text:
        assert made.write == eval(text.partition("such as ")[2], {"StepNameFormat": StepNameFormat})
    names = made if isinstance(made, StepNames) else StepNames(made)
    with Checkpointer(tmp_path / "run", step_names=names) as checkpointer:
        checkpointer.save_blocking(3, {"w": ONE})
    with Checkpointer(tmp_path / "run", step_names=names) as checkpointer:
        assert list(checkpointer.steps) == [3]
        assert same_value(checkpointer.load(), {"w": ONE})


@pytest.mark.parametrize(
    ("wrong", "advice", "right"),
    [
        (lambda: policies.FixedInterval(0), "give a whole number of at least 1", policies.FixedInterval(1)),
        (
            lambda: policies.FixedInterval(True),
            "give a whole number of at least 1",
            policies.FixedInterval(int(np.int64(1))),
        ),
        (lambda: policies.TimeInterval(0), "give a finite number of seconds above 0", policies.TimeInterval(1e-9)),
        (
            lambda: policies.TimeInterval(datetime.timedelta(microseconds=1)),  # type: ignore[arg-type]  # wrong on purpose
            "for a timedelta, pass its total_seconds()",
            policies.TimeInterval(datetime.timedelta(microseconds=1).total_seconds()),
        ),
        (
            lambda: policies.SpecificSteps(1),  # type: ignore[arg-type]  # wrong on purpose
            "give a collection of steps, such as [100, 200]",
            policies.SpecificSteps([1, 2]),
        ),
    ],
)
def test_wrong_numbers_in_save_policies(wrong: Callable[[], Any], advice: str, right: Any, tmp_path: Path) -> None:
    refused(wrong, advice, error=Exception)
    with Checkpointer(tmp_path / "run", save_policy=right) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, {"w": ONE}) is not None
            checkpointer.wait()
        assert list(checkpointer.steps) == [1, 2]


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "advice", "error", "right"),
    [
        (
            lambda: policies.BestN(1, "", "min"),
            "give the name of a metric",
            ValueError,
            policies.BestN(1, "loss", "min"),
        ),
        (
            lambda: policies.BestN(1, "loss", "lowest"),  # type: ignore[arg-type]  # wrong on purpose
            "give 'min' if low values are good",
            ValueError,
            policies.BestN(1, "loss", "min"),
        ),
        (
            lambda: policies.BestN(1, "loss", "lowest"),  # type: ignore[arg-type]  # wrong on purpose
            "or 'max' if high ones are",
            ValueError,
            policies.BestN(1, "gain", "max"),
        ),
        (
            lambda: policies.AnyPreservation(policies.LatestN(1)),  # type: ignore[arg-type]  # wrong on purpose
            "give a list of policies",
            TypeError,
            policies.AnyPreservation([policies.CustomSteps([1])]),
        ),
        (
            lambda: policies.AnyPreservation([]),
            "give at least one policy",
            ValueError,
            policies.AnyPreservation([policies.CustomSteps([1])]),
        ),
        (
            lambda: policies.CustomSteps([]),
            "give at least one step",
            ValueError,
            policies.CustomSteps([1]),
        ),
        (
            lambda: policies.CustomPreservation(1),  # type: ignore[arg-type]  # wrong on purpose
            "give a function from steps and the time to steps to keep",
            TypeError,
            policies.CustomPreservation(lambda steps, now: [1]),
        ),
    ],
)
def test_wrong_arguments_of_preservation_policies(
    create: Callable[[], Any], advice: str, error: type[Exception], right: Any, tmp_path: Path
) -> None:
    """Step 1 has the best metric. The newest step is always kept."""
    refused(create, advice, error=error)
    with Checkpointer(tmp_path / "run", preservation_policy=right) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_blocking(step, {"w": ONE}, metrics={"loss": step, "gain": -step})
        checkpointer.wait()
        assert list(checkpointer.steps) == [1, 3]


@pytest.mark.parametrize(
    ("create", "advice", "right"),
    [
        (policies.CustomSave, "pass a function from a SaveContext to a bool", lambda: policies.CustomSave(_is_second)),
        (
            policies.AnySave,
            "give a list of policies",
            lambda: policies.AnySave([policies.SpecificSteps([2]), policies.CustomSave(_is_second)]),
        ),
    ],
)
def test_wrong_arguments_of_save_policies(create: Any, advice: str, right: Callable[[], Any], tmp_path: Path) -> None:
    refused(lambda: create(3), advice, error=TypeError)
    with Checkpointer(tmp_path / "run", save_policy=right()) as checkpointer:
        saved = [step for step in (1, 2, 3) if checkpointer.save(step, {"w": ONE}) is not None]
        checkpointer.wait()
        assert saved == list(checkpointer.steps) == [2]


def _is_second(context: policies.SaveContext) -> bool:
    return context.step == 2


def test_an_epoch_policy_needs_the_epoch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", save_policy=policies.EpochInterval(2)) as checkpointer:
        refused(lambda: checkpointer.save(7, {"w": ONE}), "pass epoch= to save and to should_save", error=ValueError)
        refused(lambda: checkpointer.should_save(7), "pass epoch=", error=ValueError)
        assert not checkpointer.should_save(7, epoch=1)
        assert checkpointer.save(7, {"w": ONE}, epoch=1) is None
        assert checkpointer.should_save(8, epoch=2)
        assert checkpointer.save(8, {"w": ONE}, epoch=2) is not None
    assert same_value(ckptcore.load(tmp_path / "run" / "8"), {"w": ONE})


# --- selections and transforms ----------------------------------------------------------------------------------------


def test_wrong_glob_patterns(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a[0": ONE, "params": {"dense": {"kernel": TWO}}})
    glob: Any = select.glob
    text = refused(lambda: glob(3), "is not a pattern; pass text such as", error=ValueError)
    pattern = eval(text.rpartition("such as ")[2])
    assert same_value(ckptcore.load(tmp_path / "c", select=glob(pattern)), {"params": {"dense": {"kernel": TWO}}})
    refused(lambda: glob("a[0"), "write '[[]' for '['", error=ValueError)
    assert same_value(ckptcore.load(tmp_path / "c", select=glob("a[[]0")), {"a[0": ONE})


def test_experts_that_are_not_stored(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"experts": {"0": ONE, "1": TWO}, "w": ONE})

    def load(pattern: str, own: range) -> Any:
        return ckptcore.load(tmp_path / "c", select=select.experts(pattern, own))

    advice = "Correct the pattern or the numbers"
    text = refused(lambda: load("expert/{expert}", range(1)), "no stored path matches", advice, error=TreeMismatchError)
    assert "nothing was read" in text
    refused(lambda: load("experts/{expert}", range(1, 4)), "experts 0-1 are stored", advice, error=TreeMismatchError)
    assert same_value(load("experts/{expert}", range(1, 2)), {"experts": {"1": TWO}, "w": ONE})


@pytest.mark.parametrize("wrong", ["w", {"w": "v"}, None])
def test_transforms_that_are_not_a_list(wrong: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    if wrong is None:
        wrong = ckptcore.transforms.Rename("w", "v")
    advice = "expected a list of transforms, such as transforms=[Rename(...), Cast(...)]"
    refused(lambda: ckptcore.load(tmp_path / "c", transforms=wrong), advice, error=TypeError)
    transforms = [ckptcore.transforms.Rename("w", "v"), ckptcore.transforms.Cast("v", "float32")]
    assert same_value(ckptcore.load(tmp_path / "c", transforms=transforms), {"v": ONE.astype(np.float32)})


def test_a_class_in_place_of_a_transform(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    wrong: Any = [ckptcore.transforms.Rename]
    refused(lambda: ckptcore.load(tmp_path / "c", transforms=wrong), "such as Rename(...)", error=TypeError)
    assert same_value(ckptcore.load(tmp_path / "c", transforms=[ckptcore.transforms.Rename("w", "v")]), {"v": ONE})
