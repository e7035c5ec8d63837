"""Loads of files that Flax wrote: `flax.training.checkpoints` without Orbax, and `flax.serialization.to_bytes`."""

import flax
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from ckptcore_testing.trees import assert_same_tree
from flax.training import checkpoints, train_state

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError

VALUES = {
    "arrays": {
        name: (np.arange(6) % 2).astype(jnp.dtype(name)).reshape(2, 3)
        for name in ("bool", "int8", "int64", "float16", "bfloat16", "float32", "complex64")
    },
    "large": np.arange(5000, dtype=np.float32).reshape(50, 100),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(1.5),
    "number": 7,
    "rate": 0.5,
    "complex": 1 + 2j,
    "text": "größe",
    "none": None,
    "flag": True,
    "bytes": b"\x00\xff",
}


@pytest.fixture(autouse=True)
def without_orbax():
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    yield
    flax.config.update("flax_use_orbax_checkpointing", before)


TX = optax.adamw(1e-3)

pytestmark = pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning")


def new_state(seed=0):
    params = {"w": jax.random.normal(jax.random.key(seed), (40, 50)), "b": jnp.zeros(4)}
    return train_state.TrainState.create(apply_fn=None, params=params, tx=TX)


@pytest.mark.brings("file of `flax.serialization.msgpack_serialize`", "flax", "same")
@pytest.mark.parametrize("name", ["state.msgpack", "weights", "7"])
def test_values_load_as_flax_restores_them(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(flax.serialization.msgpack_serialize(VALUES))
    assert_same_tree(ckptcore.load(path), flax.serialization.msgpack_restore(path.read_bytes()))
    assert ckptcore.verify(path).ok


@pytest.mark.brings("`TrainState` in a file of `flax.serialization.to_bytes`", "flax", "same")
def test_a_train_state_loads_into_a_new_one(tmp_path):
    state = new_state().apply_gradients(grads=jax.tree.map(jnp.ones_like, new_state().params))
    path = tmp_path / "state.msgpack"
    path.write_bytes(flax.serialization.to_bytes(state))
    expected = flax.serialization.from_bytes(new_state(1), path.read_bytes())
    loaded = ckptcore.load(path, new_state(1))
    assert jax.tree.structure(loaded) == jax.tree.structure(new_state(1))
    for leaf, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@pytest.mark.brings("one array in a file of `flax.serialization.to_bytes`", "flax", "same")
@pytest.mark.parametrize("value", [np.arange(3), np.arange(5000.0), np.float32(2), jnp.ones((2, 0))], ids=repr)
def test_a_single_array(tmp_path, value):
    path = tmp_path / "array"
    path.write_bytes(flax.serialization.to_bytes(value))
    assert_same_tree(ckptcore.load(path), flax.serialization.msgpack_restore(path.read_bytes()))


def test_a_part_of_a_large_array_is_read_from_its_bytes(tmp_path):
    path = tmp_path / "state.msgpack"
    path.write_bytes(flax.serialization.to_bytes({"w": VALUES["large"], "same": VALUES["large"].copy()}))
    view = ckptcore.open(path)
    assert view["w"][3:5, 7].tolist() == VALUES["large"][3:5, 7].tolist()
    changed = bytearray(path.read_bytes())
    position = changed.index(VALUES["large"][3:5].tobytes())
    changed[position : position + 4] = np.float32(-1).tobytes()
    path.write_bytes(changed)
    assert ckptcore.open(path)["w"][3, 0] == -1  # the layout reads elements from the file each time


def test_arrays_that_flax_splits_into_chunks_load(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 6000)
    path = tmp_path / "state.msgpack"
    path.write_bytes(flax.serialization.to_bytes({"w": VALUES["large"]}))
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    assert_same_tree(ckptcore.load(path), {"w": VALUES["large"]})


@pytest.mark.parametrize("name", ["state.msgpack", "checkpoint_3"])
def test_a_truncated_file_is_reported_as_damaged(tmp_path, name):
    whole = flax.serialization.to_bytes({"w": VALUES["large"], "step": 3})
    path = tmp_path / name
    for length in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=name):
            ckptcore.load(path)


def test_other_files_are_not_recognized_as_flax(tmp_path):
    for number, data in enumerate([b"\x00\x04\x95", b"text", msgpack.packb([1, 2]), b""]):
        (tmp_path / str(number)).write_bytes(data)
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(tmp_path / str(number))


@pytest.mark.brings("`checkpoint_10` of `flax.training.checkpoints`, without Orbax", "flax", "same")
def test_a_checkpoint_file_loads_as_flax_restores_it(tmp_path):
    checkpoints.save_checkpoint(tmp_path, new_state(), 10)
    expected = checkpoints.restore_checkpoint(tmp_path, None)
    assert_same_tree(ckptcore.load(tmp_path / "checkpoint_10"), expected)
    ckptcore.copy(tmp_path / "checkpoint_10", tmp_path / "copy", layout="safetensors")
    assert_same_tree(ckptcore.load(tmp_path / "copy"), expected)
