"""An update writes only the given leaves, but loads as the whole tree while its base exists."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, objects_at, through
from ckptcore_testing.trees import same_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore import PLACEHOLDER, transforms
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    CorruptCheckpointError,
    InvalidLocationError,
    SaveLostError,
    TreeMismatchError,
)
from ckptcore.protocols import Coordinator

_LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr3"]


def _state() -> dict[str, Any]:
    tied = np.arange(6.0)
    return {
        "model": {"w": np.arange(12, dtype=np.int16).reshape(3, 4), "b": np.ones(3, np.float16)},
        "layers": [np.zeros(2), np.ones((2, 2)), {"x": np.arange(3)}],
        "embed": tied,
        "head": tied,
        "step": 1,
    }


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_omitted_leaves_come_from_the_base(layout: str, run: str) -> None:
    ckptcore.save(f"{run}/1", _state(), layout=layout)
    ckptcore.save(
        f"{run}/2",
        {
            "model": {"w": np.zeros((5, 5)), "new": np.arange(2)},
            "layers": [PLACEHOLDER, np.full(3, 7), {"x": PLACEHOLDER}],
            "step": 2,
        },
        strategy=ckptcore.Update(f"{run}/1"),
        layout=layout,
        metadata={"why": "tuned"},
    )
    expected = _state()
    expected["model"]["w"], expected["model"]["new"] = np.zeros((5, 5)), np.arange(2)
    expected["layers"][1], expected["step"] = np.full(3, 7), 2
    assert same_value(ckptcore.load(f"{run}/2"), expected)
    assert ckptcore.metadata(f"{run}/2").custom == {"why": "tuned"}
    report = ckptcore.verify(f"{run}/2")
    assert report.ok and report.nbytes > 300
    # An update of an update, in another layout. It refers to the first base directly.
    ckptcore.save_async(
        f"{run}/3", {"head": np.full(6, 2.5)}, strategy=ckptcore.Update(f"{run}/2"), layout="safetensors"
    ).result()
    expected["head"] = np.full(6, 2.5)
    assert same_value(ckptcore.load(f"{run}/3"), expected)
    target = {"model": PLACEHOLDER, "layers": PLACEHOLDER, "embed": np.zeros(6), "head": np.zeros(6), "step": 0}
    assert same_value(ckptcore.load_into(f"{run}/3", target)["embed"], np.arange(6.0))


def test_every_reading_function_supports_updates(run: str) -> None:
    big = (np.arange(400_000, dtype=np.float32) % 2000).reshape(4000, 100)
    ckptcore.save(f"{run}/1", {"big": big, "small": np.ones(3), "turned": big[:10]})
    ckptcore.save(f"{run}/2", {"small": np.zeros(3)}, strategy=ckptcore.Update(f"{run}/1"), layout="zarr3")
    with ckptcore.open(f"{run}/2") as checkpoint:
        assert np.array_equal(checkpoint["big"][100:110], big[100:110])
        assert np.array_equal(checkpoint["big"][7:9, 3:5], big[7:9, 3:5])
        assert checkpoint.bytes_read < big.nbytes
    changed = [transforms.Transpose("turned"), transforms.Cast("**", "float64")]
    made = ckptcore.load(f"{run}/2", transforms=changed)
    assert np.array_equal(made["turned"], big[:10].T.astype(np.float64)) and made["small"].dtype == np.float64
    assert list(ckptcore.load(f"{run}/2", select=ckptcore.select.names("big"))) == ["big"]
    narrow = ckptcore.load(
        f"{run}/2",
        {"big": np.zeros(big.shape, np.float16), "small": np.zeros(3), "turned": PLACEHOLDER},
        matching=ckptcore.Matching(cast="narrowing"),
    )
    assert np.array_equal(narrow["big"], big.astype(np.float16))
    ckptcore.copy(f"{run}/2", f"{run}/converted", layout="dcp")
    ckptcore.delete(f"{run}/2")
    ckptcore.delete(f"{run}/1")
    assert same_value(ckptcore.load(f"{run}/converted"), {"big": big, "small": np.zeros(3), "turned": big[:10]})


def test_only_given_leaves_are_written(run: str) -> None:
    ckptcore.save(f"{run}/1", {f"a{number}": np.full(10_000, float(number)) for number in range(10)})
    ckptcore.save(f"{run}/2", {"a3": np.zeros(10_000)}, strategy=ckptcore.Update(f"{run}/1"))
    written = objects_at(f"{run}/2")
    assert set(written) == {"checkpoint.json", "model.safetensors"}
    assert len(written["model.safetensors"]) < 80_000 + 1000 and len(written["checkpoint.json"]) < 6000


_KEYS = st.sampled_from(["a", "b", "c"])


def _trees(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.builds(
        lambda size, seed: np.random.default_rng(seed).integers(0, 9, size), st.integers(0, 40), st.integers(0, 99)
    )
    child = leaf if depth == 0 else st.one_of(leaf, st.integers(0, 5), _trees(depth - 1))
    return st.dictionaries(_KEYS, child, max_size=3)


def _over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _over(below[key], value) if key in below else value for key, value in above.items()}}


def _nbytes(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(map(_nbytes, tree.values()))
    return int(tree.nbytes) if isinstance(tree, np.ndarray) else 0


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(generations=st.lists(_trees(), min_size=1, max_size=5), layout=st.sampled_from(["safetensors", "dcp", "ocdbt"]))
def test_any_chain_of_updates_loads_as_the_merged_tree(
    generations: list[dict[str, Any]], layout: str, tmp_path: Path
) -> None:
    run = new_place("memory", tmp_path)
    expected = generations[0]
    ckptcore.save(f"{run}/0", expected, layout=layout)
    for number, update in enumerate(generations[1:], 1):
        ckptcore.save(f"{run}/{number}", update, strategy=ckptcore.Update(f"{run}/{number - 1}"), layout=layout)
        expected = _over(expected, update)
        assert same_value(ckptcore.load(f"{run}/{number}"), expected)
        elements = sum(len(data) for key, data in objects_at(f"{run}/{number}").items() if key != "checkpoint.json")
        assert elements <= _nbytes(update) + 12_000, "more than the changed arrays was written"
    last = len(generations) - 1
    ckptcore.copy(f"{run}/{last}", f"{run}/copied")
    for number in range(last, -1, -1):
        ckptcore.delete(f"{run}/{number}")
    assert same_value(ckptcore.load(f"{run}/copied"), expected)


def test_a_state_that_does_not_fit_its_base_is_refused(run: str) -> None:
    ckptcore.save(f"{run}/1", _state())
    for state, match in (
        ({"nothing": PLACEHOLDER}, "nothing: the update has a placeholder, but the base has nothing"),
        ({"layers": {"x": np.ones(1)}}, "layers: the update has some children of a container, and the base has a list"),
        ({"layers": [PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, np.ones(1)]}, r"layers: the update has .* without \['3'\]"),
    ):
        with pytest.raises(TreeMismatchError, match=match):
            ckptcore.save(f"{run}/2", state, strategy=ckptcore.Update(f"{run}/1"))
    assert objects_at(f"{run}/2") == {}
    # A container without placeholders replaces the stored one.
    ckptcore.save(f"{run}/2", {"layers": [np.ones(1)], "model": np.zeros(2)}, strategy=ckptcore.Update(f"{run}/1"))
    loaded = ckptcore.load(f"{run}/2")
    assert same_value(loaded["layers"], [np.ones(1)]) and same_value(loaded["model"], np.zeros(2))


def test_which_bases_are_allowed(run: str, tmp_path: Path) -> None:
    state = {"a": np.ones(2)}
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.save(f"{run}/2", state, strategy=ckptcore.Update(f"{run}/1"))
    ckptcore.save(f"{run}/1", _state())
    with pytest.raises(InvalidLocationError, match="itself"):
        ckptcore.save(f"{run}/1", state, strategy=ckptcore.Update(f"{run}/1"), overwrite=True)
    ckptcore.save(f"{run}/2", state, strategy=ckptcore.Update(f"{run}/1"))
    with pytest.raises(InvalidLocationError, match="would replace"):
        ckptcore.save(f"{run}/1", state, strategy=ckptcore.Update(f"{run}/2"), overwrite=True)
    with pytest.raises(InvalidLocationError, match="another storage"):
        ckptcore.save(
            "memory://other-storage/x/2" if run.startswith("file") else tmp_path / "x",
            state,
            strategy=ckptcore.Update(f"{run}/1"),
        )
    elsewhere = f"{run}-elsewhere/sub/2"
    with pytest.raises(InvalidLocationError, match=r'bases="anywhere"'):
        ckptcore.save(elsewhere, state, strategy=ckptcore.Update(f"{run}/1"))
    anywhere = ckptcore.Context(io=ckptcore.context.IOOptions(bases="anywhere"))
    ckptcore.save(elsewhere, state, strategy=ckptcore.Update(f"{run}/1"), context=anywhere)
    with pytest.raises(InvalidLocationError, match=r'bases="anywhere"'):
        ckptcore.load(elsewhere)
    assert same_value(ckptcore.load(elsewhere, context=anywhere), {**_state(), **state})
    ckptcore.save(f"{run}-elsewhere/3", {"b": np.ones(1)}, strategy=ckptcore.Update(elsewhere), context=anywhere)
    loaded = ckptcore.load(f"{run}-elsewhere/3", context=anywhere)
    assert same_value(loaded, {**_state(), **state, "b": np.ones(1)})


def test_errors_name_a_deleted_or_replaced_base(run: str) -> None:
    ckptcore.save(f"{run}/1", _state())
    ckptcore.save(f"{run}/2", {"step": 2}, strategy=ckptcore.Update(f"{run}/1"))
    ckptcore.save(f"{run}/1", _state(), overwrite="non-atomic")
    for look in (ckptcore.load, ckptcore.metadata):
        with pytest.raises(
            CorruptCheckpointError, match=r"/2 has arrays in .*/1 \(save .*was replaced by another save"
        ):
            look(f"{run}/2")
    assert not ckptcore.verify(f"{run}/2").ok
    ckptcore.delete(f"{run}/1")
    with pytest.raises(CorruptCheckpointError, match=r"/1 \(save .*was deleted"):
        ckptcore.load(f"{run}/2")


def test_damage_of_a_base_is_found_and_named(tmp_path: Path) -> None:
    run = f"{tmp_path}/run"
    ckptcore.save(f"{run}/1", {"a": np.ones(5), "b": np.ones(6)})
    ckptcore.save(f"{run}/2", {"a": np.zeros(4)}, strategy=ckptcore.Update(f"{run}/1"))
    file = Path(run) / "1" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"run/1: .*this is in .*b"):
        ckptcore.load(f"{run}/2")
    report = ckptcore.verify(f"{run}/2")
    assert [problem.arrays for problem in report.problems] == [("b",)]


def test_a_base_with_updates_is_not_deleted(run: str) -> None:
    ckptcore.save(f"{run}/1", _state())
    ckptcore.save(f"{run}/2", {"step": 2}, strategy=ckptcore.Update(f"{run}/1"))
    ckptcore.save(f"{run}/3", {"step": 3}, strategy=ckptcore.Update(f"{run}/2"))
    with pytest.raises(CheckpointReferredError, match="/1 cannot be deleted, because 2, 3 .* refer to its arrays"):
        ckptcore.delete(f"{run}/1")
    ckptcore.delete(f"{run}/2")  # step 3 refers to the first base directly
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(f"{run}/1")
    assert same_value(ckptcore.load(f"{run}/3"), {**_state(), "step": 3})
    ckptcore.delete(f"{run}/3")
    ckptcore.delete(f"{run}/1")


def test_a_checkpointer_keeps_the_bases_of_its_steps(run: str) -> None:
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
        checkpointer.save(1, _state())
        checkpointer.wait()
        ckptcore.save(f"{run}/2", {"step": 2}, strategy=ckptcore.Update(f"{run}/1"))
        ckptcore.save(f"{run}/best", {"step": 9}, strategy=ckptcore.Update(f"{run}/1"))
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
        with pytest.raises(CheckpointReferredError, match="best"):
            checkpointer.delete(1)
        checkpointer.save(3, _state())
    assert ckptcore.CheckpointReader(run).steps == (1, 3), "2 is given up, and 1 has arrays of another"
    assert ckptcore.load(f"{run}/best")["step"] == 9
    ckptcore.delete(f"{run}/best")
    with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
        checkpointer.save(4, _state())
    assert ckptcore.CheckpointReader(run).steps == (4,)


@pytest.mark.parametrize("verify", ["passing", "read-back"])
def test_a_copy_includes_the_base_of_an_update(verify: Any, run: str) -> None:
    ckptcore.save(f"{run}/1", _state(), layout="dcp")
    ckptcore.save(f"{run}/2", {"step": 2}, strategy=ckptcore.Update(f"{run}/1"), layout="dcp", metadata={"x": 1})
    report = ckptcore.copy(f"{run}/2", f"{run}-copy/2", verify=verify)
    assert report.sent_bytes == report.nbytes == sum(map(len, objects_at(f"{run}-copy/2").values()))
    again = ckptcore.copy(f"{run}/2", f"{run}-copy/2", verify=verify)
    assert again.kept_bytes == again.nbytes == report.nbytes and again.sent_bytes == 0
    steps = ckptcore.copy_steps(run, f"{run}-steps")
    assert set(steps.steps) == {1, 2}
    ckptcore.delete(f"{run}/2")
    ckptcore.delete(f"{run}/1")
    for copy in (f"{run}-copy/2", f"{run}-steps/2"):
        assert same_value(ckptcore.load(copy), {**_state(), "step": 2})
        assert ckptcore.verify(copy).ok and ckptcore.metadata(copy).custom == {"x": 1}


def test_a_base_that_is_deleted_during_an_update(run: str) -> None:
    """Either the update fails with an error, or it exists and the deletion of its base was refused."""
    ckptcore.save(f"{run}/0/1", _state())
    plan = FaultPlan()
    ckptcore.save(
        through(f"{run}/0/2"),
        {"step": 2},
        strategy=ckptcore.Update(through(f"{run}/0/1")),
        context=faulty_context(run, plan),
    )
    committed = max(
        operation.number for operation in plan.operations
        if operation.name == "rename" or (operation.name == "put" and operation.keys[0].endswith("2/checkpoint.json"))
    )  # fmt: skip
    outcomes: set[type[CheckpointError]] = set()
    for operation in itertools.islice(plan.operations, 0, committed - 1):
        own = f"{run}/{operation.number + 1}"
        ckptcore.save(f"{own}/1", _state())

        refused: list[CheckpointError] = []

        def delete(own: str = own, refused: list[CheckpointError] = refused) -> None:
            try:
                ckptcore.delete(f"{own}/1")
            except CheckpointReferredError as error:
                refused.append(error)

        context = faulty_context(run, InterruptedPlan(operation.number, delete))
        try:
            ckptcore.save(
                through(f"{own}/2"), {"step": 2}, strategy=ckptcore.Update(through(f"{own}/1")), context=context
            )
        except (SaveLostError, CheckpointNotFoundError, CorruptCheckpointError) as error:
            outcomes.add(type(error))
            with pytest.raises(CheckpointNotFoundError):
                ckptcore.load(f"{own}/2")
            assert not refused
        else:
            assert refused, f"saved, with its base deleted at {operation}"
            outcomes.add(CheckpointReferredError)
            assert ckptcore.load(f"{own}/2")["step"] == 2
    assert outcomes >= ({CheckpointReferredError} if run.startswith("file") else {SaveLostError})


def test_ranks_of_a_job_update_their_parts(run: str) -> None:
    whole = np.arange(24.0).reshape(8, 3)
    ckptcore.save(f"{run}/1", {"w": np.zeros(4), "kept": np.ones(5), "layers": {"0": np.zeros(2), "1": np.zeros(2)}})

    def job(coordinator: Coordinator) -> None:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            io=ckptcore.context.IOOptions(threads=1),
            durability="none",
        )
        rank = coordinator.rank
        part = ckptcore.ShardedArray.part(whole[4 * rank : 4 * rank + 4], (4 * rank, 0), (8, 3), cuts=((4,), ()))
        update = {"w": part, "layers": {str(rank): np.full(3, rank)}}
        ckptcore.save(f"{run}/2", update, strategy=ckptcore.Update(f"{run}/1"), layout="zarr3", context=context)

    ThreadJob(2, timeout_seconds=30).run(job)
    expected = {"w": whole, "kept": np.ones(5), "layers": {"0": np.full(3, 0), "1": np.full(3, 1)}}
    assert same_value(ckptcore.load(f"{run}/2"), expected)


def test_an_empty_update_refers_to_all_arrays_of_its_base(run: str) -> None:
    ckptcore.save(f"{run}/1", _state())
    for number, state in enumerate(({}, PLACEHOLDER), 2):
        ckptcore.save(f"{run}/{number}", state, strategy=ckptcore.Update(f"{run}/1"))
        assert same_value(ckptcore.load(f"{run}/{number}"), _state())


def test_an_update_of_all_arrays_does_not_refer_to_its_base(run: str) -> None:
    ckptcore.save(f"{run}/1", {"a": np.ones(2), "step": 1})
    ckptcore.save(f"{run}/2", {"a": np.zeros(2)}, strategy=ckptcore.Update(f"{run}/1"))
    ckptcore.delete(f"{run}/1")
    assert same_value(ckptcore.load(f"{run}/2"), {"a": np.zeros(2), "step": 1})


def test_a_checkpoint_of_other_software_is_no_base(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"a": np.ones(2)}, layout=ckptcore.SafetensorsLayout(standalone=True))
    (tmp_path / "1" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"not written by ckptcore.*ckptcore\.copy"):
        ckptcore.save(tmp_path / "2", {"b": 1}, strategy=ckptcore.Update(tmp_path / "1"))


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_a_failed_update_keeps_its_base_and_a_usable_location(moment: Any, run: str) -> None:
    ckptcore.save(f"{run}/0/1", _state())
    plan = FaultPlan()
    ckptcore.save(
        through(f"{run}/0/2"),
        {"step": 2},
        strategy=ckptcore.Update(through(f"{run}/0/1")),
        context=faulty_context(run, plan),
    )
    outcomes = set()
    for operation in plan.operations:
        own = f"{run}/{operation.number + 1}"
        ckptcore.save(f"{own}/1", _state())
        dying = faulty_context(run, FaultPlan(CrashAt(operation.number, moment)))
        with pytest.raises(SimulatedCrash):
            ckptcore.save(
                through(f"{own}/2"), {"step": 2}, strategy=ckptcore.Update(through(f"{own}/1")), context=dying
            )
        try:
            outcomes.add(ckptcore.load(f"{own}/2")["step"])
        except CheckpointNotFoundError:
            outcomes.add(None)
        ckptcore.save(f"{own}/2", {"step": 3}, strategy=ckptcore.Update(f"{own}/1"), overwrite="non-atomic")
        assert same_value(ckptcore.load(f"{own}/2"), {**_state(), "step": 3}), f"died {moment} {operation}"
    assert outcomes == {None, 2}


@pytest.mark.parametrize("matching", [ckptcore.Matching(), ckptcore.Matching(cast="narrowing")])
def test_ranks_load_an_update_together(matching: ckptcore.Matching, run: str) -> None:
    """One rank reads each array, from either checkpoint, and sends it to the others."""
    size, big = 3, np.arange(60_000.0).reshape(300, 200)
    ckptcore.save(f"{run}/1", {"big": big, "new": np.ones(3), "tied": (tied := np.arange(9.0)), "again": tied})
    ckptcore.save(f"{run}/2", {"new": np.zeros((40, 5))}, strategy=ckptcore.Update(f"{run}/1"), layout="zarr3")
    network = ThreadNetwork(size, timeout_seconds=20)
    dtype = np.float32 if matching.cast == "narrowing" else np.float64
    abstract = {
        "big": ckptcore.AbstractArray(big.shape, np.dtype(dtype).name),
        "new": np.zeros((40, 5)),
        "tied": ...,
        "again": tied,
    }

    def load(coordinator: Coordinator) -> tuple[Any, int]:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(
                coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads="broadcast"
            )
        )
        report = ckptcore.results.LoadReport()
        loaded = ckptcore.load(f"{run}/2", abstract, context=context, matching=matching, report=report)
        return loaded, report.bytes_read

    loaded = ThreadJob(size, timeout_seconds=20).run(load)
    for tree, _ in loaded:
        assert np.array_equal(tree["big"], big.astype(dtype)) and tree["big"].dtype == dtype
        assert np.array_equal(tree["new"], np.zeros((40, 5))) and np.array_equal(tree["again"], tied)
    assert sum(nbytes for _, nbytes in loaded) < 2.5 * big.nbytes, "it was read by more than one rank"


def test_an_update_has_no_exports(run: str) -> None:
    ckptcore.save(f"{run}/1", {"a": np.ones(3)})
    export = ckptcore.Export(location=f"{run}/3")
    with pytest.raises(ValueError, match="do not support exports"):
        ckptcore.save(f"{run}/2", {}, strategy=ckptcore.WithExports([export], ckptcore.Update(f"{run}/1")))


_IMPORTS = """
import sys, threading
import ckptcore

late = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name.startswith("ckptcore-save") and name.startswith("ckptcore"):
            late.append(name)

sys.meta_path.insert(0, Finder())
run = sys.argv[1]
ckptcore.save_async(f"{run}/b", {"n": 4}, strategy=ckptcore.Update(f"{run}/a")).result()
assert not late, late
"""


@pytest.mark.system
def test_the_thread_of_an_update_imports_no_module_of_ours(tmp_path: Path) -> None:
    """If a thread is importing a module during a fork, an import of this module hangs in the child."""
    ckptcore.save(tmp_path / "a", {"w": np.arange(3), "n": 3})
    program = [sys.executable, "-c", _IMPORTS, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
