"""Containers registered with JAX, and keys that are not text.

Orbax stores keys as text, so loads take the containers and keys from the tree of the caller.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from jax.example_libraries import optimizers
from orbax.checkpoint import v1

import ckptcore
from plugins.layout_orbax.tests.orbax_states import by_version_0, by_version_1

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARAMS = {("dense", "kernel"): jnp.ones((2, 3)), ("dense.0/x", "bias"): jnp.arange(3.0)}


def optimizer_state() -> Any:
    optimizer = optimizers.adam(0.1)
    params = {"w": PARAMS["dense", "kernel"], "b": [jnp.zeros(2)]}
    return optimizer.update_fn(0, params, optimizer.init_fn(params))


def labelled() -> Any:
    transform = optax.multi_transform({True: optax.adam(0.1), False: optax.sgd(0.1)}, {"a": True, "b": False})
    return {
        "opt": transform.init({"a": jnp.ones(3), "b": jnp.ones(2)}),
        "mask": {True: jnp.ones(1), False: jnp.ones(2)},
    }


class Model(eqx.Module):
    weight: Any
    layers: Any
    static: Any


def model(fill: float) -> Any:
    layer = jax.tree.map(lambda x: jnp.full_like(x, fill), eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    layers = (layer, jax.nn.relu, [layer, jnp.tanh], {"f": jnp.tanh, "w": jnp.full(3, fill)})
    return Model(jnp.full(2, fill), layers, [jnp.float32, (jnp.tanh,)])


STATES = {
    "optimizer": optimizer_state,
    "tuple keys": lambda: {"params": PARAMS, "opt": optax.adam(0.1).init(PARAMS)},
    "tuples in keys": lambda: {(1, ("a", True)): jnp.ones(1), (2, ("b/c",)): [jnp.zeros(2)]},
    "bool keys": labelled,
}
WRITERS = {
    "v1": by_version_1(),
    "v1-zarr2-files": by_version_1(use_ocdbt=False, use_zarr3=False),
    "v0": by_version_0(ocp.StandardCheckpointHandler, ocp.args.StandardSave),
}


def zeros(state):
    return jax.tree.map(jnp.zeros_like, state)


def assert_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("writer", WRITERS)
def test_saves_of_orbax_load_into_the_tree_of_the_caller(tmp_path, name, writer):
    state = STATES[name]()
    WRITERS[writer](tmp_path / "c", state)
    assert_equal(ckptcore.load(tmp_path / "c", zeros(state)), state)
    assert_equal(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), state)
    target = {"state": zeros(state)}
    WRITERS[writer](tmp_path / "d", {"state": state})
    ckptcore.load_into(tmp_path / "d", target)
    assert_equal(target["state"], state)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("layout", [OcdbtLayout(), Zarr3Layout(), ZarrLayout()], ids=lambda layout: layout.name)
def test_orbax_loads_saves_of_ckptcore(tmp_path, name, layout):
    state = STATES[name]()
    ckptcore.save(tmp_path / "c", state, layout=layout)
    abstract = jax.tree.map(v1.arrays.to_shape_dtype_struct, state)
    assert_equal(v1.load(tmp_path / "c", abstract), state)


@pytest.mark.parametrize("writer", WRITERS)
def test_arrays_of_a_model_that_orbax_saved_load_into_the_model(tmp_path, writer):
    """Orbax cannot save functions, so programs save a filtered model, which has None in their places."""
    WRITERS[writer](tmp_path / "c", eqx.filter(model(1.0), eqx.is_array))
    new = model(0.0)
    for target in (new, ckptcore.abstract(new)):
        loaded = ckptcore.load(tmp_path / "c", target)
        assert jax.tree.structure(loaded) == jax.tree.structure(new)
        assert eqx.tree_equal(loaded, model(1.0))


@pytest.mark.parametrize("layout", [OcdbtLayout(), Zarr3Layout(), ZarrLayout()], ids=lambda layout: layout.name)
def test_orbax_loads_the_arrays_of_a_model(tmp_path, layout):
    ckptcore.save(tmp_path / "c", {"layers": eqx.filter(model(1.0), eqx.is_array)}, layout=layout)
    arrays = eqx.filter(model(0.0), eqx.is_array)
    abstract = jax.tree.map(v1.arrays.to_shape_dtype_struct, {"layers": arrays})
    assert eqx.tree_equal(eqx.combine(v1.load(tmp_path / "c", abstract)["layers"], model(0.0)), model(1.0))
