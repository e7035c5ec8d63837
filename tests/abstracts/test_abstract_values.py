"""`ckptcore.abstract` of Python and NumPy values."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import assert_same_tree

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, ArrayShard, ShardedArray
from ckptcore.errors import TreeMismatchError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model import Box
from tests.abstracts.untouched import UntouchedMemory

Pair = namedtuple("Pair", ["left", "right"])  # a named tuple without types


class Typed(NamedTuple):
    """A named tuple with types."""

    weights: Any
    step: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    weights: Any
    name: str = "frozen"


def test_leaves_become_abstract_leaves() -> None:
    state = {
        "w": np.ones((2, 3), ml_dtypes.bfloat16),
        "big endian": np.arange(4, dtype=">i4"),
        "scalar": np.float32(2.5),
        "values": [1, 2.5, "text", b"bytes", None, True, 3j],
        "abstract": AbstractArray((5,), "int8"),
        "left out": PLACEHOLDER,
    }
    assert ckptcore.abstract(state) == {
        "w": AbstractArray((2, 3), "bfloat16"),
        "big endian": AbstractArray((4,), "int32"),
        "scalar": np.float32(2.5),
        "values": [1, 2.5, "text", b"bytes", None, True, 3j],
        "abstract": AbstractArray((5,), "int8"),
        "left out": PLACEHOLDER,
    }


def test_a_value_loads_with_its_abstract_value(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    state = {
        "ordered": OrderedDict(b=array, a=array + 1),
        "pair": Pair(array, 3),
        "typed": Typed(array * 2, 7),
        "dataclass": Frozen(array),
        "long text": "é" * 20_000,
        "text scalar": np.str_("four"),
        "bytes scalar": np.bytes_(b"12"),
        "date": np.datetime64("2020-02-03", "D"),
        "keys": {0: array, "0": 1},
        "empty": [{}, (), []],
    }
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert type(abstract["pair"]) is Pair and abstract["pair"].left == AbstractArray((2, 3), "float16")
    assert type(abstract["typed"]) is Typed and type(abstract["dataclass"]) is Frozen
    assert_same_tree(ckptcore.load(tmp_path / "c", abstract), state)
    assert ckptcore.abstract(abstract) == abstract


def test_a_single_value_is_a_tree() -> None:
    assert ckptcore.abstract(np.zeros((3, 1))) == AbstractArray((3, 1), "float64")
    assert ckptcore.abstract(5) == 5
    assert ckptcore.abstract(None) is None


def test_abstract_reads_and_copies_no_element() -> None:
    memory = UntouchedMemory(4096)
    array = np.frombuffer(memory.memory, np.float32).reshape(1024, -1)
    parts = [ArrayShard(Box((0, 0), (512, array.shape[1])), array[:512])]
    state = {
        "whole": array,
        "turned": array.T,
        "part": array[::2],
        "sharded": ShardedArray(array.shape, array.dtype, parts),
    }
    ckptcore.abstract(state)  # the first call imports modules and fills caches
    tracemalloc.start()
    abstract = ckptcore.abstract(state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory.pages_touched() == 0
    assert peak < 64 << 10, "16 MiB were not copied"
    assert abstract["turned"] == AbstractArray(array.T.shape, "float32")
    assert array[3, 3] == 0 and memory.pages_touched() > 0, "the memory tells when it is touched"


def test_a_sharded_array_requests_its_boxes(tmp_path: Path) -> None:
    whole = np.arange(12.0).reshape(3, 4)
    boxes = [Box((0, 0), (3, 2)), Box((0, 2), (3, 4))]
    shards = [ArrayShard(box, whole[box.slices]) for box in boxes]
    state = {"w": ShardedArray((3, 4), "float64", shards, cuts=[(), (2,)])}
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)["w"]
    assert [(shard.box, shard.elements) for shard in abstract.shards] == [(box, None) for box in boxes]
    assert (abstract.shape, abstract.dtype, abstract.cuts) == ((3, 4), np.float64, ((), (2,)))
    loaded = ckptcore.load(tmp_path / "c", {"w": abstract})["w"]
    assert [shard.box for shard in loaded.shards] == boxes
    assert all(np.array_equal(shard.elements, whole[shard.box.slices]) for shard in loaded.shards)


def test_tied_leaves_stay_tied(tmp_path: Path) -> None:
    array = np.arange(4.0)
    sharded = ShardedArray((4,), "float64", [ArrayShard(Box((0,), (4,)), np.ones(4))])
    state = {"a": array, "b": array, "c": sharded, "d": sharded}
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    assert loaded["a"] is loaded["b"] and loaded["c"] is loaded["d"]


class Batches:
    """An object with methods that return and set its state."""

    def __init__(self) -> None:
        self.seen = np.zeros(3, np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "epoch": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize(
    "make", [Batches, lambda: np.random.default_rng(3), lambda: np.random.RandomState(3), lambda: random.Random(3)]
)
def test_an_object_with_a_state_becomes_its_abstract_state(make: Any, tmp_path: Path) -> None:
    value = make()
    state = {"object": value, "step": 1}
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert isinstance(abstract["object"], dict)
    assert_same_tree(ckptcore.load(tmp_path / "c", abstract), ckptcore.load(tmp_path / "c", state))
    ckptcore.save_checkpointables(tmp_path / "several", {"object": value})
    loaded = ckptcore.load_checkpointables(tmp_path / "several", {"object": abstract["object"]})
    assert_same_tree(loaded["object"], ckptcore.load(tmp_path / "c")["object"])


def test_per_process_values_become_per_process_abstract_values(tmp_path: Path) -> None:
    state = {"model": {"w": np.ones(3)}, "own": ckptcore.PerProcess({"a": np.arange(3)})}
    ckptcore.save_checkpointables(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert abstract["own"] == ckptcore.PerProcess({"a": AbstractArray((3,), "int64")})
    loaded = ckptcore.load_checkpointables(tmp_path / "c", abstract)
    assert_same_tree(loaded, {"model": {"w": np.ones(3)}, "own": {"a": np.arange(3)}})


def test_differences_are_reported_as_for_any_abstract_tree(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(TreeMismatchError, match=r"float64\[4\] is requested"):
        ckptcore.load(tmp_path / "c", ckptcore.abstract({"w": np.ones(4)}))


def test_the_error_names_the_path_of_an_unsupported_leaf() -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        ckptcore.abstract({"a": [np.array([object()])], "b": np.ma.masked_array([1, 2], [True, False]), "c": 1})
    assert "a[0]: " in str(caught.value)
    assert "b: a masked array" in str(caught.value)
    with pytest.raises(UnsupportedLeafError, match=r"function.*which no installed plugin handles"):
        ckptcore.abstract({"f": lambda: None})
    with pytest.raises(UnsupportedKeyError):
        ckptcore.abstract({(1, None): np.ones(3)})


def test_the_handlers_of_a_context_are_used() -> None:
    from ckptcore.builtin.host_leaves import HostArrayHandler

    class Shouting(HostArrayHandler):
        def abstract(self, leaf: Any) -> object:
            return "NO ARRAY"

    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: Shouting()}))
    assert ckptcore.abstract([np.ones(3), 4], context=context) == ["NO ARRAY", 4]
