"""Random chains of transforms of random trees: results equal NumPy's, and only the required elements are read."""

from __future__ import annotations

from typing import Any

import ckptcore_transforms
import numpy as np
import pytest
from ckptcore_testing.strategies import partitions
from ckptcore_transforms import describe
from ckptcore_transforms.patterns import path_text
from ckptcore_transforms.transformed import apply_transforms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptcore
import plugins.transforms.tests.chains
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.context import MemoryOptions
from ckptcore.model import ArrayRecord, HostArray
from ckptcore.planning import plan_read
from plugins.transforms.tests.array_chains import open_counted
from plugins.transforms.tests.chains import Chain, chains, save_beside, stored_trees

LOCATION = "memory://transforms/chains"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def test_chains_use_every_transform() -> None:
    """Transforms of quantised weights are an exception. Their property tests are in test_quantized.py and
    test_dequantizing_parts.py.
    """
    kinds = {name for name in ckptcore_transforms.__all__ if hasattr(getattr(ckptcore_transforms, name), "inverse")}
    elsewhere = {name for name in kinds if name.startswith("Dequantize")}
    assert kinds - elsewhere - {"TreeTransform"} <= vars(plugins.transforms.tests.chains).keys(), (
        "chains.py does not use every transform"
    )


def _saved(data: st.DataObject) -> Chain:
    stored = data.draw(stored_trees())
    chain: Chain = data.draw(chains(stored))
    ckptcore.save(LOCATION, dict(stored), overwrite="non-atomic")
    save_beside(chain)
    assert len(describe(chain.transforms).splitlines()) >= len(chain.transforms)
    return chain


def _check_reading(data: st.DataObject) -> None:
    """Load each array in random boxes that cover it, and count the stored elements that are read."""
    chain = _saved(data)
    checkpoint, counted = open_counted(LOCATION)
    load_bytes = data.draw(st.sampled_from([None, 1, 100]))
    made = apply_transforms(checkpoint, chain.transforms, Context(memory=MemoryOptions(load_bytes=load_bytes)))
    leaves = {path_text(path): leaf for leaf, path in enumerate(made.tree.paths)}
    assert sorted(leaves) == sorted(chain.tree)
    for path, part in chain.tree.items():
        record = made.tree.leaves[leaves[path]]
        assert isinstance(record, ArrayRecord)
        assert (record.spec.shape, record.spec.dtype) == (part.elements.shape, part.dtype)
        parts = data.draw(partitions(part.elements.shape))
        buffers: list[HostArray] = [np.zeros(box.shape, record.spec.numpy_dtype) for box in parts]
        counted.plans.clear()
        plan = plan_read(made.tree, [(leaves[path], parts)])
        assert sorted(made.read(plan, buffers)) == list(range(len(parts)))
        for box, buffer in zip(parts, buffers, strict=True):
            assert buffer.tobytes() == part.elements[box.slices].tobytes()
        assert counted.elements <= len(np.unique(part.origins[part.origins >= 0])), (
            "elements that two boxes need were read twice"
        )


@settings(max_examples=120, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_boxes_equal_numpy_and_read_only_required_elements(data: st.DataObject) -> None:
    _check_reading(data)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_many_chains(data: st.DataObject) -> None:
    _check_reading(data)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_shards_of_chains_load_into_every_kind_of_target(data: st.DataObject) -> None:
    chain = _saved(data)
    abstract: Any = ckptcore.metadata(LOCATION, transforms=chain.transforms).abstract
    target: Any = ckptcore.load(LOCATION, abstract, transforms=chain.transforms)
    paths = {path: _keys(target, path) for path in chain.tree}
    boxes = {path: data.draw(partitions(part.elements.shape)) for path, part in chain.tree.items()}
    for path, (holder, key) in paths.items():
        part = chain.tree[path]
        assert holder[key].tobytes() == part.elements.tobytes()
        asked, name = _keys(abstract, path)
        asked[name] = ShardedArray(part.elements.shape, part.elements.dtype, [ArrayShard(box) for box in boxes[path]])
        holder[key][...] = 0
    ckptcore.load_into(LOCATION, target, transforms=chain.transforms)
    sharded = ckptcore.load_async(LOCATION, abstract, transforms=chain.transforms).result(60)
    ckptcore.copy(
        LOCATION, f"{LOCATION}-converted", layout="safetensors", transforms=chain.transforms, overwrite="non-atomic"
    )
    converted = ckptcore.load(f"{LOCATION}-converted")
    for path, part in chain.tree.items():
        for state in (target, converted):
            holder, key = _keys(state, path)
            assert holder[key].tobytes() == part.elements.tobytes() and holder[key].dtype == part.elements.dtype
        holder, key = _keys(sharded, path)
        for shard in holder[key].shards:
            assert shard.elements.tobytes() == part.elements[shard.box.slices].tobytes()


def _keys(tree: Any, path: str) -> tuple[Any, Any]:
    """Return the parent container of a path, and the key in it. Keys can contain ``/``."""
    if path in tree:
        return tree, path
    first, _, rest = path.partition("/")
    return _keys(tree[first], rest)
