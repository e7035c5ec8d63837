"""JAX with ckptcore's public functions: saved states load again, on other devices and in other frameworks."""

import functools
import gc
import math
import subprocess
import sys
import textwrap
import threading
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ckptcore_jax import JaxLeafHandler, abstract_arrays
from ckptcore_jax.testing import host_memory
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, format_path

CONTEXT = ckptcore.Context(durability="none")


def mesh(**axes: int) -> Mesh:
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def abstract_of(tree: Any, sharding=None) -> Any:
    """Return the tree with abstract arrays. They have the given sharding, or keep their own."""

    def abstract_leaf(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)

    return jax.tree.map(abstract_leaf, tree)


def data(leaf: Any) -> np.ndarray:
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    # A copy, because a view would keep JAX from donating the memory.
    return np.array(jax.random.key_data(leaf) if keys else leaf)


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal structures, types, dtypes, shardings and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if callable(other):
            assert leaf is other
            continue
        assert type(leaf) is type(other)
        if isinstance(other, jax.Array):
            assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
            assert data(leaf).tobytes() == data(other).tobytes()
            assert leaf.sharding == other.sharding
        else:
            assert leaf == other


# --- devices


def test_an_array_moves_from_eight_devices_to_four_to_one_and_back(tmp_path):
    expected = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    shardings = [
        NamedSharding(mesh(a=4, b=2), P("a", "b")),
        NamedSharding(mesh(b=2, a=2), P("a", "b")),
        SingleDeviceSharding(jax.devices()[6]),
        NamedSharding(mesh(a=2, b=4), P(("b", "a"))),
        NamedSharding(mesh(a=8), P()),
        NamedSharding(mesh(a=3), P(None, "a")),
    ]
    state = {"w": jax.device_put(expected, shardings[0])}
    for number, sharding in enumerate([*shardings[1:], shardings[0]]):
        ckptcore.save(tmp_path / str(number), state, context=CONTEXT)
        abstract = {"w": jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)}
        state = ckptcore.load(tmp_path / str(number), abstract, context=CONTEXT)
        assert state["w"].sharding == sharding
        assert np.array_equal(state["w"], expected)
        for shard in state["w"].addressable_shards:
            assert np.array_equal(shard.data, expected[shard.index])


def test_one_tree_with_arrays_over_several_meshes(tmp_path):
    first, second = mesh(data=2, model=4), mesh(stage=3)
    backwards = Mesh(np.array(jax.devices())[::-1].reshape(8), ("all",))
    state = {
        "a": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(first, P("model", "data"))),
        "b": [jax.device_put(jnp.arange(9, dtype=jnp.int8), NamedSharding(second, P("stage")))],
        "c": jax.device_put(jnp.arange(16, dtype=jnp.bfloat16), NamedSharding(backwards, P("all"))),
        "d": jax.device_put(jnp.ones(3), jax.devices()[5]),
        "e": jnp.ones(2),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(first, P("data"))),
    }
    ckptcore.save(tmp_path / "checkpoint", state, context=CONTEXT)
    assert_same(ckptcore.load(tmp_path / "checkpoint", state, context=CONTEXT), state)
    assert_same(ckptcore.load(tmp_path / "checkpoint", abstract_of(state), context=CONTEXT), state)


def test_metadata_contains_shardings(tmp_path):
    state = {"w": jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh(x=2, y=2), P("y", None)))}
    ckptcore.save(tmp_path / "checkpoint", state, context=CONTEXT)
    (record,) = ckptcore.metadata(tmp_path / "checkpoint").tree.leaves
    assert isinstance(record, ArrayRecord) and record.cuts == ((4,), ())
    assert record.notes == {"sharding": {"type": "NamedSharding", "mesh": {"x": 2, "y": 2}, "spec": ["y", None]}}


def test_arrays_offloaded_to_the_host_load_to_the_host(tmp_path):
    sharding = NamedSharding(mesh(a=4), P("a"), memory_kind=host_memory())
    state = {
        "w": jax.device_put(np.arange(12, dtype=np.float32).reshape(4, 3), sharding),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 4), sharding),
        "one": jax.device_put(np.arange(3), SingleDeviceSharding(jax.devices()[2], memory_kind=host_memory())),
    }
    ckptcore.save_async(tmp_path / "checkpoint", state, context=CONTEXT).result()
    for abstract in (state, abstract_of(state), abstract_arrays(ckptcore.metadata(tmp_path / "checkpoint"))):
        assert_same(ckptcore.load(tmp_path / "checkpoint", abstract, context=CONTEXT), state)


# --- other frameworks


