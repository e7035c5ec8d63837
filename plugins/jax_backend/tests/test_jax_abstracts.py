"""Abstract arrays of a checkpoint. A load with them restores the stored shardings."""

import json
import os
import subprocess
import sys
import textwrap
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax import abstract_arrays
from ckptcore_jax.testing import enable_x64
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptcore
import ckptcore.inspection.describe
from ckptcore.model import ArrayRecord, ArraySpec, Node, TreeMetadata

CONTEXT = ckptcore.Context(durability="none")


def mesh_of(ids, **axes: int) -> Mesh:
    return Mesh(np.array(jax.devices())[list(ids)].reshape(tuple(axes.values())), tuple(axes))


def on_mesh(shape, spec, ids=range(8), **axes: int) -> jax.Array:
    values = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return jax.device_put(values, NamedSharding(mesh_of(ids, **axes), spec))


class Pair(NamedTuple):
    first: object
    second: object


def new_state():
    device = jax.devices()[5]
    kinds = [memory.kind for memory in device.addressable_memories()]
    other = next((kind for kind in kinds if kind != device.default_memory().kind), None)
    keys = jax.random.split(jax.random.key(3), 8)
    return {
        "sharded": on_mesh((16, 8), P("b", "a"), a=2, b=4),
        "replicated": on_mesh((3,), P(), a=8),
        "partly": [on_mesh((8, 3), P(None, None), a=4, b=2), on_mesh((8, 3), P("b"), a=4, b=2)],
        "turned": on_mesh((8,), P("a"), [3, 1, 2, 0, 7, 6, 4, 5], a=8),
        "some": on_mesh((4,), P("a"), [4, 5, 6, 7], a=4),
        "one": (jax.device_put(jnp.ones((2, 2), jnp.bfloat16), device), jnp.zeros(3)),
        "elsewhere": jax.device_put(jnp.ones(4), SingleDeviceSharding(device, memory_kind=other)),
        "weak": jnp.asarray(2.5),
        "key": jax.random.key(1, impl="rbg"),
        "keys": jax.device_put(keys, NamedSharding(mesh_of(range(8), a=4, b=2), P("a"))),
        "empty": jnp.zeros((0, 4)),
    }


def saved(path, state, layout="safetensors"):
    ckptcore.save(path, state, layout=layout, context=CONTEXT)
    return ckptcore.metadata(path)


def is_key(leaf) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def elements(leaf) -> bytes:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()


# --- as it was saved


def test_a_checkpoint_loads_sharded_as_it_was_saved(tmp_path):
    state = new_state()
    loaded = ckptcore.load(tmp_path / "c", abstract_arrays(saved(tmp_path / "c", state)), context=CONTEXT)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for leaf, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert getattr(leaf, "weak_type", None) == getattr(expected, "weak_type", None)  # keys have no `weak_type`
        assert leaf.sharding == expected.sharding
        assert leaf.committed == expected.committed
        assert elements(leaf) == elements(expected)


@pytest.mark.skipif(not hasattr(jax.sharding, "AxisType"), reason="this version of JAX has no types of axes")
def test_types_of_axes_are_restored(tmp_path):
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=kinds)
    metadata = saved(tmp_path / "c", {"w": jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("a", "b")))})
    loaded = ckptcore.load(tmp_path / "c", abstract_arrays(metadata), context=CONTEXT)["w"]
    assert loaded.sharding.mesh.axis_types == kinds
    assert loaded.sharding == NamedSharding(mesh, P("a", "b"))


def test_arrays_with_the_same_notes_get_the_same_sharding(tmp_path):
    state = [on_mesh((8,), P("a"), a=8), on_mesh((16, 3), P("a"), a=8)]
    first, second = abstract_arrays(saved(tmp_path / "c", state))
    assert first.sharding is second.sharding


def test_arrays_on_the_default_device_load_uncommitted(tmp_path):
    state = {"w": on_mesh((8,), P("a"), a=8), "step": jnp.asarray(3, jnp.int32)}
    loaded = ckptcore.load(tmp_path / "c", abstract_arrays(saved(tmp_path / "c", state)), context=CONTEXT)
    assert jax.jit(lambda tree: tree["w"] * tree["step"])(loaded)[2] == 6


def test_only_arrays_on_the_current_default_device_have_no_sharding(tmp_path):
    metadata = saved(tmp_path / "c", [jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[3])])
    with jax.default_device(jax.devices()[3]):
        first, second = abstract_arrays(metadata)
    assert first.sharding == SingleDeviceSharding(jax.devices()[0])
    assert second.sharding is None


# --- the tree


