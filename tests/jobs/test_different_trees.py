"""Jobs whose ranks have different parts of a tree, as in pipeline and expert parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.errors import CheckpointError, RankFailedError, TreeMismatchError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, LeafRecord, Pending, Ready, Shard

_LAYOUTS = ["safetensors", "ocdbt", "zarr3", "dcp"]


def _run(job: Callable[[int, ckptcore.Context], Any], size: int = 4, **options: Any) -> Sequence[Any]:
    return run_ranks(size, job, io=ckptcore.context.IOOptions(threads=1), durability="none", **options)


def _stage(rank: int, value: float = 1) -> dict[str, Any]:
    """Return the part of a rank in a model of two stages. Each stage is on two ranks."""
    stage = rank // 2
    layers = {str(number): {"w": np.full((3, 4), float(value + number))} for number in (2 * stage, 2 * stage + 1)}
    ends = {"head": np.arange(7)} if stage else {"embed": np.arange(5)}
    return {"layers": layers, "step": 7, "norm": np.full(2, float(value)), **ends}


def _save(location: object, state: Any, **options: Any) -> None:
    ckptcore.save(location, state, **options)  # type: ignore[arg-type]  # `options` has no types


def _save_async(location: object, state: Any, **options: Any) -> None:
    ckptcore.save_async(location, state, **options).result()  # type: ignore[arg-type]  # `options` has no types


@pytest.mark.parametrize("save", [_save, _save_async])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_stages_are_saved_as_one_tree_and_each_loads_its_own(layout: str, save: Any, tmp_path: Path) -> None:
    location = tmp_path / "c"

    def job(rank: int, context: ckptcore.Context) -> None:
        save(location, _stage(rank), layout=layout, context=context)
        assert same_value(ckptcore.load(location, _stage(rank, 0), context=context), _stage(rank))
        target = _stage(3 - rank, 0)  # the stage that this rank did not save
        ckptcore.load_into(location, target, context=context)
        assert same_value(target, _stage(3 - rank))

    _run(job)
    whole = ckptcore.load(location)
    assert list(whole) == ["layers", "step", "norm", "embed", "head"] and list(whole["layers"]) == ["0", "1", "2", "3"]
    assert [layer["w"][0, 0] for layer in whole["layers"].values()] == [1, 2, 3, 4]
    assert ckptcore.verify(location).ok


def test_a_load_may_omit_only_leaves_that_some_ranks_did_not_have(tmp_path: Path) -> None:
    _run(lambda rank, context: ckptcore.save(tmp_path / "c", _stage(rank), layout="zarr3", context=context))
    assert same_value(ckptcore.load(tmp_path / "c", {"step": 0, "norm": np.zeros(2)}), {"step": 7, "norm": np.ones(2)})
    for lacking in ("step", "norm"):
        asked = _stage(0)
        del asked[lacking]
        with pytest.raises(TreeMismatchError, match=f"unexpected: {lacking} is stored"):
            ckptcore.load(tmp_path / "c", asked)
    with pytest.raises(TreeMismatchError, match=r"missing: layers\['9'\]/w is not stored"):
        ckptcore.load(tmp_path / "c", {**_stage(0), "layers": {"9": {"w": np.zeros((3, 4))}}})


def test_the_root_lists_the_ranks_of_each_leaf_in_a_key_that_older_readers_ignore(tmp_path: Path) -> None:
    _run(lambda rank, context: ckptcore.save(tmp_path / "c", _stage(rank), layout="zarr3", context=context))
    root = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())
    assert root["version"] == 1
    assert root["tables"]["tree"]["held_by"] == [[[0, 1], [0, 1, 6]], [[2, 3], [2, 3, 7]]]


def test_trees_with_another_order_of_keys_are_the_same(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        names = ["a", "b", "c"]
        arrays = {name: np.full(3, ord(name)) for name in (names if rank else reversed(names))}
        ckptcore.save(tmp_path / "c", arrays, context=context)

    _run(job, 3)
    assert {name: array[0] for name, array in ckptcore.load(tmp_path / "c").items()} == {"a": 97, "b": 98, "c": 99}
    assert "held_by" not in (tmp_path / "c" / "checkpoint.json").read_text()


class _Counting(HostArrayHandler):
    """A handler that records the shapes that a rank writes."""

    def __init__(self) -> None:
        self.written: list[tuple[int, ...]] = []

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        self.written.append(leaf.shape)
        return super().view_on_host(leaf, boxes)

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        return HostArrayHandler().sample(leaf, stored, box)  # for comparisons, not for writes


def test_one_of_the_ranks_with_a_leaf_writes_it(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> list[tuple[int, ...]]:
        handler = _Counting()
        mine = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=context.job.coordinator),
            io=ckptcore.context.IOOptions(threads=1),
            plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: handler}),
        )
        ckptcore.save(tmp_path / "c", _stage(rank), layout="ocdbt", context=mine)
        return handler.written

    written = _run(job)
    assert sorted(shape for of_rank in written for shape in of_rank) == [
        (2,),
        (3, 4),
        (3, 4),
        (3, 4),
        (3, 4),
        (5,),
        (7,),
    ]
    assert (7,) in written[2] and (5,) in written[0]


@dataclass
class _Rows:
    """Rows of an array that is sharded over a mesh of some ranks. Each rank of the mesh has equally many rows."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    rank: int
    rows: HostArray