def mixed_state():
    return {
        "w": jax.device_put(jnp.arange(32.0).reshape(8, 4) / 3, NamedSharding(mesh(a=4), P("a"))),
        "h": jnp.arange(6, dtype=jnp.bfloat16),
        "mask": jnp.asarray([True, False]),
        "scalar": jnp.asarray(3, jnp.int32),
    }


def test_jax_loads_in_numpy_and_back(tmp_path):
    state = mixed_state()
    ckptcore.save(tmp_path / "jax", state, context=CONTEXT)
    plain = ckptcore.load(tmp_path / "jax", context=CONTEXT)
    for name, leaf in plain.items():
        assert isinstance(leaf, np.ndarray)
        assert leaf.dtype == state[name].dtype and leaf.tobytes() == np.asarray(state[name]).tobytes()
    ckptcore.save(tmp_path / "numpy", plain, context=CONTEXT)
    assert_same(ckptcore.load(tmp_path / "numpy", state, context=CONTEXT), state)


def test_jax_loads_in_torch_and_back(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ckptcore_torch")
    state = mixed_state()
    ckptcore.save(tmp_path / "jax", state, context=CONTEXT)
    meta = {
        name: torch.empty(leaf.shape, dtype=getattr(torch, str(leaf.dtype)), device="meta")
        for name, leaf in state.items()
    }
    tensors = ckptcore.load(tmp_path / "jax", meta, context=CONTEXT)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert np.array_equal(tensors["w"].numpy(), state["w"])
    ckptcore.save(tmp_path / "torch", tensors, context=CONTEXT)
    assert_same(ckptcore.load(tmp_path / "torch", abstract_of(state), context=CONTEXT), state)


def test_keys_load_as_their_data_in_numpy(tmp_path):
    key = jax.random.key(5, impl="rbg")
    ckptcore.save(tmp_path / "checkpoint", {"rng": key}, context=CONTEXT)
    loaded = ckptcore.load(tmp_path / "checkpoint", context=CONTEXT)["rng"]
    assert loaded.tobytes() == np.asarray(jax.random.key_data(key)).tobytes()
    back = ckptcore.load(tmp_path / "checkpoint", {"rng": jax.random.key(0, impl="rbg")}, context=CONTEXT)["rng"]
    assert np.array_equal(jax.random.normal(back, (4,)), jax.random.normal(key, (4,)))
    with pytest.raises(TreeMismatchError, match="'rbg', but 'unsafe_rbg'.*wrap_key_data"):
        ckptcore.load(tmp_path / "checkpoint", {"rng": jax.random.key(0, impl="unsafe_rbg")}, context=CONTEXT)


# --- training states


@flax.struct.dataclass
class TrainState:
    step: Any
    params: Any
    optimizer: Any
    rng: Any
    apply: Any = flax.struct.field(pytree_node=False)
    missing: Any = None


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)))


def new_train_state() -> TrainState:
    params = {"dense": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}, "scales": [jnp.ones(()), jnp.ones(3, jnp.bfloat16)]}
    return TrainState(jnp.asarray(0), params, OPTIMIZER.init(params), jax.random.key(0), jnp.dot)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState) -> TrainState:
    rng, use = jax.random.split(state.rng)

    def loss(params):
        out = state.apply(jax.random.normal(use, (2, 8)), params["dense"]["w"]) + params["dense"]["b"]
        return (out * params["scales"][0]).sum() + params["scales"][1].sum().astype(jnp.float32)

    updates, optimizer = OPTIMIZER.update(jax.grad(loss)(state.params), state.optimizer, state.params)
    return state.replace(
        step=state.step + 1, params=optax.apply_updates(state.params, updates), optimizer=optimizer, rng=rng
    )


def test_training_resumes_from_the_checkpoint(tmp_path):
    state = new_train_state()
    for _ in range(3):
        state = train_step(state)
    ckptcore.save(tmp_path / "checkpoint", state, context=CONTEXT)
    loaded = ckptcore.load(tmp_path / "checkpoint", jax.eval_shape(new_train_state), context=CONTEXT)
    assert_same(loaded, state)
    compiled = train_step._cache_size()
    for _ in range(3):
        state, loaded = train_step(state), train_step(loaded)
    assert_same(loaded, state)
    assert train_step._cache_size() == compiled, "what is loaded must not make JAX compile again"


