"""Slices in the layout safetensors: each process writes its parts of the arrays that no process holds whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, bit_patterns, run_ranks
from ckptcore_testing.trees import assert_same_tree

import ckptcore
from ckptcore import Export, SafetensorsLayout, WithExports
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Root
from ckptcore.commit.stored_root import read_root
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, ChecksumError, CorruptCheckpointError
from ckptcore.model import ArraySpec, Box, Shard
from ckptcore.planning import ChunkTable
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of
from tests.saving.test_failures import job_context


class Rows(HostArrayHandler):
    """A handler that deals out pieces of `rows` rows to the ranks in turn. The boxes of a rank are not adjacent."""

    def __init__(self, rows: int = 2) -> None:
        self.rows = rows

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        if not leaf.shape:
            return super().shards(leaf, rank, size)
        edges = list(range(0, leaf.shape[0], self.rows)) or [0]
        zeros = (0,) * (leaf.ndim - 1)
        boxes = [
            Box((first, *zeros), (min(first + self.rows, leaf.shape[0]), *leaf.shape[1:]))
            for number, first in enumerate(edges)
            if number % size == rank
        ]
        return [Shard(box) for box in boxes]


class Blocks(HostArrayHandler):
    """A handler that gives each rank adjacent rows, in two boxes side by side."""

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        if leaf.ndim != 2:
            return super().shards(leaf, rank, size)
        rows = -(-leaf.shape[0] // size)
        first, last = min(rank * rows, leaf.shape[0]), min((rank + 1) * rows, leaf.shape[0])
        half = leaf.shape[1] // 2
        return [Shard(Box((first, 0), (last, half))), Shard(Box((first, half), (last, leaf.shape[1])))]


DTYPES = ["float32", "bfloat16", "complex128", "int4", "float8_e4m3fn", "datetime64[ns]", "bool"]


def _state() -> dict[str, Any]:
    arrays = {name: bit_patterns(ArraySpec((7, 6), name)) for name in DTYPES}
    tied = np.arange(40.0).reshape(10, 4)
    return {
        **arrays,
        "tied": tied,
        "again": tied,
        "scalar": np.float32(3),
        "empty": np.zeros((0, 3)),
        "step": 5,
        "one": np.ones(1),
    }


def _save(location: Path, state: Any, handler: HostArrayHandler, *, size: int = 3, **options: Any) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(location, state, context=context, **options)

    run_ranks(size, job, timeout_seconds=60, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: handler}))


@pytest.mark.parametrize("handler", [Rows(), Rows(3), Blocks()], ids=["pieces", "larger pieces", "blocks"])
@pytest.mark.parametrize("max_file_bytes", [64, 1 << 30])
def test_slices_make_up_arrays(handler: HostArrayHandler, max_file_bytes: int, tmp_path: Path) -> None:
    state = _state()
    _save(tmp_path / "c", state, handler, layout=SafetensorsLayout(max_file_bytes=max_file_bytes))
    assert_same_tree(ckptcore.load(tmp_path / "c"), state)
    assert ckptcore.verify(tmp_path / "c").ok
    again = ckptcore.load(tmp_path / "c")
    assert again["tied"] is again["again"] or np.shares_memory(again["tied"], again["again"])
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout=SafetensorsLayout(max_file_bytes=max_file_bytes))
    assert_same_tree(ckptcore.load(tmp_path / "d"), state)
    assert not list((tmp_path / "d").glob("shard-*"))


def test_boxes_side_by_side_are_one_slice(tmp_path: Path) -> None:
    _save(tmp_path / "c", {"w": np.arange(24.0).reshape(4, 6)}, Blocks(), size=2)
    names = sorted(path.name for path in (tmp_path / "c").glob("*"))
    assert names == [
        "checkpoint.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    data = (tmp_path / "c" / names[2]).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["w"] == {"dtype": "F64", "shape": [2, 6], "data_offsets": [0, 96]}
    assert json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [2, 0]}}


@pytest.mark.parametrize("stem", ["model", "mine"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_file_of_slices_does_not_load_as_a_checkpoint(tmp_path: Path, stem: str, size: int) -> None:
    state = {"cut": np.ones((4, 4)), "w": np.arange(24.0).reshape(4, 6)}
    _save(tmp_path / "c", state, Blocks(), size=2, layout=SafetensorsLayout(stem=stem))
    first, second = sorted((tmp_path / "c").glob("shard-*"))
    for file in (first, second):
        with pytest.raises(CheckpointNotFoundError, match=f"^{file.name} has slices.*directory.*HuggingFace"):
            ckptcore.load(file)
    (tmp_path / "c" / "checkpoint.json").unlink()
    if size == 1:
        second.unlink()
    with pytest.raises(
        CorruptCheckpointError, match=rf"^{first.name} is part.*json is missing.*slices.*HuggingFace"
    ) as caught:
        ckptcore.load(tmp_path / "c")
    assert "name the file" not in str(caught.value)


def test_a_standalone_file_of_slices_does_not_load_as_a_checkpoint(tmp_path: Path) -> None:
    layout = SafetensorsLayout(stem="mine", standalone=True)
    _save(tmp_path / "c", {"w": np.arange(24.0).reshape(4, 6)}, Blocks(), size=2, layout=layout)
    (tmp_path / "c" / "checkpoint.json").unlink()
    first, second = sorted((tmp_path / "c").glob("shard-*"))
    second.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"^{first.name} has slices"):
        ckptcore.load(tmp_path / "c")


def test_arrays_that_one_process_holds_whole_stay_whole(tmp_path: Path) -> None:
    state = {"shared": np.arange(8.0), "cut": np.ones((4, 4))}

    class CutOnly(Rows):
        def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
            return super().shards(leaf, rank, size) if leaf.ndim == 2 else HostArrayHandler().shards(leaf, rank, size)

    _save(tmp_path / "c", state, CutOnly(), size=2, layout=SafetensorsLayout(max_file_bytes=1))
    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert [name.partition("-")[0] for name in names] == ["model", "shard", "shard"]
    assert_same_tree(ckptcore.load(tmp_path / "c"), state)


def test_a_partial_load_reads_only_the_slices_with_its_elements(tmp_path: Path) -> None:
    array = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    _save(tmp_path / "c", {"w": array}, Rows(16), size=4)
    for path in (tmp_path / "c").glob("shard-0000[24]*"):
        path.write_bytes(b"?" * path.stat().st_size)  # a load must not read these files

    class Part(HostArrayHandler):
        def wanted(self, abstract: Any, stored: Any) -> Sequence[Box]:
            return (Box((2, 5), (14, 1000)), Box((33, 0), (47, 9)))

        def build(self, abstract: Any, stored: Any, boxes: Any) -> object:
            return [elements for _, elements in boxes]

        def destination(self, abstract: Any, stored: Any, box: Box) -> None:
            return None

    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={ckptcore.AbstractArray: Part()}))
    wanted = {"w": ckptcore.AbstractArray((64, 1024), "float32")}
    first, second = ckptcore.load(tmp_path / "c", wanted, context=context)["w"]
    assert np.array_equal(first, array[2:14, 5:1000]) and np.array_equal(second, array[33:47, :9])
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path / "c")


def test_a_flipped_bit_in_a_slice_is_found_and_named(tmp_path: Path) -> None:
    _save(tmp_path / "c", {"w": np.ones((6, 50))}, Rows(), size=3)
    (path,) = (tmp_path / "c").glob("shard-00002*")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"w.*shard-00002|shard-00002.*w"):
        ckptcore.load(tmp_path / "c")
    assert not ckptcore.verify(tmp_path / "c").ok


def test_a_hostile_state_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "c", {"w": np.arange(12.0).reshape(6, 2), "v": np.ones((4, 3))}, Rows(), size=2)
    context = ckptcore.Context()
    location = resolve_location(tmp_path / "c", runtime_of(context).storages)
    root = read_root(location.store)
    assert isinstance(root, Root)
    tree = root.tree
    state: Any = root.state

    def changes(slices: dict[str, Any]) -> list[Any]:
        variants = []
        for column, values in slices.items():
            for value in (-1, 1 << 70, "x", None, 2.5, [1]):
                if (column, value) in (("files", "x"), ("offset", 1 << 70)):
                    continue  # detected later, by the sizes of files
                changed = copy.deepcopy(slices)
                changed[column] = [value, *values[1:]]
                variants.append(changed)
            variants += [{**slices, column: values[1:]}, {**slices, column: 3}]
            if column != "files":
                variants.append({**slices, column: values + values[:1]})
        swapped = {**slices, "box": [*slices["box"][4:8], *slices["box"][4:]]}  # one box twice, another box missing
        return [*variants, swapped, [], 3, "slices", {}]

    ChunkTable(tree, state).check([0])
    for changed in changes(state["slices"]):
        with pytest.raises(CorruptCheckpointError):
            table = ChunkTable(tree, {**state, "slices": changed})
            for leaf in (0, 1):
                table.check([leaf])
            raise AssertionError(f"accepted {changed}")


@pytest.mark.parametrize("limit", [None, 1 << 10])
def test_saves_in_the_background_and_exports_write_slices(limit: int | None, tmp_path: Path) -> None:
    state = {"model": {"w": np.arange(4000.0).reshape(40, 100)}, "optimizer": {"m": np.ones((40, 100))}}

    def job(coordinator: Coordinator) -> None:
        memory = ckptcore.context.MemoryOptions(save_bytes=limit)
        context = job_context(
            coordinator, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: Rows(3)}), memory=memory
        )
        exports = [Export(location=tmp_path / "weights", subtree="model")]
        ckptcore.save_async(tmp_path / "c", state, strategy=WithExports(exports), context=context).result()

    ThreadJob(3, timeout_seconds=60).run(job)
    assert np.array_equal(ckptcore.load(tmp_path / "c")["optimizer"]["m"], state["optimizer"]["m"])
    assert np.array_equal(ckptcore.load(tmp_path / "weights")["w"], state["model"]["w"])
    ckptcore.copy(tmp_path / "weights", tmp_path / "plain", subtree=())
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["checkpoint.json", "model.safetensors"]
    assert np.array_equal(ckptcore.load(tmp_path / "plain")["w"], state["model"]["w"])


def test_the_memory_of_an_item_is_released_with_its_last_slice(tmp_path: Path) -> None:
    released: list[int] = []

    class Watching(SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            release = snapshot.release

            class Watched:
                plan = snapshot.plan
                take = staticmethod(snapshot.take)

                @staticmethod
                def release(item: int) -> None:
                    released.append(item)
                    release(item)

            return super().write(Watched(), store)

    _save(tmp_path / "c", {"a": np.ones((9, 2)), "b": np.ones((9, 3))}, Rows(1), size=1, layout=Watching())
    assert sorted(released) == [0, 1]
    _save(tmp_path / "d", {"a": np.ones((9, 2)), "b": np.ones((9, 3))}, Rows(1), size=3, layout=Watching())
    assert len(released) == 2 + 3 * 2
