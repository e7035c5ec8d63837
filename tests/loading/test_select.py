"""Selections: results, errors and bytes read of loads that want only some leaves."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_transforms import Default, Rename
from ckptcore_transforms.derived_arrays import stack
from ckptcore_transforms.transformed import apply_transforms
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Context, select
from ckptcore.context import IOOptions, JobOptions
from ckptcore.derivations import Stored
from ckptcore.errors import TreeMismatchError
from ckptcore.loading.selections import chosen_leaves
from ckptcore.model import BLOCK_BYTES, LEAF, ArrayRecord, ArraySpec, Node, TreeMetadata
from ckptcore.opening.derived import derive
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.protocols import Coordinator
from ckptcore.results import LoadReport
from ckptcore.select import LeafTable, Selection

ANY: Any = select  # untyped, to pass wrong arguments
FAST = Context(durability="none")


class Moments(NamedTuple):
    mu: Any
    nu: Any


def state() -> dict[str, Any]:
    return {
        "params": {"dense": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}, "a/b": np.ones(4)},
        "layers": [{"w": np.full(2, number), "b": np.zeros(1)} for number in range(3)],
        "opt_state": Moments(np.zeros((2, 3)), {"kernel": np.ones(2)}),
        "step": 7,
        "empty": {},
    }


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    location = tmp_path_factory.mktemp("select") / "c"
    ckptcore.save(location, state(), context=FAST)
    return location


def table() -> LeafTable:
    flat = {
        "params/dense/kernel": ("params", "dense", "kernel"),
        "params/dense/bias": ("params", "dense", "bias"),
        "params/a/b": ("params", "a/b"),
        "layers/0/w": ("layers", 0, "w"),
        "layers/10/w": ("layers", 10, "w"),
        "step": ("step",),
    }
    return LeafTable(list(flat.values()), lambda: [AbstractArray((2, 3), "float32")] * 5 + [7])


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (select.names("params"), {0, 1, 2}),
        (select.names("params/dense", "step"), {0, 1, 5}),
        (select.names("params/a/b"), {2}),
        (select.names(("params", "a/b")), {2}),
        (select.names(("layers", 10)), {4}),
        (select.names(("layers", "10"), "layers/0/w"), {3, 4}),
        (select.glob("params"), {0, 1, 2}),
        (select.glob("*/dense"), {0, 1}),
        (select.glob("*/kernel"), set()),
        (select.glob("**/kernel"), {0}),
        (select.glob("**/w"), {3, 4}),
        (select.glob("layers/**"), {3, 4}),
        (select.glob("layers/?"), {3}),
        (select.glob("layers/[0-9]*"), {3, 4}),
        (select.glob("layers/[!0]*/w", "st?p"), {4, 5}),
        (select.glob("PARAMS"), set()),
        (select.glob("par.ms"), set()),
        (select.regex(r"params/.*"), {0, 1, 2}),
        (select.regex(r"layers/\d"), {3}),
        (select.regex(r"(?i)STEP", r".*kernel"), {0, 5}),
        (select.where(lambda path, leaf: isinstance(leaf, AbstractArray) and path.endswith("w")), {3, 4}),
        (select.where(lambda path, leaf: leaf == 7), {5}),
        (~select.glob("params"), {3, 4, 5}),
        (select.glob("params") & ~select.names("params/dense/bias"), {0, 2}),
        (select.names("step") | select.glob("layers/0"), {3, 5}),
        (select.experts("layers/{expert}", [10]), {0, 1, 2, 4, 5}),
        (select.experts("**/{expert}/w", range(1)), {0, 1, 2, 3, 5}),
    ],
)
def test_selections_select_the_expected_leaves(selection: Selection, expected: set[int]) -> None:
    assert selection.leaves(table()) == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("ab*?"), min_size=1, max_size=3).map("".join), min_size=1, max_size=3))
def test_a_glob_of_plain_keys_matches_as_fnmatch_does(parts: list[str]) -> None:
    import fnmatch

    words = ["".join(word) for length in (1, 2) for word in itertools.product("ab", repeat=length)]
    paths = [path for length in (1, 2, 3) for path in itertools.product(words[:4], repeat=length)]
    selected = select.glob("/".join(parts)).leaves(LeafTable(paths, list))
    expected = (
        {
            number
            for number, path in enumerate(paths)
            if len(path) >= len(parts)
            and all(fnmatch.fnmatchcase(key, part) for key, part in zip(path, parts, strict=False))
        }
        if "**" not in parts
        else selected
    )
    assert selected == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: select.glob("a[b"),
        lambda: select.glob(""),
        lambda: select.glob("[z-a]"),
        lambda: select.regex("("),
        lambda: ANY.regex(3),
        lambda: ANY.experts(3, [0]),
        lambda: select.experts("layers/*", [0]),
        lambda: select.experts("{expert}/{expert}", [0]),
    ],
)
def test_invalid_patterns_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="not a (valid )?pattern|expected"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ANY.where("w"),
        lambda: ANY.experts("{expert}", 3),
        lambda: ANY.experts("{expert}", ["1"]),
        lambda: ANY.experts("{expert}", [1.0]),
        lambda: ANY.names(b"w"),
        lambda: ANY.names(None),
    ],
)
def test_arguments_of_wrong_types_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        make()


def test_errors_quote_names_with_control_characters(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a\n\x1b[31m": 1}, context=FAST)
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", context=FAST, select=select.names("a\n\x1b[31mx"))
    assert caught.value.differences == (r"missing: 'a\n\x1b[31mx' is not stored; did you mean 'a\n\x1b[31m'?",)
    with pytest.raises(ValueError, match=r"'a\[\{expert\}' is not a valid pattern"):
        select.experts("a[{expert}", [0])


def test_selections_cannot_be_combined_with_and_or_plain_values() -> None:
    with pytest.raises(TypeError, match="with &, | and ~"):
        select.glob("a") and select.glob("b")
    with pytest.raises(TypeError):
        select.glob("a") | "b"  # type: ignore[operator]  # a wrong argument, on purpose
    with pytest.raises(TypeError, match="names\\(3\\)"):
        select.names(3)  # type: ignore[arg-type]  # a wrong argument, on purpose


def test_only_selected_leaves_are_loaded(location: Path) -> None:
    loaded = ckptcore.load(location, context=FAST, select=~select.glob("opt_state", "params/a*"))
    assert list(loaded) == ["params", "layers", "step", "empty"] and list(loaded["params"]) == ["dense"]
    assert loaded["layers"][2]["w"].tolist() == [2, 2]


def test_items_of_sequences_keep_their_indices(location: Path) -> None:
    loaded = ckptcore.load(location, context=FAST, select=select.names(("layers", 1, "w"), ("opt_state", "nu")))
    assert loaded["layers"][0] is PLACEHOLDER and loaded["layers"][2] is PLACEHOLDER
    assert list(loaded["layers"][1]) == ["w"] and set(loaded) == {"layers", "opt_state"}
    assert ckptcore.load_async(location, context=FAST, select=select.names("step")).result() == {"step": 7}


def test_with_an_abstract_tree_other_leaves_become_placeholders(location: Path) -> None:
    abstract = ckptcore.metadata(location).abstract
    abstract["params"]["dense"]["bias"] = AbstractArray((99,), "int8")  # not selected, so not compared
    report = LoadReport()
    selection = select.names("params/dense/kernel", "layers/0", "step")
    loaded = ckptcore.load(location, abstract, context=FAST, select=selection, report=report)
    assert loaded["params"]["dense"]["bias"] is PLACEHOLDER and loaded["step"] == 7
    assert loaded["params"]["dense"]["kernel"].tolist() == [[1, 1, 1]] * 2 and loaded["layers"][1]["w"] is PLACEHOLDER
    assert set(report.restored) == {"params/dense/kernel", "layers[0]/w", "layers[0]/b", "step"}
    assert "params/dense/bias" in report.skipped and not report.ignored


def test_the_abstract_tree_may_lack_leaves_that_are_not_selected(location: Path) -> None:
    abstract = {"params": {"dense": {"kernel": AbstractArray((2, 3), "float64")}}}
    loaded = ckptcore.load(location, abstract, context=FAST, select=select.names("params/dense/kernel"))
    assert loaded["params"]["dense"]["kernel"].shape == (2, 3)


def test_the_abstract_tree_must_request_selected_leaves_as_stored(location: Path) -> None:
    abstract = {"params": {"dense": {"kernel": AbstractArray((3, 2), "float64"), "more": AbstractArray((1,), "int8")}}}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(location, abstract, context=FAST, select=select.names("params/dense"))
    lines = "\n".join(caught.value.differences)
    assert "missing: params/dense/more" in lines and "unexpected: params/dense/bias" in lines and "shape" in lines
    assert len(caught.value.differences) == 3


def test_a_target_keeps_leaves_that_are_not_selected(location: Path) -> None:
    target = state()
    target["params"]["dense"]["kernel"][...] = 5
    target["params"]["dense"]["bias"][...] = 5
    target["step"] = 1
    kernel = target["params"]["dense"]["kernel"]
    ckptcore.load_into(location, target, context=FAST, select=select.names("params/dense/kernel"))
    assert target["params"]["dense"]["kernel"] is kernel and kernel.tolist() == [[1, 1, 1]] * 2
    assert target["params"]["dense"]["bias"].tolist() == [5, 5, 5] and target["step"] == 1


def test_without_an_abstract_tree_the_report_lists_ignored_leaves(location: Path) -> None:
    report = LoadReport()
    ckptcore.load(location, context=FAST, select=select.names(("layers", 1)), report=report)
    assert report.restored == ["layers[1]/w", "layers[1]/b"]
    assert "params/dense/kernel" in report.ignored and len(report.ignored) == 12 - 2


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (select.names("params/dens/kernel"), "did you mean params/dense/kernel"),
        (~select.names("opt_stat"), "did you mean opt_state"),
        (select.names("step", ("layers", 3)), "missing: layers/3"),
        (select.glob("parms/**"), "nothing is selected"),
        (select.experts("params/{expert}", [0]), "no stored path matches the pattern"),
        (select.experts("layers/{expert}", range(2, 6)), "experts 0-2 are stored, 3-5 were requested"),
    ],
)
def test_a_selection_without_a_match_is_an_error(location: Path, selection: Selection, words: str) -> None:
    with pytest.raises(TreeMismatchError, match=words):
        ckptcore.load(location, context=FAST, select=selection)


def test_select_must_be_a_selection(location: Path) -> None:
    with pytest.raises(TypeError, match=r"select\.names"):
        ckptcore.load(location, context=FAST, select="params")  # type: ignore[arg-type]  # wrong on purpose


def test_derived_arrays_are_selected_if_their_sources_are(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros(2), "b": np.ones(2), "n": 1, "m": 2}, context=FAST)
    checkpoint = open_checkpoint(tmp_path / "c", FAST)
    spec = ArraySpec((2,), "float64")
    a, b, n, m = checkpoint.tree.leaves
    made = {0: stack([Stored(spec, 0), Stored(spec, 1)], 0), 1: Stored(spec, 1)}
    skeleton = Node("dict", ("both", "b", "n", "m"), (LEAF,) * 4)
    derived = derive(
        checkpoint, TreeMetadata(skeleton, (ArrayRecord(made[0].spec), b, n, m)), made, values={2: 2, 3: 3}
    )
    for selection, expected in (
        (select.names("a", "m"), {3}),
        (select.names("b", "n"), {1, 2}),
        (~select.names("n"), {0, 1, 3}),
    ):
        assert chosen_leaves(derived, selection, FAST) == expected
    assert isinstance(a, ArrayRecord)


def test_equal_values_are_selected_by_their_own_paths(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": None, "b": None}, context=FAST)
    checkpoint = open_checkpoint(tmp_path / "c", FAST)
    nothing = checkpoint.tree.leaves[0]
    shared = dataclasses.replace(checkpoint, tree=dataclasses.replace(checkpoint.tree, leaves=(nothing, nothing)))
    moved = [Rename("b", "z"), Default("c", None)]
    derived = apply_transforms(shared, moved, FAST)
    names = [path[0] for path in derived.tree.paths]
    for stored, expected in (("a", {"a", "c"}), ("b", {"z", "c"})):
        chosen = chosen_leaves(derived, select.names(stored), FAST)
        assert {names[leaf] for leaf in chosen} == expected


def test_selections_use_the_names_before_transforms(location: Path) -> None:
    selection = select.names("params", "step")
    renamed = [Rename("params/dense/{name}", "model/{name}"), Rename("layers/{i}/w", "w/{i}")]
    loaded = ckptcore.load(location, context=FAST, select=selection, transforms=renamed)
    assert set(loaded) == {"model", "params", "step"} and set(loaded["model"]) == {"kernel", "bias"}


@pytest.mark.parametrize("layout", ["safetensors", "zarr3", "ocdbt", "dcp"])
def test_a_load_without_the_optimizer_reads_the_parameters(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(0)
    kernels = {f"layer{number}": rng.integers(0, 9, (1024, 512), np.int32) for number in range(4)}
    moments = [{name: kernel * times for name, kernel in kernels.items()} for times in (2, 3)]
    train = {"params": kernels, "opt_state": Moments(*moments), "step": 7}
    ckptcore.save(
        tmp_path / "c", train, layout=layout, context=Context(durability="none", io=IOOptions(checksums=False))
    )
    report = LoadReport()
    loaded = ckptcore.load(tmp_path / "c", context=FAST, select=~select.names("opt_state"), report=report)
    assert set(loaded) == {"params", "step"} and all(
        np.array_equal(loaded["params"][name], kernels[name]) for name in kernels
    )
    assert report.bytes_read <= 1.1 * sum(kernel.nbytes for kernel in kernels.values())


def mixture() -> dict[str, Any]:
    """Return eight experts per layer, 4 MiB each, in two layers, and a norm. Names are those of Hugging Face."""
    rng = np.random.default_rng(0)
    tree: dict[str, Any] = {"model.norm.weight": np.ones(64, np.float32)}
    for layer, expert in itertools.product(range(2), range(8)):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        tree[f"{prefix}.w1.weight"] = rng.integers(0, 9, (1024, 512), np.int32)
        tree[f"{prefix}.w2.weight"] = rng.integers(0, 9, (512, 1024), np.int32)
    return tree


@pytest.mark.parametrize("layout", ["safetensors", "zarr3", "ocdbt"])
def test_only_the_selected_experts_are_read(tmp_path: Path, layout: str) -> None:
    tree = mixture()
    ckptcore.save(tmp_path / "c", tree, layout=layout, context=FAST)
    nbytes = sum(array.nbytes for array in tree.values())
    report = LoadReport()
    selection = select.experts("model.layers.*.mlp.experts.{expert}.*", [3])
    loaded = ckptcore.load(tmp_path / "c", context=FAST, select=selection, report=report)
    assert set(loaded) == {name for name in tree if ".experts." not in name or ".experts.3." in name}
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, tree[name])
    # An expert is stored as four runs of bytes, whose first and last blocks are read whole.
    assert report.bytes_read <= nbytes / 8 + 8 * BLOCK_BYTES


def test_processes_of_a_joint_load_may_select_different_leaves(tmp_path: Path) -> None:
    tree = {"shared": np.arange(100), **{f"expert.{rank}": np.full(50, rank) for rank in range(2)}}
    ckptcore.save(tmp_path / "c", tree, context=FAST)
    network = ThreadNetwork(2, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        context = Context(
            durability="none",
            job=JobOptions(
                reads="broadcast", coordinator=coordinator, collectives=network.collectives(coordinator.rank)
            ),
        )
        selection = select.experts("expert.{expert}", [coordinator.rank])
        loaded = ckptcore.load(tmp_path / "c", context=context, select=selection)
        assert set(loaded) == {"shared", f"expert.{coordinator.rank}"} and loaded["shared"][99] == 99
        assert loaded[f"expert.{coordinator.rank}"][0] == coordinator.rank

    ThreadJob(2, timeout_seconds=120).run(load)


class Empty(NamedTuple):
    pass


def containers() -> dict[str, Any]:
    """Return a state with empty containers, like that of a trainer without a scheduler."""
    return {
        "model": {"w": np.ones(2), "buffers": {}, "none": None},
        "optimizer": [Moments(np.zeros(1), Empty()), {}, ()],
        "schedulers": [],
        "loops": {"fit": {"batches": [{}]}},
    }


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr"])
@pytest.mark.brings("`{}`, `[]` and `()`, in a partial load or copy", "Python", "same")
def test_containers_without_children_are_selected_by_name(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "c", containers(), layout=layout, context=FAST)
    stored: Any = ckptcore.load(tmp_path / "c")
    assert stored["schedulers"] == [] and stored["loops"] == {"fit": {"batches": [{}]}}

    def loaded(selection: Selection) -> Any:
        return ckptcore.load(tmp_path / "c", select=selection)

    for everything in (select.glob("*"), select.regex(".*"), select.where(lambda path, leaf: True), ~select.glob("x")):
        assert repr(loaded(everything)) == repr(stored)
    without_model = {name: value for name, value in stored.items() if name != "model"}
    assert repr(loaded(~select.names("model"))) == repr(without_model)
    assert loaded(select.names("schedulers")) == {"schedulers": []}
    assert loaded(select.names("loops", "model/buffers")) == {"model": {"buffers": {}}, "loops": stored["loops"]}
    assert loaded(select.glob("loops/*/batches")) == loaded(select.regex("loops/.*")) == {"loops": stored["loops"]}
    assert loaded(select.names(("optimizer", 1))) == {"optimizer": [PLACEHOLDER, {}, PLACEHOLDER]}
    assert loaded(select.names("model/none")) == {"model": {"none": None}}
    assert loaded(select.where(lambda path, leaf: leaf == [])) == {
        "optimizer": [{"nu": []}, PLACEHOLDER, PLACEHOLDER],
        "schedulers": [],
    }
    assert loaded(~select.where(lambda path, leaf: leaf in ({}, [], ())) & select.names("model")).keys() == {"model"}
    with pytest.raises(TreeMismatchError, match="missing: scheduler is not stored; did you mean schedulers"):
        loaded(select.names("scheduler"))
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint.iter_boxes(select=select.names("schedulers"))) == []
        assert len(list(checkpoint.iter_boxes(first=select.names("schedulers")))) == 2
    abstract = ckptcore.abstract(containers())
    assert ckptcore.load(tmp_path / "c", abstract, select=select.names("schedulers"))["schedulers"] == []
    for part in ("model", "optimizer", "schedulers", "loops"):
        ckptcore.copy(tmp_path / "c", tmp_path / part, subtree=part)
        assert repr(ckptcore.load(tmp_path / part)) == repr(stored[part])


def test_containers_without_children_after_transforms(tmp_path: Path) -> None:
    """Selections use stored names. A container that a transform moves follows its neighbours."""
    ckptcore.save(tmp_path / "c", containers(), context=FAST)
    rename = Rename("model/{name}", "network/{name}")

    def loaded(selection: Selection) -> Any:
        return ckptcore.load(tmp_path / "c", select=selection, transforms=[rename])

    assert loaded(select.names("model"))["network"].keys() == {"w", "buffers", "none"}
    assert loaded(select.names("schedulers", "loops")) == {"schedulers": [], "loops": {"fit": {"batches": [{}]}}}
    assert loaded(~select.names("model")).keys() == {"optimizer", "schedulers", "loops"}
    added = ckptcore.load(tmp_path / "c", select=select.names("schedulers"), transforms=[Default("x", 1)])
    assert added == {"x": 1, "schedulers": []}


def test_a_predicate_about_arrays_does_not_fail_on_a_container(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(2, np.float32), "n": np.ones(2, np.int64), "empty": [], "none": {}})
    chosen = select.where(lambda _, leaf: leaf.dtype.name == "float32")  # type: ignore[attr-defined]
    assert ckptcore.load(tmp_path / "c", select=chosen).keys() == {"w", "empty", "none"}
