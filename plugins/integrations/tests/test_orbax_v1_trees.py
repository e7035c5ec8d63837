"""Orbax and its replacement `orbax_v1` load each other's checkpoints, and refuse the same trees."""

import json
import os
import shutil
import sys
import threading
import traceback
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_integrations import orbax_v1 as ours
from etils import epath
from jax.example_libraries import optimizers
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as theirs

import ckptcore
from ckptcore.errors import CorruptCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Pair(NamedTuple):
    first: object
    second: object


def state():
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=jax.devices()[:8])
    split = NamedSharding(mesh, PartitionSpec("a", "b"))
    return {
        "params": {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), split), "b": jnp.ones(4, jnp.bfloat16)},
        "pair": Pair(np.arange(3), jnp.int32(7)),
        "list": [1, 2.5, "text"],
        "layers": {0: np.ones(2), 1: np.zeros(2)},
        "step": 100,
    }


def abstract_of(tree):
    return jax.tree.map(
        lambda leaf: ours.arrays.to_shape_dtype_struct(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


def assert_same(actual, other):
    assert jax.tree.structure(actual) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(other), strict=True):
        assert isinstance(left, jax.Array) == isinstance(right, jax.Array)
        assert getattr(left, "dtype", type(left)) == getattr(right, "dtype", type(right))
        assert getattr(left, "sharding", None) == getattr(right, "sharding", None)
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def registered_state():
    optimizer = optimizers.adam(0.1)
    params = {("dense", "kernel", True): jnp.ones(3), ("a/b.c", ("d", 1), False): jnp.zeros(2)}
    return {"opt": optimizer.init_fn({"w": jnp.arange(3.0)}), "params": params, "masks": {True: jnp.ones(1), False: 2}}


@pytest.mark.parametrize("saver", [theirs, ours])
@pytest.mark.parametrize("loader", [theirs, ours])
def test_registered_named_tuples_and_keys_other_than_text(tmp_path, saver, loader):
    saver.save(tmp_path / "c", registered_state())
    abstract = abstract_of(registered_state())
    assert_same(loader.load(tmp_path / "c", abstract), registered_state())
    assert_same(loader.load(tmp_path / "c"), theirs.load(tmp_path / "c"))


class Model(eqx.Module):
    weight: object
    layers: object


def test_the_error_for_functions_in_a_module_of_equinox_has_a_remedy_that_works(tmp_path):
    model, new = (Model(jnp.full(2, fill), [jax.nn.relu, {"w": jnp.full(3, fill)}]) for fill in (1.0, 0.0))
    with pytest.raises(ValueError, match=r"Unsupported leaf type .*eqx\.filter\(model, eqx\.is_array\)"):
        ours.save(tmp_path / "c", {"model": model})
    with pytest.raises(KeyError, match=r"valid handler .*eqx\.filter\(model, eqx\.is_array\)"):
        ours.save_checkpointables(tmp_path / "c", {"model": model})
    ours.save(tmp_path / "c", {"model": eqx.filter(model, eqx.is_array)})
    with pytest.raises(ValueError, match=r"not registered .*eqx\.filter\(model, eqx\.is_array\)"):
        ours.load_checkpointables(tmp_path / "c", {"state": {"model": new}})
    with pytest.raises(TypeError, match=r"Unsupported abstract leaf type .*eqx\.filter\(model, eqx\.is_array\)"):
        ours.load(tmp_path / "c", {"model": new})
    for loader in (ours, theirs):
        arrays = loader.load(tmp_path / "c", {"model": eqx.filter(new, eqx.is_array)})["model"]
        assert eqx.tree_equal(eqx.combine(arrays, new), model)
    with pytest.raises(ValueError, match="Unsupported leaf type") as plain:
        ours.save(tmp_path / "d", {"function": jax.nn.relu})
    assert "eqx" not in str(plain.value)


@pytest.mark.parametrize("saver", [theirs, ours])
@pytest.mark.parametrize("loader", [theirs, ours])
def test_each_library_loads_trees_of_the_other(tmp_path, saver, loader):
    saver.save(tmp_path / "c", state(), custom_metadata={"run": 1})
    abstract = abstract_of(state())
    assert_same(loader.load(tmp_path / "c", abstract), theirs.load(tmp_path / "c", abstract))
    metadata = loader.metadata(tmp_path / "c")
    assert metadata.custom_metadata == {"run": 1} and metadata.metadata["params"]["w"].shape == (16, 4)
    assert_same(loader.load(tmp_path / "c", metadata), loader.load(tmp_path / "c"))


@pytest.mark.parametrize("saver", [theirs, ours])
def test_a_load_without_an_abstract_tree_returns_the_containers_of_orbax(tmp_path, saver):
    saver.save(tmp_path / "c", state())
    assert_same(ours.load(tmp_path / "c"), theirs.load(tmp_path / "c"))


@pytest.mark.parametrize("saver", [theirs, ours])
@pytest.mark.parametrize(
    "changed",
    [
        {"params": {"w": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16)}},
        {"params": {"w": jax.ShapeDtypeStruct((16, 4), jnp.int32)}},
        {"params": {"w": np.zeros((16, 4), np.float16)}},
        {"params": {"w": theirs.PLACEHOLDER}},
        {"params": {"w": np.array([], np.float32)}},
        {"step": float},
        {"step": 0.0},
        {"step": np.zeros((), np.int64)},
    ],
    ids=str,
)
def test_leaves_have_the_requested_types(tmp_path, saver, changed):
    saved = {"params": {"w": state()["params"]["w"]}, "step": 100}
    saver.save(tmp_path / "c", saved)
    abstract = {**abstract_of(saved), **changed}
    expected, loaded = theirs.load(tmp_path / "c", abstract), ours.load(tmp_path / "c", abstract)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(loaded), strict=True):
        assert isinstance(right, type(left)) or isinstance(left, jax.Array)
        if left is not theirs.PLACEHOLDER:
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_random_keys_are_loaded_as_keys(tmp_path):
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 3)}
    ours.save(tmp_path / "c", keys)
    for loader in (theirs, ours):
        loaded = loader.load(tmp_path / "c", abstract_of(keys))
        for name, key in keys.items():
            assert jnp.array_equal(jax.random.key_data(loaded[name]), jax.random.key_data(key))


