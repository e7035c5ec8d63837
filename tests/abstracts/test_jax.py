"""`ckptcore.abstract` of JAX arrays and containers, and loads that use the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax.testing import host_memory
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptcore
from ckptcore.errors import UnsupportedLeafError
from tests.abstracts.untouched import assert_same

equinox = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
train_state = pytest.importorskip("flax.training.train_state")
checkpoint = pytest.importorskip("orbax.checkpoint.experimental.v1")
linen = pytest.importorskip("flax.linen")


def mesh(*shape: int) -> Mesh:
    """Return a mesh of devices. The tests of this repository have eight."""
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])


def spec(*axes: Any) -> Any:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # JAX leaves its constructor untyped


def structure(tree: Any) -> Any:
    """Return the tree structure of a value in JAX, including static fields."""
    return jax.tree.structure(tree)


def assert_same_leaves(actual: Any, expected: Any) -> None:
    """Compare like `assert_same`, but only the leaves, because JAX cannot compare some static fields."""
    assert structure(actual) == structure(expected)
    assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected))


def live() -> list[Any]:
    """Return all live arrays."""
    arrays: list[Any] = jax.live_arrays()  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    return arrays


def arrays() -> dict[str, Any]:
    """Return arrays with every kind of placement."""
    rows = NamedSharding(mesh(4, 2), spec("x", "y"))
    pinned = SingleDeviceSharding(jax.devices()[3], memory_kind=host_memory())
    keys = jax.random.split(jax.random.key(3), 8)
    return {
        "uncommitted": jnp.arange(6.0).reshape(2, 3),
        "weak": jnp.asarray(2.5),
        "committed": jax.device_put(jnp.ones(3), jax.devices()[0]),
        "another device": jax.device_put(jnp.ones(3, jnp.int4), jax.devices()[5]),
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), rows),
        "replicated": jax.device_put(jnp.ones(4, jnp.bfloat16), NamedSharding(mesh(8), spec())),
        "float8": jax.device_put(jnp.ones((8, 2), jnp.float8_e4m3fn), NamedSharding(mesh(8), spec("x"))),
        "in host memory": jax.device_put(jnp.ones((2, 2)), pinned),
        "key": jax.random.key(7),
        "rbg": jax.random.key(7, impl="rbg"),
        "keys": jax.device_put(keys, NamedSharding(mesh(8), spec("x"))),
        "empty": jnp.zeros((0, 3)),
    }


def test_arrays_load_with_their_abstract_arrays(tmp_path: Path) -> None:
    state = arrays()
    ckptcore.save(tmp_path / "c", state)
    abstract = ckptcore.abstract(state)
    assert {type(leaf) for leaf in abstract.values()} == {jax.ShapeDtypeStruct}
    assert abstract["sharded"].sharding == state["sharded"].sharding
    assert abstract["in host memory"].sharding.memory_kind == "pinned_host"
    assert abstract["uncommitted"].sharding is None and abstract["weak"].weak_type
    assert abstract["keys"].dtype == state["keys"].dtype
    assert_same(ckptcore.load(tmp_path / "c", abstract), state)
    assert ckptcore.abstract(abstract) == abstract


def test_deleted_arrays_have_an_abstract_array(tmp_path: Path) -> None:
    state = arrays()
    ckptcore.save(tmp_path / "c", state)
    expected, before = arrays(), ckptcore.abstract(state)
    for array in state.values():
        array.delete()
    abstract = ckptcore.abstract(state)
    assert abstract == before
    assert_same(ckptcore.load(tmp_path / "c", abstract), expected)


def test_a_donated_array_has_an_abstract_array() -> None:
    array = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh(8), spec("x")))
    sharding = array.sharding
    jax.jit(lambda given: given + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    abstract = ckptcore.abstract(array)
    assert (abstract.shape, abstract.dtype, abstract.sharding) == ((8, 4), jnp.float32, sharding)


def test_abstract_creates_no_array() -> None:
    state = arrays()
    ckptcore.abstract(state)  # the first call fills caches
    before = {id(array) for array in live()}
    with jax.transfer_guard("disallow"):
        abstract = ckptcore.abstract(state)
    made = [array for array in live() if id(array) not in before]
    assert made == [] and len(abstract) == len(state)


def test_tied_arrays_stay_tied(tmp_path: Path) -> None:
    shared = jnp.ones(4)
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared, "c": 1})
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract({"a": shared, "b": shared, "c": 1}))
    assert loaded["a"] is loaded["b"]


def test_tied_arrays_can_be_requested_in_two_ways() -> None:
    free = jnp.ones(4)
    abstract = ckptcore.abstract({"free": free, "placed": jax.device_put(free, jax.devices()[0])})
    assert abstract["free"].sharding is None and abstract["placed"].sharding is not None


def test_a_tracer_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="tracer"):
        jax.jit(lambda given: ckptcore.abstract({"w": given}))(jnp.ones(2))


def test_results_of_eval_shape_are_abstract(tmp_path: Path) -> None:
    def init() -> dict[str, Any]:
        return {"key": jax.random.key(1), "n": jnp.int32(3), "w": jnp.ones((2, 3), jnp.bfloat16)}

    ckptcore.save(tmp_path / "c", init())
    shapes = jax.eval_shape(init)
    assert ckptcore.abstract(shapes) == shapes == ckptcore.abstract(init())
    assert_same(ckptcore.load(tmp_path / "c", ckptcore.abstract(shapes)), init())


# --- libraries


class Net(nnx.Module):  # type: ignore[misc,name-defined]  # Flax has no types here
    """A model with parameters, statistics and random keys."""

    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def net() -> Any:
    return Net(nnx.Rngs(0, dropout=1))


def test_nnx_modules_load_as_modules(tmp_path: Path) -> None:
    module = net()
    ckptcore.save(tmp_path / "c", {"model": module, "step": 1})
    expected = nnx.split(module)
    for abstract in (ckptcore.abstract({"model": module, "step": 1}), {"model": nnx.eval_shape(net), "step": 0}):
        assert isinstance(abstract["model"].first.kernel.get_value(), jax.ShapeDtypeStruct)
        again = ckptcore.abstract(abstract)
        loaded = ckptcore.load(tmp_path / "c", again)["model"]
        assert isinstance(loaded, Net)
        graph, state = nnx.split(loaded)
        assert graph == expected[0]
        assert_same(jax.tree.leaves(state), jax.tree.leaves(expected[1]))


def test_nnx_states_and_optimizers_are_restored(tmp_path: Path) -> None:
    module = net()
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2), wrt=nnx.Param)
    state = {"model": nnx.split(module)[1], "optimizer": nnx.split(optimizer)[1]}
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    assert_same_leaves(loaded, state)


def test_equinox_modules_and_optax_states_are_restored(tmp_path: Path) -> None:
    def init() -> Any:
        return equinox.nn.MLP(4, 2, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))

    model = init()
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20)))
    state = {"model": model, "optimizer": chain.init(equinox.filter(model, equinox.is_array))}
    ckptcore.save(tmp_path / "c", state)
    shapes = equinox.filter_eval_shape(init)
    for abstract in (ckptcore.abstract(state), {**ckptcore.abstract(state), "model": ckptcore.abstract(shapes)}):
        loaded = ckptcore.load(tmp_path / "c", abstract)
        assert structure(loaded) == structure(state), "the activation and all else that is static, too"
        assert_same(
            equinox.filter(jax.tree.leaves(loaded), equinox.is_array),
            equinox.filter(jax.tree.leaves(state), equinox.is_array),
        )
        assert np.array_equal(loaded["model"](jnp.ones(4)), model(jnp.ones(4)))


def test_flax_train_states_are_restored(tmp_path: Path) -> None:
    model = linen.Dense(3)
    transformation = optax.adam(1e-3)

    def init() -> Any:
        variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
        return train_state.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=transformation)

    state = init()
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    assert isinstance(loaded, train_state.TrainState) and loaded.tx is transformation
    assert_same_leaves(loaded, state)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves event loops open
def test_orbax_checkpoints_load_with_the_abstract_saved_state(tmp_path: Path) -> None:
    params = {"w": jax.device_put(jnp.ones((8, 4), jnp.bfloat16), NamedSharding(mesh(8), spec("x")))}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = {"params": params, "optimizer": chain.init(params), "step": 3, "key": jax.random.key(2)}
    checkpoint.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(state))
    assert_same_leaves(loaded["optimizer"], state["optimizer"])
    assert_same({**loaded, "optimizer": None}, {**state, "optimizer": None})


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "zarr", "dcp"])
def test_every_layout_loads_the_requested_arrays(layout: str, tmp_path: Path) -> None:
    state = {**arrays(), "params": {"w": np.ones(2), "name": "run"}}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    assert_same(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), state)