def test_containers_equal_those_of_the_metadata(tmp_path):
    state = {
        "ordered": OrderedDict([("z", jnp.ones(1)), ("a", (jnp.ones(2), [jnp.ones(3)]))]),
        "named": Pair(jnp.ones(4), {3: jnp.ones(5), 20: jnp.ones(6)}),
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }
    metadata = saved(tmp_path / "c", state)
    abstract = abstract_arrays(metadata)
    assert jax.tree.structure(abstract) == jax.tree.structure(metadata.abstract)
    assert list(abstract["ordered"]) == ["z", "a"]
    for actual, expected in zip(jax.tree.leaves(abstract), jax.tree.leaves(metadata.abstract), strict=True):
        assert actual.shape == expected.shape
    leaf = saved(tmp_path / "leaf", jnp.ones(7))
    assert abstract_arrays(leaf).shape == (7,)


def test_tied_arrays_are_tied_in_the_abstract_tree(tmp_path):
    shared = on_mesh((8,), P("a"), a=8)
    abstract = abstract_arrays(saved(tmp_path / "c", {"a": shared, "b": shared, "c": 1}))
    assert abstract["a"].sharding == abstract["b"].sharding == shared.sharding
    assert abstract["c"] == 1


def test_one_of_several_checkpointables_has_abstract_arrays(tmp_path):
    class Counter:
        def save(self, directory):
            (directory / "count").write_text("3")

        def load(self, directory): ...

    state = {"w": on_mesh((8,), P("a"), a=8)}
    ckptcore.save_checkpointables(tmp_path / "c", {"model": state, "counter": Counter()}, context=CONTEXT)
    checkpointables = ckptcore.metadata(tmp_path / "c").checkpointables
    abstract = abstract_arrays(checkpointables["model"])
    loaded = ckptcore.load_checkpointables(tmp_path / "c", {"model": abstract}, context=CONTEXT)
    assert loaded["model"]["w"].sharding == state["w"].sharding
    assert abstract_arrays(checkpointables["counter"]) is checkpointables["counter"].abstract is None, (
        "files are no arrays"
    )


# --- arrays of other frameworks, and dtypes that JAX lacks


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "dcp"])
def test_numpy_arrays_stay_numpy_arrays(tmp_path, layout):
    state = {"w": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array([True, False]), "j": jnp.ones(2)}
    metadata = saved(tmp_path / "c", state, layout)
    abstract = abstract_arrays(metadata)
    assert {**abstract, "j": None} == {**metadata.abstract, "j": None}
    loaded = ckptcore.load(tmp_path / "c", abstract, context=CONTEXT)
    assert {name: type(leaf) for name, leaf in loaded.items()} == {name: type(leaf) for name, leaf in state.items()}


