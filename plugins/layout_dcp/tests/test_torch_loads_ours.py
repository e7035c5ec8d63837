"""Every reader of torch.distributed.checkpoint loads checkpoints that ckptcore writes."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing import DTYPE_NAMES, SHAPES, bit_patterns
from packaging.version import Version
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckptcore
from ckptcore.model import ArraySpec
from plugins.layout_dcp.tests.state_dicts import (
    DTYPES,
    NESTED,
    assert_same,
    blank,
    bytes_of,
    loaded,
    network,
    tensor_of,
    trained,
)

pytestmark = [
    # torch warns that it assumes a single process if there is no process group.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
]

WITHOUT = sorted(set(DTYPE_NAMES) - set(DTYPES))


def items_of(location: Path) -> dict[str, bytes]:
    """Return every item that ``.metadata`` lists, by name and offsets."""
    items = {}
    for index, place in metadata_of(location).storage_data.items():
        with (location / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        assert len(data) == place.length
        items[f"{index.fqn} at {index.offset}"] = data
    return items


def metadata_of(location: Path) -> Any:
    """Read the metadata with torch."""
    return dcp.FileSystemReader(location).read_metadata()


def assert_whole_items(location: Path) -> None:
    """Assert that Python's zipfile accepts every item and its checksums."""
    items = items_of(location)
    assert items
    for name, data in items.items():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, name
        torch.load(io.BytesIO(data), weights_only=True)


