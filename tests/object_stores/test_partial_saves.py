"""Sessions and updates on object stores without faults."""

from __future__ import annotations

import numpy as np
import pytest
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointReferredError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from tests.object_stores.stores import ObjectStore


@pytest.mark.parametrize("layout", ["safetensors", "zarr3"])
def test_sessions_fill_a_checkpoint(layout: str, object_store: ObjectStore) -> None:
    place, context = object_store.new_place("partial"), object_store.direct
    large = np.arange(1_500_000, dtype=np.float64)  # uploaded in several parts
    ckptcore.partial(place, layout=layout, context=context).save({"a": large, "n": 1})
    with pytest.raises(UncommittedCheckpointError, match=r"1 complete session \("):
        ckptcore.load(place, context=context)
    with pytest.raises(TreeMismatchError, match="already"):
        ckptcore.partial(place, layout=layout, context=context).save({"a": large})
    with pytest.raises(CheckpointExistsError, match="not finalized"):
        ckptcore.save(place, {"a": 1}, overwrite="non-atomic", context=context)
    ckptcore.partial(place, layout=layout, context=context).save({"b": np.ones(3)})
    ckptcore.partial(place, context=context).finalize()
    assert same_value(ckptcore.load(place, context=context), {"a": large, "n": 1, "b": np.ones(3)})
    assert ckptcore.verify(place, context=context).ok
    assert not object_store.list_uploads(place)
    ckptcore.partial(f"{place}-gone", context=context).save({"a": 1})
    ckptcore.delete(f"{place}-gone", context=context)
    ckptcore.save(f"{place}-gone", {"a": 2}, context=context)


def test_an_update_refers_to_its_base(object_store: ObjectStore) -> None:
    run, context = object_store.new_place("updates"), object_store.direct
    state = {"a": np.arange(10_000.0), "b": np.ones(3)}
    ckptcore.save(f"{run}/1", state, context=context)
    ckptcore.save(f"{run}/2", {"b": np.zeros(2)}, strategy=ckptcore.Update(f"{run}/1"), context=context)
    assert same_value(ckptcore.load(f"{run}/2", context=context), {**state, "b": np.zeros(2)})
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(f"{run}/1", context=context)
    anywhere = ckptcore.Context(storage=context.storage, io=ckptcore.context.IOOptions(bases="anywhere", threads=2))
    ckptcore.save(f"{run}-elsewhere/x/3", {"c": 1}, strategy=ckptcore.Update(f"{run}/2"), context=anywhere)
    assert ckptcore.load(f"{run}-elsewhere/x/3", context=anywhere)["c"] == 1
    ckptcore.copy(f"{run}/2", f"{run}/copied", context=context)
    ckptcore.delete(f"{run}/2", context=context)
    ckptcore.delete(f"{run}/1", context=context)
    assert same_value(ckptcore.load(f"{run}/copied", context=context), {**state, "b": np.zeros(2)})