def test_donated_state_is_a_valid_abstract_tree(tmp_path):
    state = train_step(new_train_state())
    ckptcore.save(tmp_path / "checkpoint", state, context=CONTEXT)
    expected = jax.tree.map(data, state)
    train_step(state)
    assert state.params["dense"]["w"].is_deleted()
    with pytest.raises(UnsupportedLeafError, match=r"params/dense/w: .*donated.*Nothing was written"):
        ckptcore.save(tmp_path / "other", state, context=CONTEXT)
    assert not (tmp_path / "other").exists()
    loaded = ckptcore.load(tmp_path / "checkpoint", state, context=CONTEXT)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(data, loaded), expected))


def test_equinox_models_keep_their_functions(tmp_path):
    def make(seed):
        return eqx.nn.MLP(2, 3, 4, 2, activation=jax.nn.relu, key=jax.random.key(seed))

    model = make(1)
    ckptcore.save(tmp_path / "checkpoint", model, context=CONTEXT)
    for abstract in (make(2), eqx.filter_eval_shape(make, 2)):
        loaded = ckptcore.load(tmp_path / "checkpoint", abstract, context=CONTEXT)
        assert type(loaded) is type(model)
        assert np.array_equal(loaded(jnp.ones(2)), model(jnp.ones(2)))


@pytest.mark.skipif(not hasattr(nnx, "List"), reason="Flax before 0.12 has no lists of modules")
def test_nnx_modules_and_their_state_are_restored(tmp_path):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.drop(x)

    network = Network(nnx.Rngs(0))
    graph, state = nnx.split(network)
    ckptcore.save(tmp_path / "state", state, context=CONTEXT)
    abstract = nnx.state(nnx.eval_shape(lambda: Network(nnx.Rngs(1))))
    loaded = ckptcore.load(tmp_path / "state", abstract, context=CONTEXT)
    assert type(loaded) is type(state)
    again = nnx.merge(graph, loaded)
    assert np.array_equal(again(jnp.ones((1, 2))), network(jnp.ones((1, 2))))
    names = [format_path(path) for path in ckptcore.metadata(tmp_path / "state").tree.paths]
    assert "layers[0]/kernel.value" in names


# --- asynchronous saves


class Watching(JaxLeafHandler):
    """A handler that records the parts that it returned for a save, and forbids copies."""

    def __init__(self):
        super().__init__(copy=False)
        object.__setattr__(self, "handed", [])

    def copy_to_host(self, leaf, boxes, memory):
        class NoMemory:
            def empty(self, spec):
                raise AssertionError(f"memory for {spec} was taken")

            def copy(self, source):
                raise AssertionError(f"{source.shape} was copied")

        pending = super().copy_to_host(leaf, boxes, NoMemory())
        self.handed.extend((leaf, part.result()) for part in pending)
        return pending


def test_asynchronous_save_copies_nothing_without_copy(tmp_path):
    state = train_step(new_train_state())
    sharded = {"x": jax.device_put(jnp.arange(4096.0), NamedSharding(mesh(a=8), P("a")))}
    handler = Watching()
    context = ckptcore.Context(durability="none", plugins=ckptcore.context.PluginOptions(handlers={jax.Array: handler}))
    ckptcore.save_async(tmp_path / "checkpoint", {"train": state, "sharded": sharded}, context=context).result()
    assert handler.handed
    for leaf, part in handler.handed:
        shards = (jax.random.key_data(leaf) if isinstance(leaf.dtype, jax.dtypes.extended) else leaf)  # fmt: skip
        pointers = {shard.data.unsafe_buffer_pointer() for shard in shards.addressable_shards}
        assert part.ctypes.data in pointers


