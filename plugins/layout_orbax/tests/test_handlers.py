"""Data of each handler of Orbax loads with the values that Orbax restores.

The tests load it as a checkpoint, as an item of a composite checkpoint, and as the item of a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from google.protobuf import struct_pb2, text_format

import ckptcore
from plugins.layout_orbax.tests.test_golden import assert_same

TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(7, np.int32)}
MESSAGE = struct_pb2.Value(string_value="text")

CASES = {
    "StandardSave": (ocp.StandardCheckpointHandler, ocp.args.StandardSave(TREE), ocp.args.StandardRestore()),
    "PyTreeSave": (ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave(TREE), ocp.args.PyTreeRestore()),
    "PyTreeSave without OCDBT": (
        lambda: ocp.PyTreeCheckpointHandler(use_ocdbt=False),
        ocp.args.PyTreeSave(TREE),
        ocp.args.PyTreeRestore(),
    ),
    "ArraySave": (ocp.ArrayCheckpointHandler, ocp.args.ArraySave(np.arange(6)), ocp.args.ArrayRestore()),
    "ArraySave of a number": (ocp.ArrayCheckpointHandler, ocp.args.ArraySave(2.5), ocp.args.ArrayRestore()),
    "JsonSave": (ocp.JsonCheckpointHandler, ocp.args.JsonSave({"a": [1, None]}), ocp.args.JsonRestore()),
    "ProtoSave": (
        ocp.ProtoCheckpointHandler,
        ocp.args.ProtoSave(MESSAGE),
        ocp.args.ProtoRestore(struct_pb2.Value),
    ),
    "JaxRandomKeySave": (
        ocp.handlers.JaxRandomKeyCheckpointHandler,
        ocp.args.JaxRandomKeySave(jax.random.key(3)),
        ocp.args.JaxRandomKeyRestore(),
    ),
    "JaxRandomKeySave of several keys": (
        ocp.handlers.JaxRandomKeyCheckpointHandler,
        ocp.args.JaxRandomKeySave(jax.random.split(jax.random.key(3), 2)),
        ocp.args.JaxRandomKeyRestore(),
    ),
    "JaxRandomKeySave of an untyped key": (
        ocp.handlers.JaxRandomKeyCheckpointHandler,
        ocp.args.JaxRandomKeySave(jax.random.PRNGKey(3)),
        ocp.args.JaxRandomKeyRestore(),
    ),
    "NumpyRandomKeySave": (
        ocp.handlers.NumpyRandomKeyCheckpointHandler,
        ocp.args.NumpyRandomKeySave(np.random.RandomState(3).get_state(legacy=False)),
        ocp.args.NumpyRandomKeyRestore(),
    ),
    "NumpyRandomKeySave of a tuple": (
        ocp.handlers.NumpyRandomKeyCheckpointHandler,
        ocp.args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
        ocp.args.NumpyRandomKeyRestore(),
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def seen_from_numpy(value):
    """Return the value that ckptcore loads without JAX: the data of keys, and the text of messages."""
    if isinstance(value, struct_pb2.Value):
        return text_format.MessageToString(value)
    if isinstance(value, jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if is_key else value)
    if isinstance(value, dict):
        return {key: seen_from_numpy(child) for key, child in value.items()}
    return tuple(map(seen_from_numpy, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.brings(f"checkpoint of Orbax, of `{case}`", "orbax-checkpoint", "same"))
        for case in CASES
    ],
)
def test_an_item_loads_as_orbax_restores_it(tmp_path, case):
    handler, save, restore = CASES[case]
    with ocp.Checkpointer(handler()) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=save)
        expected = seen_from_numpy(checkpointer.restore(tmp_path / "alone", args=restore))
    assert_same(ckptcore.load(tmp_path / "alone"), expected)
    both = ocp.CompositeCheckpointHandler(item=handler(), state=ocp.StandardCheckpointHandler())
    with ocp.Checkpointer(both) as checkpointer:
        args = ocp.args.Composite(item=save, state=ocp.args.StandardSave(TREE))
        checkpointer.save(tmp_path / "composite", args=args)
    assert_same(ckptcore.load_checkpointables(tmp_path / "composite"), {"item": expected, "state": TREE})
    assert_same(ckptcore.load(tmp_path / "composite"), TREE)
    assert_same(ckptcore.load(tmp_path / "composite" / "item"), expected)
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=handler()) as manager:
        manager.save(4, args=save)
        manager.wait_until_finished()
    run = ckptcore.CheckpointReader(tmp_path / "run")
    assert_same(run.load(), expected)
    assert run.restored_step == 4


def test_keys_load_into_keys_of_jax(tmp_path):
    keys = jax.random.split(jax.random.key(3), 2)
    with ocp.Checkpointer(ocp.handlers.JaxRandomKeyCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "keys", args=ocp.args.JaxRandomKeySave(keys))
    loaded = ckptcore.load(tmp_path / "keys", keys)
    assert loaded.dtype == keys.dtype
    assert jax.random.key_data(loaded).tolist() == jax.random.key_data(keys).tolist()


def test_keys_of_another_default_implementation_load_as_their_data(tmp_path):
    with jax.default_prng_impl("rbg"):
        keys = jax.random.key(3)
        with ocp.Checkpointer(ocp.handlers.JaxRandomKeyCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / "keys", args=ocp.args.JaxRandomKeySave(keys))
        data = np.asarray(jax.random.key_data(keys))
    assert_same(ckptcore.load(tmp_path / "keys"), data)
    assert ckptcore.load(tmp_path / "keys", framework="jax").dtype == jnp.uint32


def test_a_dict_with_the_key_checkpoint_is_not_read_as_an_array(tmp_path):
    value = {"checkpoint": np.arange(4)}
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "alone", value)
    assert_same(ckptcore.load(tmp_path / "alone"), value)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "composite", args=ocp.args.Composite(item=ocp.args.PyTreeSave(value)))
    assert_same(ckptcore.load_checkpointables(tmp_path / "composite"), {"item": value})


def test_two_items_named_like_the_files_of_a_random_key_stay_separate(tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(key=ocp.args.StandardSave(TREE), key_metadata=ocp.args.JsonSave({"epoch": 3}))
        checkpointer.save(tmp_path / "c", args=args)
    expected = {"key": TREE, "key_metadata": {"epoch": 3}}
    assert_same(ckptcore.load_checkpointables(tmp_path / "c"), expected)
    (tmp_path / "c" / "_CHECKPOINT_METADATA").unlink()
    assert_same(ckptcore.load_checkpointables(tmp_path / "c"), expected)