class _RowsHandler(HostArrayHandler):
    def describe(self, leaf: Any) -> LeafRecord:
        if not isinstance(leaf, _Rows):
            return super().describe(leaf)
        each = leaf.shape[0] // len(leaf.mesh)
        return ArrayRecord(ArraySpec(leaf.shape, "float64"), cuts=(tuple(range(each, leaf.shape[0], each)), ()))

    def identity(self, leaf: Any) -> None:
        return None

    def shards(self, leaf: Any, rank: int, size: int) -> Any:  # None if only other ranks hold shards
        if leaf.rank not in leaf.mesh:
            return None
        each, place = leaf.shape[0] // len(leaf.mesh), leaf.mesh.index(leaf.rank)
        return (Shard(Box((each * place, 0), (each * (place + 1), leaf.shape[1]))),)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        return [Ready(leaf.rows) for _ in boxes]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_arrays_over_some_of_the_ranks_are_complete(layout: str, tmp_path: Path) -> None:
    whole = np.arange(24.0).reshape(6, 4)

    def job(rank: int, context: ckptcore.Context) -> None:
        mesh = (0,) if rank == 0 else (1, 2, 3)
        rows = np.array_split(whole, len(mesh))[mesh.index(rank)]
        state = {"experts": {str(mesh[0]): {"w": _Rows((6, 4), mesh, rank, rows)}}, "step": 1}
        ckptcore.save(tmp_path / "c", state, layout=layout, context=context)

    _run(job, plugins=ckptcore.context.PluginOptions(handlers={_Rows: _RowsHandler()}))
    experts = ckptcore.load(tmp_path / "c")["experts"]
    assert list(experts) == ["0", "1"] and all(np.array_equal(expert["w"], whole) for expert in experts.values())


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_arrays_without_shards_on_some_ranks_are_complete(layout: str, tmp_path: Path) -> None:
    """Every rank has all arrays in its tree, but only some ranks hold elements."""
    whole = np.arange(24.0).reshape(6, 4)

    def state(rank: int) -> dict[str, Any]:
        meshes = {"one": (2,), "three": (0, 1, 3), "two": (0, 1)}
        tree: dict[str, Any] = {"same": np.ones(3)}
        for name, mesh in meshes.items():
            rows = np.array_split(whole, len(mesh))[mesh.index(rank)] if rank in mesh else np.empty((0, 4))
            tree[name] = _Rows((6, 4), mesh, rank, rows)
        return tree

    _run(
        lambda rank, context: ckptcore.save(tmp_path / "c", state(rank), layout=layout, context=context),
        plugins=ckptcore.context.PluginOptions(handlers={_Rows: _RowsHandler()}),
    )
    loaded = ckptcore.load(tmp_path / "c")
    assert all(np.array_equal(loaded[name], whole) for name in ("one", "three", "two"))
    held_by = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())["tables"]["tree"]["held_by"]
    assert [[2], [1]] in held_by and [[0, 1, 3], [2]] in held_by and [[0, 1], [3]] in held_by