@pytest.mark.parametrize("sharding", [None, NamedSharding(mesh(a=8), P("a"))], ids=["one device", "eight"])
def test_arrays_can_be_deleted_and_donated_once_save_async_returned(tmp_path, sharding):
    @functools.partial(jax.jit, donate_argnums=0)
    def overwrite(tree):
        return jax.tree.map(lambda leaf: leaf * 0 - 1, tree)

    count = 8
    make = jax.jit(lambda: {f"{number}": jnp.arange(1 << 16, dtype=jnp.float32) + number for number in range(count)},
                   out_shardings=sharding)  # fmt: skip
    state = make()
    handle = ckptcore.save_async(tmp_path / "checkpoint", state, context=CONTEXT)
    for number in range(count // 2):
        state.pop(f"{number}").delete()
    for _ in range(4):
        state = overwrite(state)
    jax.block_until_ready(state)
    del state
    gc.collect()
    noise = [jnp.full((1 << 16,), -2.0) for _ in range(count)]
    handle.result()
    loaded = ckptcore.load(tmp_path / "checkpoint", context=CONTEXT)
    for number in range(count):
        assert np.array_equal(loaded[f"{number}"], np.arange(1 << 16, dtype=np.float32) + number)
    assert len(noise) == count


class LateLayout(ckptcore.SafetensorsLayout):
    """A layout that waits before it writes."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "may_write", threading.Event())

    def write(self, snapshot, store):
        self.may_write.wait()
        return super().write(snapshot, store)


def from_shards(array):
    parts = np.split(array, 8)
    shards = [jax.device_put(part, device) for part, device in zip(parts, jax.devices(), strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh(a=8), P("a")), shards)


ALIASES = {
    "device_put": jax.device_put,
    "device_put may_alias=False": lambda array: jax.device_put(array, may_alias=False),
    "device_put replicated": lambda array: jax.device_put(array, NamedSharding(mesh(a=8), P())),
    "device_put in pinned_host": lambda array: jax.device_put(
        array, SingleDeviceSharding(jax.devices()[0], memory_kind=host_memory())
    ),
    "dlpack": jax.dlpack.from_dlpack,
    "make_array_from_callback": lambda array: jax.make_array_from_callback(
        array.shape, NamedSharding(mesh(a=8), P("a")), lambda index: array[index]
    ),
    "make_array_from_single_device_arrays": from_shards,
    "key data": lambda array: jax.random.wrap_key_data(jax.device_put(array.reshape(-1, 2))),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_changes_after_save_async_returned_are_not_saved(tmp_path, alias):
    layout = LateLayout()
    size = 1 << 18
    memory = np.empty(4 * size + 64, np.uint8)
    mine = memory[-memory.ctypes.data % 64 :][: 4 * size].view(np.uint32)
    mine[:] = 7
    leaf = alias(mine)
    handle = ckptcore.save_async(tmp_path / "checkpoint", {"x": leaf}, layout=layout, context=CONTEXT)
    mine[:] = 8
    layout.may_write.set()
    handle.result()
    assert (data(leaf) == 8).any(), "this does not alias, and tests nothing"
    loaded = data(ckptcore.load(tmp_path / "checkpoint", {"x": leaf})["x"])
    assert loaded.size == size
    assert (loaded == 7).all()


def test_an_array_can_be_donated_in_place_once_save_async_returned(tmp_path):
    state = jax.jit(lambda: jnp.arange(1 << 18, dtype=jnp.float32))()
    before = state.unsafe_buffer_pointer()
    layout = LateLayout()
    handle = ckptcore.save_async(tmp_path / "checkpoint", {"x": state}, layout=layout, context=CONTEXT)
    after = jax.jit(lambda array: array - 1, donate_argnums=0)(state)
    layout.may_write.set()
    assert after.unsafe_buffer_pointer() == before
    handle.result()
    assert np.array_equal(ckptcore.load(tmp_path / "checkpoint")["x"], np.arange(1 << 18, dtype=np.float32))


# --- memory


@pytest.mark.system
def test_load_allocates_the_memory_of_the_state_once(tmp_path):
    """Runs in a separate process, because the system records only the peak memory of a process."""
    program = f"""
        import jax, jax.numpy as jnp, numpy as np, ckptcore
        def used(what):
            with open("/proc/self/status") as lines:
                return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
        small = {{"w": [jnp.ones((8, 8)), jax.device_put(jnp.ones((8, 8)), sharding)]}}
        ckptcore.save({str(tmp_path / "small")!r}, small)
        ckptcore.load({str(tmp_path / "small")!r}, small)
        shape = (1 << 12, 1 << 10)
        abstract = {{"w": [jax.ShapeDtypeStruct(shape, jnp.float32),
                         jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)] * 8}}
        before = used("VmRSS")
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        state = ckptcore.load({str(tmp_path / "checkpoint")!r}, abstract)
        print((used("VmHWM") - before) / sum(leaf.nbytes for leaf in state["w"]))
        assert all((leaf == 1).all() for leaf in state["w"])
    """
    big = [np.ones((1 << 12, 1 << 10), np.float32) for _ in range(16)]
    ckptcore.save(tmp_path / "checkpoint", {"w": big}, context=CONTEXT)
    try:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
    except OSError:
        pytest.skip("this system does not count the memory that a process uses at most")
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.3


# --- other cases


def test_load_into_replaces_arrays_in_their_containers(tmp_path):
    saved = {"w": jnp.arange(4.0), "list": [jnp.ones(2), 3]}
    ckptcore.save(tmp_path / "checkpoint", saved, context=CONTEXT)
    old = jnp.zeros(4)
    target = {"w": old, "list": [jnp.zeros(2), 0]}
    inner = target["list"]
    assert ckptcore.load_into(tmp_path / "checkpoint", target, context=CONTEXT) is target
    assert target["list"] is inner
    assert_same(target, saved)
    assert (old == 0).all()


def test_tied_arrays_are_stored_once(tmp_path):
    shared = jnp.arange(1024.0)
    ckptcore.save(tmp_path / "checkpoint", {"a": shared, "b": [shared], "c": shared + 0}, context=CONTEXT)
    metadata = ckptcore.metadata(tmp_path / "checkpoint")
    assert metadata.tree.aliases == {1: 0}
    loaded = ckptcore.load(tmp_path / "checkpoint", {"a": shared, "b": [shared], "c": shared}, context=CONTEXT)
    assert all(np.array_equal(leaf, shared) for leaf in jax.tree.leaves(loaded))


def test_a_save_inside_jit_is_refused_by_path(tmp_path):
    @jax.jit
    def step(params):
        ckptcore.save(tmp_path / "checkpoint", {"params": params}, context=CONTEXT)
        return params

    with pytest.raises(UnsupportedLeafError, match=r"params/w: .*tracer"):
        step({"w": jnp.ones(2)})
    assert not (tmp_path / "checkpoint").exists()


def test_an_abstract_state_is_refused_by_path(tmp_path):
    with pytest.raises(UnsupportedLeafError, match="step.*no elements"):
        ckptcore.save(tmp_path / "checkpoint", jax.eval_shape(new_train_state), context=CONTEXT)
    assert not (tmp_path / "checkpoint").exists()


def test_another_shape_is_a_mismatch(tmp_path):
    ckptcore.save(tmp_path / "checkpoint", {"w": jnp.ones((4, 2))}, context=CONTEXT)
    with pytest.raises(TreeMismatchError, match="w: shape"):
        ckptcore.load(tmp_path / "checkpoint", {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32)}, context=CONTEXT)


# --- abstract meshes

NEEDS_SET_MESH = pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this version of JAX has no jax.set_mesh")


def on_abstract_mesh(mesh, *spec, shape=(8, 4)) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh.abstract_mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@NEEDS_SET_MESH
def test_a_sharding_over_an_abstract_mesh_is_one_over_the_mesh_that_is_set(tmp_path):
    values, mesh = jnp.arange(32.0).reshape(8, 4), jax.make_mesh((4, 2), ("a", "b"))
    ckptcore.save(tmp_path / "c", {"w": values, "k": jax.random.split(jax.random.key(0), 4)})
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    keys = jax.ShapeDtypeStruct((4,), keys.dtype, sharding=NamedSharding(mesh.abstract_mesh, P("a")))
    abstract = {"w": on_abstract_mesh(mesh, "a", "b"), "k": keys}
    with jax.set_mesh(mesh):
        loaded = ckptcore.load(tmp_path / "c", abstract)
        resolved = ckptcore.abstract(abstract)
    again = ckptcore.load_async(tmp_path / "c", resolved).result()
    for tree in (loaded, again):
        assert tree["w"].sharding == NamedSharding(mesh, P("a", "b")) and (tree["w"] == values).all()
        assert tree["k"].sharding == NamedSharding(mesh, P("a"))


@NEEDS_SET_MESH
def test_a_sharding_over_an_abstract_mesh_needs_the_mesh_to_be_set(tmp_path):
    ckptcore.save(tmp_path / "c", {"w": jnp.zeros((8, 4))})
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    abstract = {"w": on_abstract_mesh(mesh, "a")}
    with pytest.raises(UnsupportedLeafError, match=r"no mesh is set in this thread"):
        ckptcore.load(tmp_path / "c", abstract)
    for other in (jax.make_mesh((2, 4), ("a", "b")), jax.make_mesh((4, 2), ("b", "a")), jax.make_mesh((8,), ("a",))):
        with jax.set_mesh(other), pytest.raises(UnsupportedLeafError, match=r"the current mesh has"):
            ckptcore.load(tmp_path / "c", abstract)


@NEEDS_SET_MESH
def test_nnx_module_created_under_a_mesh_loads_onto_it(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    def make():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
        return nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))

    mesh = jax.make_mesh((4, 2), ("a", "b"))
    with jax.set_mesh(mesh):
        module, abstract = make(), nnx.eval_shape(make)
        ckptcore.save_checkpointables(tmp_path / "c", {"model": module})
        loaded = ckptcore.load_checkpointables(tmp_path / "c", {"model": abstract})["model"]
    assert isinstance(abstract.kernel.get_raw_value().sharding.mesh, jax.sharding.AbstractMesh)
    assert loaded.kernel.get_raw_value().sharding == NamedSharding(mesh, P("a", "b"))
    assert (loaded.kernel.get_raw_value() == module.kernel.get_raw_value()).all()