def test_every_dtype_and_shape_bit_for_bit(tmp_path: Path) -> None:
    specs = {f"{dtype}-{shape}": ArraySpec(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    state = {name: tensor_of(spec) for name, spec in specs.items()}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    like = loaded(tmp_path / "c", {name: torch.empty_like(tensor) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert like[name].dtype == tensor.dtype and like[name].shape == tensor.shape, name
        assert bytes_of(like[name]) == bytes_of(tensor), name
    assert_whole_items(tmp_path / "c")


def test_a_partial_save_of_several_sessions(tmp_path: Path) -> None:
    """Every dtype and shape, a nested state dict, tied tensors, and a tensor whose parts different sessions write."""
    specs = {f"{dtype}-{shape}": ArraySpec(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    tensors = {name: tensor_of(spec) for name, spec in specs.items()}
    tied, rows = torch.randn(3, 2), torch.arange(24.0).reshape(6, 4)
    state = {**NESTED, "tensors": tensors, "tied": {"first": tied, "second": tied}, "boxes": rows}
    for session in range(3):
        given = {name: child for place, (name, child) in enumerate(state.items()) if place % 3 == session}
        given["tensors"] = dict(list(tensors.items())[session::3])
        part = rows[2 * session : 2 * session + 2].numpy()
        given["boxes"] = ckptcore.ShardedArray.part(part, (2 * session, 0), (6, 4))
        ckptcore.partial(tmp_path / "c", layout="dcp").save(given)
    ckptcore.partial(tmp_path / "c").finalize()
    like = loaded(tmp_path / "c", blank(state))
    copies = like.pop("tensors")
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype and copies[name].shape == tensor.shape, name
        assert bytes_of(copies[name]) == bytes_of(tensor), name
    assert_same(like, {name: child for name, child in state.items() if name != "tensors"})
    assert_whole_items(tmp_path / "c")


def test_strided_tensors(tmp_path: Path) -> None:
    base = torch.randn(4, 3, 6, 5)
    state = {
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "stepped": torch.arange(40.0)[3::4],
        "channels last": base.to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).expand(5, 3),
        "of a larger one": base[1:3, :, 2],
        "conjugate": torch.complex(base[0], base[1]).conj(),
        "negative": torch.complex(base[0], base[1]).conj().imag,
        "needs a gradient": torch.nn.Parameter(torch.ones(2, 2)),
    }
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    like = loaded(tmp_path / "c", {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()})
    for name, tensor in state.items():
        assert torch.equal(like[name], tensor), name


def test_a_nested_state_dict(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", NESTED, layout="dcp")
    assert_same(loaded(tmp_path / "c", blank(NESTED)), NESTED)
    assert_whole_items(tmp_path / "c")


def test_names_and_values_equal_those_of_torch(tmp_path: Path) -> None:
    dcp.save(dict(NESTED), checkpoint_id=tmp_path / "torch", no_dist=True)
    ckptcore.save(tmp_path / "ours", NESTED, layout="dcp")
    theirs, ours = metadata_of(tmp_path / "torch"), metadata_of(tmp_path / "ours")
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    for name, entry in theirs.state_dict_metadata.items():
        if hasattr(entry, "size"):
            assert ours.state_dict_metadata[name].size == entry.size
            assert ours.state_dict_metadata[name].properties.dtype == entry.properties.dtype


def test_long_lists_and_dicts_of_numbers_equal_those_of_torch(tmp_path: Path) -> None:
    keys = range(1200)
    state = {
        "list": list(keys),
        "tuple": tuple(key / 3 for key in keys),
        "dict": {key: key / 7 for key in keys},
        "mixed": [1, 2.5, None, True, "text", 1 << 80] * 200,
        "rows": [[1, 2.5], (3, 4)] * 500,
        "list of dicts": [dict.fromkeys(keys, 1), 2],
        "tuple of dicts": (dict.fromkeys(keys, 1), 2),
    }
    ckptcore.save(tmp_path / "ours", state, layout="dcp")
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = metadata_of(tmp_path / "ours"), metadata_of(tmp_path / "theirs")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert_same(loaded(tmp_path / "ours", blank(state)), loaded(tmp_path / "theirs", blank(state)))
    assert len(ckptcore.metadata(tmp_path / "ours").tree.leaves) == 9


def test_keys_that_are_numbers(tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}, 1: {"exp_avg": torch.zeros(2)}}}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_same(loaded(tmp_path / "c", blank(state)), state)


def test_names_that_collide_in_torch_stay_distinct(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "c": torch.full((1,), 3.0)}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_same(loaded(tmp_path / "c", {"c": torch.zeros(1)}), {"c": state["c"]})
    assert set(ckptcore.load(tmp_path / "c")) == {"a.b", "a", "c"}
    stored = sorted(float(torch.load(io.BytesIO(data))) for data in items_of(tmp_path / "c").values())
    assert stored == [0.0, 1.0, 3.0]


def test_tied_tensors_under_each_of_their_names(tmp_path: Path) -> None:
    shared = torch.randn(100, 20)
    state = {"embedding": shared, "head": {"weight": shared}, "view": shared[:]}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_same(loaded(tmp_path / "c", blank(state)), state)
    assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("*.distcp")) < 2 * 8000


def test_torch_loads_a_part_of_the_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", NESTED, layout="dcp")
    part = {"model": {"layer": {"1": {"bias": torch.zeros(2)}}}, "step": 0}
    restored = loaded(tmp_path / "c", part)
    assert_same(restored, {"model": {"layer": {"1": NESTED["model"]["layer"]["1"]}}, "step": 7})
    by_keys = _load_state_dict_from_keys({"model", "step"}, checkpoint_id=tmp_path / "c")
    assert_same(by_keys, {"model": NESTED["model"], "step": 7})
    if Version(torch.__version__) >= Version("2.8"):  # older versions return an empty state
        assert_same(_load_state_dict_from_keys(checkpoint_id=tmp_path / "c"), NESTED)


def test_torch_converts_it_without_a_target(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", NESTED, layout="dcp")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "file.pt")
    assert_same(torch.load(tmp_path / "file.pt", weights_only=True), NESTED)


def test_torch_raises_an_error_for_a_missing_key(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": torch.ones(1)}, layout="dcp")
    with pytest.raises(BaseException, match="Missing key"):  # the error of torch is no subclass of Exception
        loaded(tmp_path / "c", {"b": torch.ones(1)})


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_a_model_and_its_optimizer_resume_with_equal_losses(tmp_path: Path, kind: str) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = network(seed)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.05, **options)
        trained(net, optimizer, seed)
        return net, optimizer

    net, optimizer = make(0)
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    expected = trained(net, optimizer, 9)
    other, its_optimizer = make(1)
    restored = loaded(
        tmp_path / "c",
        {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its_optimizer)},
    )
    set_model_state_dict(other, restored["model"])
    set_optimizer_state_dict(other, its_optimizer, restored["optimizer"])
    assert trained(other, its_optimizer, 9) == expected


def test_values_load_with_weights_only(tmp_path: Path) -> None:
    """ckptcore does not write values that torch rejects with ``weights_only=True``."""
    state = {"pair": (1, 2), "scalar": np.float32(0.5), "ordered": OrderedDict(a=1), "list": [np.int64(3)], "text": "x"}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_whole_items(tmp_path / "c")


def test_torch_loads_arrays_of_numpy_and_jax(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    whole = np.arange(64 * 6, dtype=np.float32).reshape(64, 6)
    state = {
        "numpy": np.arange(10, dtype=np.int16)[::2],
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "big endian": np.arange(5, dtype=">i4"),
        "jax": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "sharded": jax.device_put(whole, sharding),
        "epoch": 3,
    }
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    like = {
        "numpy": torch.zeros(5, dtype=torch.int16),
        "fortran": torch.zeros(3, 4, dtype=torch.float64),
        "big endian": torch.zeros(5, dtype=torch.int32),
        "jax": torch.zeros(2, 3, dtype=torch.bfloat16),
        "sharded": torch.zeros(64, 6),
        "epoch": None,
    }
    restored = loaded(tmp_path / "c", like)
    assert restored["numpy"].tolist() == [0, 2, 4, 6, 8]
    assert restored["big endian"].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(restored["fortran"].numpy(), state["fortran"])
    assert restored["jax"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.array_equal(restored["sharded"].numpy(), whole)
    assert restored["epoch"] == 3


@pytest.mark.parametrize("dtype", WITHOUT)
def test_torch_loads_dtypes_that_it_lacks_as_bytes(tmp_path: Path, dtype: str) -> None:
    array = bit_patterns(ArraySpec((3, 4), dtype))
    ckptcore.save(tmp_path / "c", {"a": array, "empty": array[:0]}, layout="dcp")
    entry = metadata_of(tmp_path / "c").state_dict_metadata["a"]
    like = torch.zeros(entry.size, dtype=entry.properties.dtype)
    assert bytes_of(loaded(tmp_path / "c", {"a": like})["a"]) == array.tobytes()
    ours = ckptcore.load(tmp_path / "c")
    assert ours["a"].dtype == array.dtype and ours["a"].tobytes() == array.tobytes()
    assert ours["empty"].shape == (0, 4) and ours["empty"].dtype == array.dtype


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 has no float4")
def test_pairs_of_float4(tmp_path: Path) -> None:
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    state = {"w": pairs.view(torch.float4_e2m1fn_x2), "x": torch.ones(2)}
    ckptcore.save(tmp_path / "ours", state, layout="dcp")
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = metadata_of(tmp_path / "ours"), metadata_of(tmp_path / "theirs")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    for location in (tmp_path / "ours", tmp_path / "theirs"):
        assert_same(ckptcore.load(location, {name: tensor.to("meta") for name, tensor in state.items()}), state)
        assert ckptcore.load(location)["w"].tolist() == pairs.tolist()
        none = {"w": torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "x": torch.zeros(2)}
        assert_same(loaded(location, none), state)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int1", "uint7"])
def test_torch_loads_dtypes_that_it_cannot_copy_as_uint8(tmp_path: Path, dtype: str) -> None:
    data = torch.arange(12, dtype=torch.uint8)
    state = {"w": data.view(getattr(torch, dtype))}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_same(loaded(tmp_path / "c", {"w": torch.zeros(12, dtype=torch.uint8)}), {"w": data})
    assert_same(ckptcore.load(tmp_path / "c", {"w": state["w"].to("meta")}), state)


def test_empty_containers(tmp_path: Path) -> None:
    """torch drops an empty mapping, but keeps an empty list."""
    state = {"a": {}, "b": {"c": {}, "d": []}, "f": {"g": torch.zeros(0)}}
    with_list = {**state, "e": [{}, torch.ones(1)]}  # torch 2.13 itself cannot load a list with an empty mapping
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    ckptcore.save(tmp_path / "l", with_list, layout="dcp")
    assert set(metadata_of(tmp_path / "c").state_dict_metadata) == {"b.d", "f.g"}
    assert set(metadata_of(tmp_path / "l").state_dict_metadata) == {"b.d", "f.g", "e.1"}
    assert_same(loaded(tmp_path / "c", blank(state)), state)
    assert_same(loaded(tmp_path / "l", {"f": blank(state["f"])}), {"f": state["f"]})
    assert_same(ckptcore.load(tmp_path / "l", with_list), with_list)


@pytest.mark.parametrize("state", [{}, {"a": {}}], ids=str)
def test_an_empty_state(tmp_path: Path, state: dict[str, Any]) -> None:
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert loaded(tmp_path / "c", {}) == {}
    assert ckptcore.load(tmp_path / "c") == state


def test_torch_loads_each_of_several_checkpointables(tmp_path: Path) -> None:
    net = network(0)
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer, 0)
    ckptcore.save_checkpointables(
        tmp_path / "c", {"model": net, "optimizer": optimizer, "extra": {"step": 3, "w": np.ones(2)}}, layout="dcp"
    )
    model = net.state_dict()
    restored = loaded(tmp_path / "c" / "model", {name: torch.zeros_like(tensor) for name, tensor in model.items()})
    assert_same(restored, dict(model))
    assert loaded(tmp_path / "c" / "extra", {"step": None})["step"] == 3
    stored = metadata_of(tmp_path / "c" / "optimizer").state_dict_metadata
    assert {"state.0.exp_avg", "param_groups.0.lr"} <= set(stored)
    for name in ("model", "optimizer", "extra"):
        assert_whole_items(tmp_path / "c" / name)


def test_torch_loads_a_conversion(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "s", NESTED)
    ckptcore.copy(tmp_path / "s", tmp_path / "c", layout="dcp")
    assert_same(loaded(tmp_path / "c", blank(NESTED)), NESTED)


def test_the_metadata_pickle_is_portable(tmp_path: Path) -> None:
    """The pickle refers to no path classes, which other Python versions lack, and does not contain the host name."""
    ckptcore.save(tmp_path / "c", NESTED, layout="dcp")
    data = (tmp_path / "c" / ".metadata").read_bytes()
    assert b"pathlib" not in data and str(tmp_path).encode() not in data
    assert type(pickle.loads(data)).__name__ == "Metadata"


def test_torch_loads_a_page_aligned_array(tmp_path: Path) -> None:
    state = {"large": torch.randn(3 << 20), "small": torch.ones(3)}
    ckptcore.save(tmp_path / "c", state, layout="dcp")
    assert_same(loaded(tmp_path / "c", blank(state)), state)
    assert_whole_items(tmp_path / "c")
