"""Copies of replicas on hosts: each host can load its part from its own disk, and the far tier gets no copies."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_tiers import TieredDirectory
from ckptcore_tiers.host_saves import copied_boxes
from hypothesis import given
from hypothesis import strategies as st

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.context import ReplicaOptions
from ckptcore.errors import RankFailedError
from ckptcore.model import ArrayRecord, ArraySpec, Box, Node, Shard, TreeMetadata, WritePlan
from ckptcore.model.tree import LEAF
from ckptcore.planning.partition import cut_for_replicas, owners_of, written_boxes
from ckptcore.policies import SpecificSteps
from ckptcore.saving.descriptions import TreeDescription
from plugins.tiers.tests.test_hosts import HOSTS, empty, job, near_of, sharded
from tests.checkpointer.runs import Watch, keys_of

_NEVER = {"upload_policy": SpecificSteps([])}


def replicated(step: int, rank: int, size: int) -> dict[str, Any]:
    """Return a state that all ranks replicate, except for one sharded array."""
    return {
        **sharded(step, rank, size),
        "model": {"weight": np.full((64, 3), step, np.float32), "bias": np.full(5, step, np.int16)},
        "count": np.array(step),
        "tall": np.full((3, 64), step, np.float32, order="F"),
    }


def _save(steps: Sequence[int]) -> Any:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        for step in steps:
            assert run.save(step, replicated(step, rank, len(HOSTS))) is not None
            run.wait()

    return work


def _loaded(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> int:
    loaded = run.load_into({**replicated(-1, rank, len(HOSTS)), **empty(rank, len(HOSTS))})
    step = int(loaded["step"])
    for array in (loaded["model"]["weight"], loaded["model"]["bias"], loaded["count"], loaded["tall"]):
        assert (array == step).all()
    (shard,) = loaded["w"].shards
    assert (shard.elements == step).all()
    return step


@pytest.fixture
def far(tmp_path: Path) -> str:
    """A far tier on the local disk."""
    return str(tmp_path / "far" / "run")


def _options(**options: Any) -> dict[str, Any]:
    """Return the options of a job in which every process writes a piece of each replicated array."""
    return {"replicas": ReplicaOptions(piece_bytes=64), "layout": "dcp", **options}


# In safetensors the first rank writes all replicas, in dcp all ranks share them.
@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("hosts", [HOSTS, (0, 1, 2, 2)], ids=["2-hosts", "3-hosts"])
def test_a_step_loads_without_an_upload_on_the_hosts_that_saved_it(
    tmp_path: Path, far: str, hosts: Sequence[int], layout: str
) -> None:
    options = _options(hosts=hosts, layout=layout, tier=_NEVER)
    job(tmp_path, far, _save([1, 2]), **options)
    assert job(tmp_path, far, _loaded, **options) == [2] * 4
    assert CheckpointReader(far).steps == ()


def test_the_far_tier_gets_no_copies(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, _save([1]), **_options())
    near = [keys_of(near_of(tmp_path, host), "1") for host in (0, 1)]
    assert all(any("checkpoint.copies" in key for key in keys) for keys in near)
    arrays = [key for key in keys_of(far, "1") if key.endswith(".distcp")]
    assert len(arrays) == 4 and not any("checkpoint.copies" in key for key in keys_of(far, "1"))
    assert (CheckpointReader(far).load()["model"]["weight"] == 1).all()
    shutil.rmtree(tmp_path / "host-0")
    assert job(tmp_path, far, _loaded, **_options()) == [1] * 4


def _copies_on(place: Path, host: int) -> list[Path]:
    return sorted(Path(near_of(place, host), "1", "checkpoint.copies").rglob("*.safetensors"))


def test_a_damaged_copy_is_not_used(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, _save([1]), **_options())
    for path in _copies_on(tmp_path, 1):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert job(tmp_path, far, _loaded, **_options()) == [1] * 4


def test_copies_of_several_checkpointables(tmp_path: Path, far: str) -> None:
    def save(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        own = {"model": replicated(1, rank, 4)["model"], "mine": ckptcore.PerProcess({"rank": np.full(3, rank)})}
        assert run.save_checkpointables(1, own) is not None

    def load(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        loaded = run.load_checkpointables(abstract={"model": None, "mine": ckptcore.PerProcess(None)})
        assert (loaded["model"]["weight"] == 1).all() and (loaded["mine"]["rank"] == rank).all()

    job(tmp_path, far, save, **_options(tier=_NEVER))
    job(tmp_path, far, load, **_options(tier=_NEVER))


def test_copies_of_another_save_are_not_read(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, _save([1]), **_options())
    shutil.copytree(tmp_path / "host-1", tmp_path / "kept")
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host-{host}")
    shutil.rmtree(far)

    def again(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        run.save(1, {**replicated(100, rank, 4), **sharded(100, rank, 4)})

    job(tmp_path, far, again, **_options())
    kept = tmp_path / "kept" / "run" / "1" / "checkpoint.copies"
    there = Path(near_of(tmp_path, 1), "1", "checkpoint.copies")
    shutil.rmtree(there)
    kept.rename(there)
    assert job(tmp_path, far, _loaded, **_options()) == [100] * 4


@given(data=st.data())
def test_a_host_stores_each_of_its_elements_once(data: st.DataObject) -> None:
    """Draws boxes with several replicas, and distributes them over hosts at random."""
    rows, boxes, replicas = 24, data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([2, 3, 4]))
    size = boxes * replicas
    host_of = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    holder = data.draw(st.permutations(range(size)))  # the rank of each replica of each box
    step = rows // boxes
    record = ArrayRecord(ArraySpec((rows, 2), "int8"), cuts=(tuple(range(step, rows, step)), ()))
    tree = TreeMetadata(Node("list", (0,), (LEAF,)), (record,))
    split = cut_for_replicas(tree, ReplicaOptions(piece_bytes=data.draw(st.sampled_from([1, 8, 1000]))), size=size)
    (cut,) = split.tree.leaves
    assert isinstance(cut, ArrayRecord)
    shards: dict[int, Mapping[int, Sequence[Shard]]] = {}
    for number, rank in enumerate(holder):
        replica, place = divmod(number, boxes)
        shards[rank] = {0: [Shard(Box((place * step, 0), (place * step + step, 2)), replica, replicas)]}
    for host in set(host_of):
        ranks = [rank for rank in range(size) if host_of[rank] == host]
        counts = np.zeros((rows, 2), int)
        held = np.zeros((rows, 2), bool)
        for rank in ranks:
            owners = owners_of(split, rank=rank, size=size)
            of_host = {other: shards[other] for other in ranks}
            copied = [box for _, box in copied_boxes(split.tree, of_host, owners, rank)]
            for box in (*written_boxes(cut, shards[rank][0], owners.get(0)), *copied):
                counts[box.slices] += 1
            held[shards[rank][0][0].box.slices] = True
        assert (counts == held).all(), "each element that a host holds is on it once"


def test_a_failed_plan_on_one_rank_fails_save_on_all(tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = TreeDescription.plan

    def plan(self: TreeDescription, rank: int, size: int, save_id: str) -> WritePlan:
        if rank == 3:
            raise ValueError("the test wants it")
        return planned(self, rank, size, save_id)

    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> str:
        with pytest.raises((RankFailedError, ValueError)) as raised:
            run.save(1, replicated(1, rank, 4))
        return type(raised.value).__name__

    monkeypatch.setattr(TreeDescription, "plan", plan)
    assert job(tmp_path, far, work, **_options()) == ["RankFailedError"] * 3 + ["ValueError"]