def test_an_asynchronous_save_does_not_contain_later_changes(tmp_path):
    array, called = np.zeros(1000), []
    response = ours.save_async(tmp_path / "c", {"w": array})
    response.on_complete(called.append)
    array[:] = 1
    assert response.result() is None
    assert not ours.load(tmp_path / "c")["w"].any()


def begin_step(directory, tree):
    checkpointer = ours.training.Checkpointer(directory)
    checkpointer.save_async(0, tree)
    return checkpointer.close


def begin_save(directory, tree):
    context = ours.Context()
    context.asynchronous.create_directories_asynchronously = False
    with context:
        return ours.save_async(directory / "0", tree).result


def begin_part(directory, tree):
    return ours.partial.save_async(directory / "0", tree).result


@pytest.mark.parametrize("begin", [begin_step, begin_save, begin_part])
def test_a_directory_exists_once_an_asynchronous_save_returns(tmp_path, begin):
    returned, caller = threading.Event(), threading.get_ident()

    def hold(*_):
        """Block the thread of the save until the caller waits for a claim, or has returned without waiting."""
        sys.setprofile(None)
        while threading.current_thread().name.startswith("ckptcore-save") and not returned.is_set():
            frames = traceback.walk_stack(sys._current_frames()[caller])
            if "wait_for_claim" in {frame.f_code.co_name for frame, _ in frames}:
                break
            returned.wait(0.001)

    threading.setprofile(hold)
    try:
        end = begin(tmp_path, {"w": np.zeros(1000)})
        names = os.listdir(tmp_path)
    finally:
        threading.setprofile(None)
        returned.set()
    end()
    assert names


@pytest.mark.parametrize(
    "tree",
    [{}, {"w": np.zeros(0)}, {"w": 1j}, {"w": object()}, None],
    ids=["empty", "no elements", "complex", "object", "none"],
)
def test_trees_that_orbax_does_not_save_raise_the_same_error(tmp_path, tree):
    with pytest.raises(Exception) as expected:  # of any type: `ours` must raise the same
        theirs.save(tmp_path / "theirs", tree)
    with pytest.raises(type(expected.value)):
        ours.save(tmp_path / "ours", tree)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "abstract",
    [{"a": 0}, {"a": 0, "b": 0, "c": 0}, {"a": 0, "b": {"x": 0}}, {"a": 0, "b": jax.ShapeDtypeStruct((3,), "float32")}],
    ids=repr,
)
def test_trees_that_orbax_does_not_load_raise_the_same_error(tmp_path, abstract):
    ours.save(tmp_path / "c", {"a": 1, "b": jnp.ones(2)})
    with pytest.raises(ValueError) as expected:  # `ours` must raise the same type
        theirs.load(tmp_path / "c", abstract)
    with pytest.raises(type(expected.value)):
        ours.load(tmp_path / "c", abstract)


def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path):
    ours.save(tmp_path / "c", {"w": 1})
    with pytest.raises(ValueError, match="already exists"):
        ours.save(tmp_path / "c", {"w": 2})
    with pytest.raises(ValueError, match="zero size"):
        ours.save(tmp_path / "c", {"w": np.zeros(0)}, overwrite=True)
    assert ours.load(tmp_path / "c") == {"w": 1}
    ours.save(tmp_path / "c", {"w": 2}, overwrite=True)
    assert theirs.load(tmp_path / "c") == {"w": 2}


@pytest.mark.parametrize("missing", ["manifest.ocdbt", "d"])
@pytest.mark.parametrize("saver", [theirs, ours], ids=["orbax", "ours"])
def test_the_error_of_a_missing_file_has_the_text_of_orbax(tmp_path, saver, missing):
    saver.save(tmp_path / "c", {"w": np.arange(1000.0)})
    path = tmp_path / "c" / "state" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for loader in (theirs, ours):
        with pytest.raises(ValueError, match="Error opening .* driver:"):
            loader.load(tmp_path / "c")