def test_an_array_without_shards_on_any_rank_is_refused(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> str:
        known = _Rows((6, 4), (7,), rank, np.empty((0, 4)))
        states: list[dict[str, Any]] = [{"x": known}, {"x": known, str(rank): np.ones(2)}]
        for state in states:
            with pytest.raises(
                CheckpointError, match="(?s)x: no process of this job holds any shard|x: an array that only other proc"
            ):
                ckptcore.save(tmp_path / "c", state, layout="zarr3", context=context)
        with pytest.raises(CheckpointError, match="x: only other processes hold elements of the array.*saves alone"):
            ckptcore.save_checkpointables(tmp_path / "c", {"own": ckptcore.PerProcess(states[0])}, context=context)
        return "refused"

    assert (
        _run(job, plugins=ckptcore.context.PluginOptions(handlers={_Rows: _RowsHandler()})) == ["refused"] * 4
        and list(tmp_path.iterdir()) == []
    )


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_tied_arrays_on_different_ranks(layout: str, tmp_path: Path) -> None:
    """The embedding is tied to the head on the rank that has both. The other rank has only the head."""

    def state(rank: int) -> dict[str, Any]:
        shared = np.arange(6.0)
        return {"head": shared} if rank == 1 else {"embed": shared, "head": shared, "rank 0": 1}

    def job(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(tmp_path / "c", state(rank), layout=layout, context=context)
        loaded = ckptcore.load(tmp_path / "c", state(rank), context=context)
        assert same_value(loaded, state(rank)) and (rank == 1 or loaded["head"] is loaded["embed"])

    _run(job, 2)
    tree = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())["tables"]["tree"]
    assert tree["aliases"] == [[1, 0]]


def test_arrays_that_are_not_tied_on_every_rank_are_stored_separately(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        shared = np.arange(6.0)
        state = {"a": shared, "b": shared.copy() if rank else shared}
        ckptcore.save(tmp_path / "c", state, layout="zarr3", context=context)

    _run(job, 2)
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded["a"] is not loaded["b"] and np.array_equal(loaded["b"], np.arange(6.0))


def test_a_value_that_differs_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> str:
        with pytest.raises((TreeMismatchError, RankFailedError)) as caught:
            ckptcore.save(tmp_path / "c", {**_stage(rank), "step": rank // 3}, layout="zarr3", context=context)
        assert rank or caught.type is TreeMismatchError
        return str(caught.value)

    assert all("step: int 0 on ranks 0-2; int 1 on rank 3" in told and "PerProcess" in told for told in _run(job))
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_checkpointables_differs(tmp_path: Path) -> None:
    def objects(rank: int) -> dict[str, Any]:
        return {"model": _stage(rank), "same": {"x": np.ones(3)}, "own": ckptcore.PerProcess({"rank": rank})}

    def job(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save_checkpointables(tmp_path / "c", objects(rank), layout="ocdbt", context=context)
        loaded = ckptcore.load_checkpointables(tmp_path / "c", objects(rank), context=context)
        assert same_value(loaded["model"], _stage(rank)) and loaded["own"] == {"rank": rank}
        with pytest.raises(
            (TreeMismatchError, RankFailedError), match="(?s)in 'same': .*step: int 0 on rank 0.*rank 3"
        ):
            different = {**objects(rank), "same": {"step": rank}}
            ckptcore.save_checkpointables(tmp_path / "d", different, layout="ocdbt", context=context)

    _run(job)
    whole = ckptcore.load(tmp_path / "c" / "model")
    assert sorted(whole["layers"]) == ["0", "1", "2", "3"]


def test_ranks_with_different_trees_save_and_load_steps(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        with ckptcore.Checkpointer(tmp_path / "run", layout="zarr3", context=context) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, _stage(rank, step))
            checkpointer.wait()
            assert same_value(checkpointer.load(abstract=_stage(rank, 0)), _stage(rank, 2))

    _run(job)


@pytest.mark.parametrize("subtree", ["", "layers", "layers/3", "head"])
def test_exports_have_the_leaves_of_all_ranks(subtree: str, tmp_path: Path) -> None:
    export = ckptcore.Export(location=tmp_path / "export", layout="ocdbt", subtree=subtree)
    _run(
        lambda rank, context: ckptcore.save(
            tmp_path / "c", _stage(rank), layout="zarr3", strategy=ckptcore.WithExports([export]), context=context
        )
    )
    whole: Any = ckptcore.load(tmp_path / "c")
    for key in subtree.split("/") if subtree else ():
        whole = whole[key]
    assert same_value(ckptcore.load(tmp_path / "export"), whole)


def test_an_export_of_a_subtree_that_no_rank_has_is_refused(tmp_path: Path) -> None:
    export = ckptcore.Export(location=tmp_path / "export", layout="ocdbt", subtree="layers/9")

    def job(rank: int, context: ckptcore.Context) -> str:
        states = [_stage(rank), _stage(0)]  # different, and the same on every rank
        for state in states:
            with pytest.raises(CheckpointError, match=r"layers\['9'\]"):
                ckptcore.save(
                    tmp_path / "c", state, layout="zarr3", strategy=ckptcore.WithExports([export]), context=context
                )
        return "refused"

    assert _run(job) == ["refused"] * 4 and list(tmp_path.iterdir()) == []