def test_torch_tensors_do_not_become_jax_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ckptcore_torch")
    metadata = saved(tmp_path / "c", {"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert abstract_arrays(metadata) == metadata.abstract


def test_arrays_of_other_software_become_jax_arrays(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"w": np.ones((2, 3), np.float16)}, tmp_path / "model.safetensors")
    abstract = abstract_arrays(ckptcore.metadata(tmp_path))
    assert abstract["w"] == jax.ShapeDtypeStruct((2, 3), jnp.float16) and abstract["w"].sharding is None
    loaded = ckptcore.load(tmp_path, abstract, context=CONTEXT)["w"]
    assert isinstance(loaded, jax.Array) and not loaded.committed


def test_values_and_arrays_that_jax_does_not_support_are_unchanged(tmp_path):
    state = {
        "name": "adam", "none": None, "step": 3, "rate": 0.5, "raw": b"\x00\xff", "flag": True,
        "scalar": np.float32(1.5), "wide": np.arange(3), "float64": np.ones(2), "complex128": np.ones(2, complex),
        "text": np.array(["a", "bc"]), "date": np.array(["2020-01-01"], "datetime64[D]"),
    }  # fmt: skip
    metadata = saved(tmp_path / "c", state)
    abstract = abstract_arrays(metadata)
    assert abstract == metadata.abstract
    loaded = ckptcore.load(tmp_path / "c", abstract, context=CONTEXT)
    assert all(type(loaded[name]) is type(leaf) and np.array_equal(loaded[name], leaf) for name, leaf in state.items())


def test_wide_dtypes_are_jax_arrays_if_jax_supports_them(tmp_path):
    with enable_x64():
        sharding = NamedSharding(mesh_of(range(8), a=8), P("a"))
        metadata = saved(tmp_path / "c", {"w": jax.device_put(jnp.arange(8, dtype=jnp.int64), sharding)})
        assert abstract_arrays(metadata)["w"].sharding == sharding
        loaded = ckptcore.load(tmp_path / "c", abstract_arrays(metadata), context=CONTEXT)["w"]
        assert loaded.dtype == jnp.int64 and loaded.sharding == sharding
    assert abstract_arrays(metadata) == {"w": ckptcore.AbstractArray((8,), "int64")}


# --- strange records


def metadata_of(record: ArrayRecord) -> ckptcore.inspection.describe.CheckpointMetadata:
    abstract = {"w": ckptcore.AbstractArray(record.spec.shape, record.spec.dtype)}
    tree = TreeMetadata(Node("dict", ("w",), (None,)), (record,))
    contents = ckptcore.inspection.describe.TreeContents(abstract, tree, "safetensors", {})
    return ckptcore.inspection.describe.CheckpointMetadata(None, "a stranger", {}, None, contents=contents)


def sharded_notes(spec, **mesh: int) -> dict:
    return {"sharding": {"type": "NamedSharding", "mesh": mesh, "spec": spec}}


@pytest.mark.parametrize("spec", [["a", "b"], ["b"], [None, "a"], [["a", "b"]]])
def test_an_impossible_sharding_is_ignored(spec):
    record = ArrayRecord(ArraySpec((3,), "float32"), notes=sharded_notes(spec, a=2, b=4))
    assert abstract_arrays(metadata_of(record))["w"].sharding is None


def test_sharding_of_key_data_becomes_that_of_the_keys():
    notes = sharded_notes(["a", None], a=4) | {"impl": "threefry2x32"}
    abstract = abstract_arrays(metadata_of(ArrayRecord(ArraySpec((8, 2), "uint32"), "jax.key", notes=notes)))["w"]
    assert abstract.shape == (8,) and is_key(abstract)
    assert abstract.sharding == NamedSharding(mesh_of(range(4), a=4), P("a"))


@pytest.mark.parametrize("impl", ["nonsense", "", None, 3, ["rbg"], "rbg"])
def test_keys_without_a_valid_implementation_are_plain_data(impl):
    """For "rbg" the data has the wrong shape: such a key has four numbers, not two."""
    record = ArrayRecord(ArraySpec((8, 2), "uint32"), "jax.key", notes={"impl": impl})
    assert abstract_arrays(metadata_of(record))["w"] == jax.ShapeDtypeStruct((8, 2), jnp.uint32)


def test_unknown_kinds_and_weak_types_are_plain_arrays():
    record = ArrayRecord(ArraySpec((2,), "int8"), "stranger.kind", notes={"weak_type": "yes", "sharding": 3})
    assert abstract_arrays(metadata_of(record))["w"] == jax.ShapeDtypeStruct((2,), jnp.int8)


# --- other devices


def test_devices_can_be_chosen(tmp_path):
    metadata = saved(tmp_path / "c", [on_mesh((8,), P("a"), range(4), a=4), jnp.ones(2), on_mesh((8,), P("a"), a=8)])
    small, single, large = abstract_arrays(metadata, jax.devices()[4:])
    assert small.sharding == NamedSharding(mesh_of([4, 5, 6, 7], a=4), P("a"))
    assert single.sharding == SingleDeviceSharding(jax.devices()[4])
    assert large.sharding is None


@pytest.mark.system
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_checkpoint_of_eight_devices_loads_on_fewer(tmp_path, count):
    """Runs in a separate process, which has fewer devices."""
    state = new_state()
    saved(tmp_path / "c", state)
    program = f"""
        import json, jax, numpy as np, ckptcore, ckptcore_jax
        path = {str(tmp_path / "c")!r}
        loaded = ckptcore.load(path, ckptcore_jax.abstract_arrays(ckptcore.metadata(path)))
        told = {{}}
        for path, leaf in jax.tree_util.tree_leaves_with_path(loaded):
            assert isinstance(leaf, jax.Array)
            plain = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            told[jax.tree_util.keystr(path)] = (
                [device.id for device in leaf.sharding.device_set], leaf.committed, np.asarray(plain).tobytes().hex()
            )
        print(json.dumps(told))
    """
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        ids, committed, data = told.pop(jax.tree_util.keystr(path))
        assert data == elements(leaf).hex()
        before = sorted(device.id for device in leaf.sharding.device_set)
        fits = len(before) <= count
        if not fits:
            assert (ids, committed) == ([0], False)
        elif max(before) < count:
            assert (sorted(ids), committed) == (before, leaf.committed)
        else:
            assert sorted(ids) == list(range(len(before)))
    assert not told
