"""Casts and shape changes that differ between the ranks of a shared load. Equal requests are read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.strategies import partitions
from ckptcore_transforms import Cast, Default, Rename, Scale, Stack, Transform, Transpose
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore import AbstractArray, ArrayShard, Context, Matching, ShardedArray
from ckptcore.context import IOOptions, JobOptions, MemoryOptions
from ckptcore.results import LoadReport

NARROWING = Matching(cast="narrowing", shapes={"pad", "truncate", "reshape"}, unexpected="ignore")


def run(size: int, work: Callable[[Context, int], Any], **options: Any) -> tuple[Sequence[Any], ThreadNetwork]:
    """Run the work on each rank. Return the results, and the network with the messages sent."""
    network, job = ThreadNetwork(size, timeout_seconds=60), ThreadJob(size, timeout_seconds=60)

    def of_rank(coordinator: Any) -> Any:
        collectives = network.collectives(coordinator.rank)
        context = Context(
            job=JobOptions(coordinator=coordinator, collectives=collectives, reads="broadcast"), **options
        )
        return work(context, coordinator.rank)

    return job.run(of_rank), network


LAYERS = {
    f"layers.{number}.w": np.arange(number, number + 4096, dtype=np.float32).reshape(64, 64) for number in range(4)
}
STATE: dict[str, Any] = {**LAYERS, "embed": np.arange(8192.0).reshape(128, 64), "ids": np.arange(100)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "c", STATE, context=Context(durability="none", io=IOOptions(checksums=False)))
    return tmp_path / "c"


@pytest.mark.parametrize("layout", ["safetensors", "zarr3", "dcp"])
def test_stages_of_a_pipeline_cast_their_own_layers(tmp_path: Path, layout: str) -> None:
    """Two ranks load the first layers and two the last. All ranks load the embedding with a cast, and ids as stored."""
    ckptcore.save(tmp_path / "c", STATE, layout=layout, context=Context(durability="none"))

    def work(context: Context, rank: int) -> dict[str, Any]:
        own = [f"layers.{number}.w" for number in range(2 * (rank // 2), 2 * (rank // 2) + 2)]
        asked = {name: AbstractArray((64, 64), "bfloat16") for name in own}
        asked |= {"embed": AbstractArray((128, 64), "float32"), "ids": AbstractArray((100,), "int64")}
        loaded = ckptcore.load(tmp_path / "c", asked, matching=NARROWING, context=context)
        assert isinstance(loaded, dict)
        return loaded

    loaded, network = run(4, work)
    for rank, tree in enumerate(loaded):
        own = {f"layers.{number}.w" for number in range(2 * (rank // 2), 2 * (rank // 2) + 2)}
        assert set(tree) == own | {"embed", "ids"}
        for name in own:
            assert tree[name].tobytes() == STATE[name].astype(tree[name].dtype).tobytes()
        assert np.array_equal(tree["embed"], STATE["embed"].astype(np.float32))
        assert np.array_equal(tree["ids"], STATE["ids"])
    assert {members for _, members, _ in network.sent} == {(0, 1), (2, 3), (0, 1, 2, 3)}
    assert sum(nbytes for _, members, nbytes in network.sent if len(members) == 4) >= 128 * 64 * 4 + 800


def test_ranks_may_request_one_array_with_different_shapes_and_dtypes(saved: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"embed": AbstractArray((128, 64), "float16"), "ids": AbstractArray((100,), "int64")},
        {"embed": AbstractArray((128, 64), "float64"), "ids": AbstractArray((120,), "int64")},
        {"embed": AbstractArray((100, 64), "float16"), "ids": AbstractArray((100,), "int64")},
        {"embed": AbstractArray((128, 64), "float16"), "ids": AbstractArray((10, 10), "int64")},
    ]
    loaded, network = run(
        4, lambda context, rank: ckptcore.load(saved, asked[rank], matching=NARROWING, context=context)
    )
    for wanted, tree in zip(asked, loaded, strict=True):
        expected = STATE["embed"][: wanted["embed"].shape[0]].astype(wanted["embed"].dtype)
        assert np.array_equal(tree["embed"], expected) and tree["embed"].dtype == expected.dtype
    assert np.array_equal(loaded[1]["ids"], np.pad(STATE["ids"], (0, 20)))
    assert np.array_equal(loaded[3]["ids"], STATE["ids"].reshape(10, 10))
    assert {members for _, members, _ in network.sent} == {(0, 3), (0, 2)}


def test_ranks_with_and_without_casts_share_reads(saved: Path) -> None:
    reports = [LoadReport(), LoadReport()]

    def work(context: Context, rank: int) -> Any:
        asked: dict[str, Any] = {"embed": AbstractArray((128, 64), "float64")}
        if rank:
            asked["ids"] = AbstractArray((100,), "int32")
        return ckptcore.load(saved, asked, matching=NARROWING, context=context, report=reports[rank])

    loaded, network = run(2, work)
    assert all(np.array_equal(tree["embed"], STATE["embed"]) for tree in loaded)
    assert loaded[1]["ids"].dtype == np.int32 and {members for _, members, _ in network.sent} == {(0, 1)}
    assert sum(report.bytes_read for report in reports) <= STATE["embed"].nbytes + STATE["ids"].nbytes
    assert [list(report.changed) for report in reports] == [[], ["ids"]]


def test_each_rank_casts_transformed_arrays_as_it_requests(saved: Path) -> None:
    chain: list[Transform] = [Stack("layers.{i}.w", "w"), Transpose("w"), Scale("w", 2)]
    whole = np.stack(list(LAYERS.values())).swapaxes(1, 2) * 2

    def work(context: Context, rank: int) -> Any:
        asked = {
            "w": AbstractArray((4, 64, 64), ("float32", "float16", "float32")[rank]),
            "embed": AbstractArray((128, 64), "float64"),
        }
        return ckptcore.load(saved, asked, transforms=chain, matching=NARROWING, context=context)

    loaded, network = run(3, work)
    for tree in loaded:
        assert np.array_equal(tree["w"], whole.astype(tree["w"].dtype))
        assert np.array_equal(tree["embed"], STATE["embed"])
    assert {members for _, members, _ in network.sent} == {(0, 2), (0, 1, 2)}


def test_ranks_share_reads_of_tied_arrays_under_different_names(tmp_path: Path) -> None:
    tied = np.arange(4096.0)
    ckptcore.save(tmp_path / "c", {"a": tied, "b": tied, "c": tied}, context=Context(io=IOOptions(checksums=False)))
    reports = [LoadReport(), LoadReport()]

    def work(context: Context, rank: int) -> Any:
        asked = {"bc"[rank]: AbstractArray((4096,), "float32")}
        return ckptcore.load(tmp_path / "c", asked, matching=NARROWING, context=context, report=reports[rank])

    loaded, _ = run(2, work)
    assert loaded[0]["b"].tobytes() == loaded[1]["c"].tobytes() == tied.astype(np.float32).tobytes()
    assert sum(report.bytes_read for report in reports) == tied.nbytes


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_shared_load_returns_the_same_as_loads_without_a_job(data: st.DataObject) -> None:
    arrays = {name: np.arange(24, dtype=dtype).reshape(4, 6) for name, dtype in (("a", "f4"), ("b", "i4"), ("c", "f8"))}
    location = "memory://shared-adjustments/random"
    ckptcore.save(location, {**arrays, "tied": arrays["a"]}, overwrite="non-atomic")
    chain: list[Transform] = data.draw(
        st.sampled_from([[], [Transpose("*")], [Rename("a", "z"), Rename("z", "a"), Cast("b", "int64")]])
    )
    abstract = ckptcore.metadata(location, transforms=chain).abstract
    asked: list[dict[str, Any]] = []
    for _ in range(3):
        wanted: dict[str, Any] = {}
        for name in data.draw(st.lists(st.sampled_from(sorted(abstract)), unique=True, min_size=1)):
            shape = data.draw(st.sampled_from([abstract[name].shape, (5, 5), (3, 8), (24,)]))
            dtype = data.draw(st.sampled_from([abstract[name].dtype, np.dtype("f8"), np.dtype("c16")]))
            wanted[name] = AbstractArray(shape, dtype)
            if data.draw(st.booleans()):
                boxes = data.draw(partitions(shape))[:2]
                wanted[name] = ShardedArray(shape, dtype, [ArrayShard(box) for box in boxes])
        asked.append(wanted)
    memory = MemoryOptions(load_bytes=data.draw(st.sampled_from([None, 100])))
    alone = [ckptcore.load(location, wanted, transforms=chain, matching=NARROWING) for wanted in asked]
    loaded, _ = run(
        3,
        lambda context, rank: ckptcore.load(
            location, asked[rank], transforms=chain, matching=NARROWING, context=context
        ),
        memory=memory,
    )
    for expected, tree in zip(alone, loaded, strict=True):
        for name, leaf in expected.items():
            if isinstance(leaf, ShardedArray):
                for first, second in zip(leaf.shards, tree[name].shards, strict=True):
                    assert first.elements is not None and second.elements is not None
                    assert first.box == second.box and first.elements.tobytes() == second.elements.tobytes()
            else:
                assert leaf.dtype == tree[name].dtype and leaf.tobytes() == tree[name].tobytes()


ROWS, COLUMNS = 4096, 2048


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two matrices of 32 MiB without checksums, because verification reads whole blocks."""
    location = tmp_path_factory.mktemp("large") / "c"
    rng = np.random.default_rng(0)
    state = {f"l.{number}": rng.integers(0, 99, (ROWS, COLUMNS)).astype(np.float32) for number in range(2)}
    ckptcore.save(location, state, context=Context(durability="none", io=IOOptions(checksums=False)))
    return location