def test_a_flipped_bit_is_found(tmp_path):
    ours.save(tmp_path / "c", {"w": np.arange(1000.0)})
    (data,) = (tmp_path / "c").rglob("ocdbt.process_0/d/*")
    content = bytearray(data.read_bytes())
    content[500] ^= 1
    data.write_bytes(content)
    with pytest.raises(ckptcore.errors.ChecksumError) as raised:
        ours.load(tmp_path / "c")
    assert raised.value.key.endswith(data.name) and raised.value.start <= 500 < raised.value.stop


class Words:
    """A checkpointable that needs a handler."""

    def __init__(self, words):
        self.words = words


class WordsHandler:
    """A `CheckpointableHandler` of Orbax."""

    async def save(self, directory, checkpointable):
        text = json.dumps(checkpointable.words)

        async def write():
            path = await directory.await_creation()
            (path / "words.json").write_text(text)

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Words(json.loads((directory / "words.json").read_text()))

        return read()

    async def metadata(self, directory):
        return None

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Words)

    def is_abstract_handleable(self, abstract_checkpointable):
        return isinstance(abstract_checkpointable, Words)


class Position:
    """A `StatefulCheckpointable`."""

    def __init__(self, value):
        self.value = value

    async def save(self, directory):
        value = self.value

        async def write():
            path = await directory.await_creation()
            (path / "position.txt").write_text(str(value))

        return write()

    async def load(self, directory):
        async def read():
            self.value = int((directory / "position.txt").read_text())

        return read()


@pytest.mark.parametrize("saver", [theirs, ours])
@pytest.mark.parametrize("loader", [theirs, ours])
def test_each_library_loads_checkpointables_of_handlers_of_the_other(tmp_path, saver, loader):
    registry = ours.handlers.local_registry()
    registry.add(WordsHandler)
    registry.add(ours.handlers.JsonHandler, checkpointable_name="config")
    context = ours.Context()
    context.checkpointables.registry = registry
    items = {"state": {"w": np.arange(3)}, "words": Words(["a", "b"]), "config": {"x": [1, None]}, "data": Position(5)}
    position = Position(0)
    with context:
        saver.save_checkpointables(tmp_path / "c", items)
        loaded = loader.load_checkpointables(
            tmp_path / "c", {"state": None, "words": None, "config": None, "data": position}
        )
        names = loader.checkpointables_metadata(tmp_path / "c").metadata
    assert loaded["words"].words == ["a", "b"] and loaded["config"] == {"x": [1, None]} and position.value == 5
    np.testing.assert_array_equal(loaded["state"]["w"], np.arange(3))
    assert set(names) == set(items)


def test_files_without_a_tree_are_an_orbax_checkpoint(tmp_path):
    ours.save_checkpointables(tmp_path / "c", {"data": Position(5)})
    assert theirs.is_orbax_checkpoint(tmp_path / "c") and ours.is_orbax_checkpoint(tmp_path / "c")
    position = Position(0)
    theirs.load_checkpointables(tmp_path / "c", {"data": position})
    assert position.value == 5


@pytest.mark.parametrize("saver", [theirs, ours])
@pytest.mark.parametrize("missing_ok", [True, False])
def test_checkpoints_and_checkpointables_are_deleted(tmp_path, saver, missing_ok):
    path = epath.Path(tmp_path / "c")
    saver.save_checkpointables(path, {"a": {"w": np.ones(2)}, "b": {"w": np.zeros(2)}})
    assert ours.delete(path, checkpointable_name="b", missing_ok=missing_ok)
    assert list(ours.load_checkpointables(path)) == list(theirs.load_checkpointables(path)) == ["a"]
    assert ours.delete_async(path, missing_ok=missing_ok).result()
    assert not path.exists()
    if missing_ok:
        assert not ours.delete(path, missing_ok=True)
    else:
        with pytest.raises(FileNotFoundError):
            ours.delete(path)


def test_the_public_names_are_those_of_orbax():
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= set(ours.__all__)
    for name in ("partial", "training"):
        ours_here, theirs_here = getattr(ours, name), getattr(theirs, name)
        assert {public for public in dir(theirs_here) if not public.startswith("_")} <= set(dir(ours_here))


def test_parts_that_orbax_began_are_continued_and_finalized(tmp_path):
    theirs.partial.save(tmp_path / "saved", {"a": np.ones(3)})
    ours.partial.save(tmp_path / "saved", {"b": np.zeros(2)})
    ours.partial.finalize(tmp_path / "saved")
    loaded = ours.load(tmp_path / "saved")
    assert sorted(loaded) == ["a", "b"]
    assert (loaded["a"] == 1).all()


@pytest.mark.parametrize("facts", ["", "[" * 100_000, "[]", "{}", '{"leaves":3,"custom_metadata":{}}'], ids=len)
def test_a_damaged_file_about_parts_is_named(tmp_path, facts):
    ours.partial.save(tmp_path / "saved", {"a": np.ones(3)})
    (file,) = tmp_path.glob("saved*partial_save*")
    file.write_text(facts)
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} is damaged"):
        ours.partial.save(tmp_path / "saved", {"b": np.zeros(2)})
