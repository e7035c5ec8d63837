"""Jobs of real processes: arrays on some devices or in host memory, strided shards, and counts of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import ckptcore
from tests.jobs.counting import assert_frugal
from tests.jobs.optimizer_stages import load_whole, load_whole_by_torch
from tests.jobs.processes import run_job
from tests.jobs.topologies import LAYOUTS, WHOLE

JAX: Final = "tests.jobs.jax_program"
TORCH: Final = "tests.jobs.torch_program"
SHARING: Final = ("zarr3", "ocdbt", "dcp")
"""Layouts in which replicas share the work."""


def _of_jax(task: str, directory: Path, layouts: Sequence[str] = LAYOUTS) -> list[Any]:
    return run_job(JAX, task, directory, size=2, devices=2, layouts=layouts)


def _of_torch(task: str, directory: Path, layouts: Sequence[str] = LAYOUTS, size: int = 4) -> list[Any]:
    return run_job(TORCH, task, directory, size=size, layouts=layouts)


def _expect_submeshes_of_jax(directory: Path, layout: str) -> None:
    rows = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
    location = directory / f"submeshes-{layout}"
    loaded = ckptcore.load(location)
    for owner in range(2):
        assert np.array_equal(loaded[f"of {owner}"], rows + owner)
        assert loaded[f"one of {owner}"].tolist() == [owner, 1 + owner, 2 + owner]
    assert loaded["tied"] is loaded["to it"] and np.array_equal(loaded["tied"], rows * 2)
    assert ckptcore.verify(location).ok
    tree = ckptcore.metadata(location).tree
    assert {str(tree.paths[leaf][0]): ranks for leaf, ranks in tree.held_by.items()} == {
        "tied": (1,),
        "to it": (1,),
        **{f"{name} {owner}": (owner,) for name in ("of", "one of", "keys of") for owner in range(2)},
    }


def _expect_submeshes_of_torch(directory: Path, layout: str) -> None:
    loaded = ckptcore.load(directory / f"submeshes-{layout}")
    rows = np.arange(30, dtype=np.float32).reshape(5, 6)
    for number, name in enumerate(("first", "last", "one")):
        assert all(np.array_equal(loaded[name][kind], rows * 2 + number) for kind in ("rows", "columns", "all"))
    assert loaded["last"]["tied"] is loaded["last"]["rows"]
    assert ckptcore.verify(directory / f"submeshes-{layout}").ok


def _expect_stages(directory: Path, layout: str) -> None:
    loaded = _flat(ckptcore.load(directory / f"stages-{layout}"))
    names = set()
    for number in range(2):
        with np.load(directory / f"stage-{number}.npz") as expected:
            names.update(expected)
            assert all(np.array_equal(loaded[name], expected[name]) for name in expected)
    assert names == set(loaded) - {"step"}


def _expect_strided(directory: Path, layout: str) -> None:
    loaded = ckptcore.load(directory / f"strided-{layout}")["model"]
    with np.load(directory / "strided.npz") as expected:
        assert set(loaded) == set(expected)
        assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix[1:]: state}
    return {name: leaf for key, value in state.items() for name, leaf in _flat(value, f"{prefix}.{key}").items()}


def test_a_sample_of_jax(tmp_path: Path) -> None:
    results = _of_jax("quick", tmp_path, ["ocdbt"])
    _expect_submeshes_of_jax(tmp_path, "ocdbt")
    assert_frugal(results, "ocdbt", shared=True)


def test_a_sample_of_torch(tmp_path: Path) -> None:
    results = _of_torch("quick", tmp_path, ["zarr3"])
    for expect in (_expect_submeshes_of_torch, _expect_stages, _expect_strided):
        expect(tmp_path, "zarr3")
    load_whole(tmp_path, "dcp")
    load_whole_by_torch(tmp_path)
    assert_frugal(results, "zarr3", shared=True)


@pytest.mark.parametrize("job", [_of_jax, _of_torch], ids=["jax", "torch"])
def test_ranks_that_differ_and_a_rank_that_is_late(job: Any, tmp_path: Path) -> None:
    names = ["generator", "half and half"] if job is _of_torch else ["key", "position", "large"]
    results = run_job(TORCH if job is _of_torch else JAX, "unequal", tmp_path, size=2, layouts=SHARING)
    ranks = "; ".join([f"rank {rank}" for rank in range(len(results))])
    for of_rank in results:
        refused = of_rank["refused"]
        for layout in SHARING:
            for name in names:
                message = refused.pop(f"{layout} {name}")
                assert f"own: different on {ranks}\n" in message and "PerProcess" in message
        if job is _of_torch:
            statistics = refused.pop("statistics")
            assert "['module.running_mean']: different on " in statistics
            assert "torch.distributed.broadcast" in statistics
        assert refused == {}
    leader, *others, late = [of_rank["lines"] for of_rank in results]
    size = len(results)
    (line,) = leader
    assert f"late: rank 0 has waited 0.1 s for 1 of {size} ranks: {size - 1}. All ranks of the job must" in line
    assert all(len(lines) == 1 and f"for 1 of {size} ranks: 0." in lines[0] for lines in others)
    assert late == []


@pytest.mark.slow
def test_arrays_on_some_processes_that_all_processes_have_in_their_trees(tmp_path: Path) -> None:
    for name, job, expect in (
        ("jax", _of_jax, _expect_submeshes_of_jax),
        ("torch", _of_torch, _expect_submeshes_of_torch),
    ):
        directory = tmp_path / name
        directory.mkdir()
        job("submeshes", directory)
        for layout in LAYOUTS:
            expect(directory, layout)


@pytest.mark.slow
def test_stages_of_a_pipeline_with_their_own_meshes(tmp_path: Path) -> None:
    _of_torch("stages", tmp_path)
    for layout in LAYOUTS:
        _expect_stages(tmp_path, layout)


@pytest.mark.slow
def test_strided_shards_are_saved_and_loaded(tmp_path: Path) -> None:
    _of_torch("strided", tmp_path)
    for layout in LAYOUTS:
        _expect_strided(tmp_path, layout)


@pytest.mark.slow
def test_arrays_in_host_memory(tmp_path: Path) -> None:
    _of_jax("offloaded", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("job", [_of_jax, _of_torch], ids=["jax", "torch"])
def test_every_byte_is_written_once_and_read_only_where_needed(job: Any, tmp_path: Path) -> None:
    results = job("counted", tmp_path)
    for layout in LAYOUTS:
        assert_frugal(results, layout, shared=layout in SHARING)


@pytest.mark.slow
def test_any_topology_loads_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    """The checkpoints come from one, two or four processes of torch, from one or two of JAX, and from NumPy."""
    for size in (1, 2, 4):
        _of_torch("save", tmp_path, size=size)
    for size in (1, 2):
        run_job(JAX, "save", tmp_path, size=size, devices=2, layouts=LAYOUTS)
    names = sorted(f"{job}-{layout}" for job in ("torch1", "torch2", "torch4", "jax1", "jax2") for layout in LAYOUTS)
    for size in (1, 2, 4):
        assert _of_torch("load", tmp_path, size=size) == [names] * size
    for size, devices in ((1, 2), (2, 2), (4, 1)):
        assert run_job(JAX, "load", tmp_path, size=size, devices=devices) == [names] * size
    for name in names:
        loaded = ckptcore.load(tmp_path / name)
        assert all(loaded[key].tobytes() == array.tobytes() for key, array in WHOLE.items())
