"""Saves by several processes: each process writes its data files, and the leader joins them into one database.

The leader copies no elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore.model import ArrayRecord, ArraySpec, Box, Shard, name_of_dtype
from ckptcore.planning import cuts_of
from ckptcore.protocols import Coordinator, Layout, LeafHandler

SIZE = 4
STEPS = {"even": (0, 8, 16, 24, 32), "uneven": (0, 3, 5, 8, 10)}
LAYOUTS = {
    "ocdbt": OcdbtLayout(),
    "ocdbt, small files and chunks": OcdbtLayout(chunk_bytes=64, data_file_bytes=100),
    "ocdbt, zstd": OcdbtLayout(compression="zstd", chunk_bytes=256),
    "ocdbt, zarr 2": OcdbtLayout(zarr_format=2),
    "zarr3": Zarr3Layout(chunk_bytes=64),
    "zarr": ZarrLayout(),
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array whose rows are divided between the processes of a job."""

    elements: np.ndarray[Any, Any]
    bounds: tuple[int, ...]

    def boxes(self) -> list[Box]:
        columns = self.elements.shape[1]
        return [Box((start, 0), (stop, columns)) for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]


class RowsHandler(LeafHandler):
    """A handler for saves of `Rows`. Loads return plain NumPy arrays."""

    priority = 0

    def describe(self, leaf: Rows) -> ArrayRecord:
        spec = ArraySpec(leaf.elements.shape, name_of_dtype(leaf.elements.dtype))
        return ArrayRecord(spec, cuts=cuts_of(spec.shape, leaf.boxes()))

    def identity(self, leaf: Rows) -> object:
        return id(leaf)

    def shards(self, leaf: Rows, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(leaf.boxes()[rank]),)

    def view_on_host(self, leaf: Rows, boxes: Sequence[Box]) -> Sequence[Any]:
        from ckptcore.model import Ready

        return [Ready(leaf.elements[box.slices]) for box in boxes]

    def copy_to_host(self, leaf: Rows, boxes: Sequence[Box], memory: Any) -> Sequence[Any]:
        return [memory.copy(leaf.elements[box.slices]) for box in boxes]

    def abstract(self, *_: Any) -> Any:
        raise NotImplementedError

    wanted = build = abstract


def state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    even = Rows(random.standard_normal((32, 6)).astype(np.float32), STEPS["even"])
    return {
        "even": even,
        "tied": even,
        "uneven": Rows(random.integers(0, 99, (10, 3)), STEPS["uneven"]),
        "all": np.arange(7.0),
        "step": 3,
    }


def loaded() -> dict[str, Any]:
    return {name: value.elements if isinstance(value, Rows) else value for name, value in state().items()}


def saved(location: Path, layout: Layout, *, background: bool = False) -> None:
    tree = state()

    def save(coordinator: Coordinator) -> None:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            plugins=ckptcore.context.PluginOptions(handlers={Rows: RowsHandler()}),
        )
        if background:
            ckptcore.save_async(location, tree, layout=layout, context=context).result(60)
        else:
            ckptcore.save(location, tree, layout=layout, context=context)

    ThreadJob(SIZE).run(save)


def assert_as_saved(tree: Any) -> None:
    for name, value in loaded().items():
        np.testing.assert_array_equal(tree[name], value, err_msg=name)
        assert np.asarray(tree[name]).dtype == np.asarray(value).dtype


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_divided_between_processes_load_as_whole_arrays(name: str, background: bool, tmp_path: Path) -> None:
    saved(tmp_path / "c", LAYOUTS[name], background=background)
    assert_as_saved(ckptcore.load(tmp_path / "c"))
    assert ckptcore.verify(tmp_path / "c").ok


@pytest.mark.parametrize("name", LAYOUTS)
def test_orbax_loads_a_save_by_several_processes(name: str, tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    saved(tmp_path / "c", LAYOUTS[name])
    assert_as_saved(v1.load(tmp_path / "c"))


def test_each_process_writes_its_own_elements_once(tmp_path: Path) -> None:
    saved(tmp_path / "c", OcdbtLayout(checksum=False))
    item = tmp_path / "c" / "state"
    sizes = [
        sum(path.stat().st_size for path in (item / f"ocdbt.process_{rank}" / "d").iterdir()) for rank in range(SIZE)
    ]
    of_each = 8 * 6 * 4
    assert all(of_each <= size for size in sizes)
    assert sum(sizes) <= 2 * sum(np.asarray(value).nbytes for value in loaded().values())
    data = state()["even"].elements.tobytes()
    (nodes,) = (item / "d").iterdir()
    for rank in range(SIZE):
        part = data[rank * of_each : (rank + 1) * of_each]
        holders = [path for path in tmp_path.rglob("*") if path.is_file() and part in path.read_bytes()]
        assert [path.parent.parent.name for path in holders] == [f"ocdbt.process_{rank}"]
        assert part not in nodes.read_bytes()


def test_another_number_of_processes_loads_it(tmp_path: Path) -> None:
    saved(tmp_path / "c", OcdbtLayout(chunk_bytes=32))

    def load(rank: int, context: ckptcore.Context) -> None:
        assert_as_saved(ckptcore.load(tmp_path / "c", context=context))

    run_ranks(3, load)