@pytest.mark.parametrize(
    ("chain", "times"),
    [
        ([Cast("l.0", "bfloat16")], 1),
        ([Transpose("l.0")], 1),
        ([Transpose("l.0"), Cast("l.0", "bfloat16"), Scale("l.0", 2)], 1),
        ([Stack("l.{i}", "l.0"), Transpose("l.0")], 2),
        ([Stack("l.{i}", "l.0", -1)], 2),
    ],
)
def test_messages_of_transformed_arrays_follow_storage_order(large: Path, chain: list[Transform], times: int) -> None:
    expected: Any = ckptcore.load(large, transforms=chain)
    reports = [LoadReport() for _ in range(4)]
    asked = {"l.0": AbstractArray(expected["l.0"].shape, expected["l.0"].dtype)}

    def work(context: Context, rank: int) -> None:
        loaded: Any = ckptcore.load(
            large,
            asked,
            transforms=chain,
            context=context,
            report=reports[rank],
            matching=Matching(unexpected="ignore"),
        )
        assert np.array_equal(loaded["l.0"], expected["l.0"])

    _, network = run(4, work)
    read = sum(report.bytes_read for report in reports)
    assert read <= 1.1 * times * ROWS * COLUMNS * 4
    assert len({rank for rank, _, _ in network.sent}) > 1, "several ranks read parts of the array"


@pytest.mark.parametrize("alike", [True, False])
def test_default_arrays_must_be_equal_on_all_ranks(saved: Path, alike: bool) -> None:
    def work(context: Context, rank: int) -> Any:
        own = np.full((4, 4), 1 if alike else rank, np.float32)
        return ckptcore.load(saved, transforms=[Default("head", own)], context=context)["head"]

    if alike:
        assert all((head == 1).all() for head in run(2, work)[0])
        return
    with pytest.raises(ExceptionGroup) as caught:
        run(2, work)
    assert all("different options" in str(error) for error in caught.value.exceptions)
