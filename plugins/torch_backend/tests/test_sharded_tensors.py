"""ShardedTensors: conformance tests, the shards of one process of a job, and DCP checkpoints of a real job."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ckptcore_torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckptcore_testing import LeafExample, LeafHandlerTests
from ckptcore_torch.sharded_tensors import ShardedTensorHandler, sharded_like
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

import ckptcore
from ckptcore.errors import PluginError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, ValueRecord
from tests.jobs.torch_groups import process_group

GOLDEN = Path(__file__).with_name("golden_sharded_tensors")
HANDLER = ShardedTensorHandler()


def sharded(
    whole: torch.Tensor, places: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]], group: Any = None
) -> ShardedTensor:
    """Create a ShardedTensor with the shards of rank 0.

    Args:
        whole: the elements of the whole tensor.
        places: the offsets, the sizes and the rank of every shard.
        group: the process group of the tensor. None: all processes.
    """
    shards = [ShardMetadata(list(start), list(sizes), f"rank:{rank}/cpu") for start, sizes, rank in places]
    local = []
    for shard, (start, sizes, rank) in zip(shards, places, strict=True):
        if rank == 0:
            part = whole[tuple([slice(low, low + size) for low, size in zip(start, sizes, strict=True)])]
            local.append(LocalShard(part.clone(), shard))
    metadata = ShardedTensorMetadata(shards, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=group)


QUARTERS = [((0, 0), (3, 2), 0), ((0, 2), (3, 5), 0), ((3, 0), (2, 2), 0), ((3, 2), (2, 5), 0)]


def example(whole: torch.Tensor) -> ShardedTensor:
    if dist.is_initialized():
        return sharded(whole, QUARTERS)
    with process_group():  # no group exists while pytest collects the tests, which creates the examples
        return sharded(whole, QUARTERS)


def elements(leaf: ShardedTensor) -> Any:
    whole = torch.empty(leaf.metadata().size, dtype=leaf.metadata().tensor_properties.dtype)
    for shard in leaf.local_shards():
        start, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole[tuple([slice(low, low + size) for low, size in zip(start, sizes, strict=True)])] = shard.tensor
    return whole.numpy()


def _add_one(leaf: ShardedTensor) -> None:
    for shard in leaf.local_shards():
        shard.tensor.add_(1)


WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)


@pytest.mark.usefixtures("alone")
class TestShardedTensorsConform(LeafHandlerTests):
    """Conformance tests in a process that holds all shards."""

    handler = HANDLER
    examples = (
        LeafExample(
            "float32",
            lambda: example(WHOLE),
            WHOLE.numpy(),
            elements,
            abstracts=(lambda: sharded_like(example(WHOLE), torch.float32),),
            mutate=_add_one,
        ),
        LeafExample(
            "int64",
            lambda: example(WHOLE.long()),
            WHOLE.long().numpy(),
            elements,
            abstracts=(lambda: example(WHOLE.long()),),
            mutate=_add_one,
        ),
    )


def test_the_plugin_has_a_handler_of_sharded_tensors() -> None:
    assert isinstance(ckptcore_torch.ckpt_leaf_handler(ShardedTensor), ShardedTensorHandler)


@pytest.mark.usefixtures("alone")
def test_sharded_tensors_load_as_other_kinds_of_arrays(tmp_path: Path) -> None:
    leaf = example(WHOLE)
    ckptcore.save(tmp_path / "c", {"w": leaf})
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], WHOLE.numpy())
    assert torch.equal(ckptcore.load(tmp_path / "c", {"w": torch.empty(5, 7, device="meta")})["w"], WHOLE)
    other = sharded(torch.zeros(5, 7), [((0, 0), (5, 4), 0), ((0, 4), (5, 3), 0)])
    places = [shard.tensor.data_ptr() for shard in other.local_shards()]
    ckptcore.load_into(tmp_path / "c", {"w": other})
    assert np.array_equal(elements(other), WHOLE.numpy())
    assert [shard.tensor.data_ptr() for shard in other.local_shards()] == places
    built = ckptcore.load(tmp_path / "c", {"w": sharded_like(other, torch.float32)})["w"]
    assert isinstance(built, ShardedTensor) and len(built.local_shards()) == 2
    assert np.array_equal(elements(built), WHOLE.numpy())
    with pytest.raises(TreeMismatchError, match=r"w: .*float32\[5, 7\]|w: shape"):
        ckptcore.load_into(tmp_path / "c", {"w": sharded(torch.zeros(5, 6), [((0, 0), (5, 6), 0)])})
    with pytest.raises(TreeMismatchError, match="w: dtype"):
        ckptcore.load_into(tmp_path / "c", {"w": sharded_like(other, torch.float64)})


def test_a_process_has_its_own_shards_and_knows_the_cuts_of_all() -> None:
    with process_group("fake", size=2):
        leaf = sharded(WHOLE, [((0, 0), (3, 7), 0), ((3, 0), (2, 7), 1)])
        record = HANDLER.describe(leaf)
        assert isinstance(record, ArrayRecord)
        assert (record.spec, record.cuts) == (ArraySpec((5, 7), "float32"), ((3,), ()))
        (shard,) = HANDLER.shards(leaf, 0, 2)
        assert (shard.box, shard.replica, shard.replicas) == (Box((0, 0), (3, 7)), 0, 1)
        assert HANDLER.wanted(leaf, record) == [shard.box]
        inner = Box((1, 2), (2, 6))
        (viewed,) = HANDLER.view_on_host(leaf, [inner])
        assert np.array_equal(viewed.result(), WHOLE.numpy()[inner.slices])
        with pytest.raises(PluginError, match="this process has no Box"):
            HANDLER.view_on_host(leaf, [Box((3, 0), (4, 1))])
        nothing = sharded(WHOLE, [((0, 0), (5, 7), 1)])
        assert HANDLER.shards(nothing, 0, 2) == [] and HANDLER.wanted(nothing, record) == []
        assert HANDLER.fill(nothing, record, [])


@pytest.mark.parametrize(("ranks", "expected"), [([0, 1], (0, 2)), ([0, 2], (0, 2)), ([0, 1, 2, 3], (0, 1))])
def test_groups_of_hybrid_sharding_are_replicas(ranks: list[int], expected: tuple[int, int]) -> None:
    with process_group("fake", size=4):
        places = [((0, 0), (3, 7), 0), ((3, 0), (2, 7), ranks[-1])]
        leaf = sharded(WHOLE, places, dist.new_group(ranks))
        (shard,) = HANDLER.shards(leaf, 0, 4)
        assert (shard.replica, shard.replicas) == expected


def test_unknown_replicas_are_refused(tmp_path: Path) -> None:
    with process_group("fake", size=4):
        leaf = sharded(WHOLE, [((0, 0), (5, 7), 0)], dist.new_group([0, 3]))
        with pytest.raises(UnsupportedLeafError, match=r"over the ranks \[0, 3\] of 4"):
            HANDLER.shards(leaf, 0, 4)


@pytest.mark.usefixtures("alone")
def test_shards_that_differ_from_their_metadata_are_refused() -> None:
    leaf = example(WHOLE)
    leaf.local_shards()[0].tensor = torch.zeros(1, 2)
    with pytest.raises(UnsupportedLeafError, match=r"shape \(1, 2\), but its metadata has \(3, 2\)"):
        HANDLER.shards(leaf, 0, 1)
    with pytest.raises(TreeMismatchError, match="a str is stored"):
        HANDLER.build(leaf, ValueRecord("str", "x"), [])


def test_dcp_checkpoints_of_sharded_tensors_load() -> None:
    """torch 2.13.0 wrote the checkpoint in two processes (``sharded_job.py golden DIRECTORY``)."""
    state = {"even": torch.empty(4, 3), "uneven": torch.empty(5, 7, dtype=torch.bfloat16), "blocks": torch.empty(6, 6)}
    loaded = ckptcore.load(GOLDEN, state)
    for name, expected in golden_state().items():
        assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected), name


def golden_state() -> dict[str, torch.Tensor]:
    """Return the state that the checkpoint in `GOLDEN` contains."""
    return {
        "even": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "uneven": torch.arange(35).reshape(5, 7).bfloat16(),
        "blocks": torch.arange(36, dtype=torch.float32).reshape(6, 6),
    }


@pytest.mark.usefixtures("alone")
def test_dcp_checkpoints_of_sharded_tensors_load_into_sharded_tensors() -> None:
    target = {
        "even": sharded(torch.zeros(4, 3), [((0, 0), (1, 3), 0), ((1, 0), (3, 3), 0)]),
        "uneven": sharded(torch.zeros(5, 7, dtype=torch.bfloat16), QUARTERS),
        "blocks": torch.zeros(6, 6),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptcore.load_into(GOLDEN, target)
    assert np.array_equal(elements_of_bfloat16(target["uneven"]), np.arange(35).reshape(5, 7))
    assert np.array_equal(elements(target["even"]), golden_state()["even"].numpy())  # type: ignore[arg-type]  # tensors
    assert torch.equal(target["blocks"], golden_state()["blocks"])  # type: ignore[arg-type]  # a tensor


def elements_of_bfloat16(leaf: Any) -> Any:
    return elements(sharded_copy(leaf))


def sharded_copy(leaf: ShardedTensor) -> ShardedTensor:
    """Return a copy with elements of float32, because NumPy has no bfloat16."""
    made = sharded_like(leaf, torch.float32)
    for new, old in zip(made.local_shards(), leaf.local_shards(), strict=True):
        new.tensor.copy_(old.tensor)
    return made
