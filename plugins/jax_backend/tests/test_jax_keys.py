"""Dicts of JAX programs with unusual keys: tuples for flattened parameters, and bools for labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from numpyro.infer import NUTS

import ckptcore

LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"]


def assert_equal(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(nn.relu(nn.Dense(3)(x)))


def flattened() -> Any:
    params = Network().init(jax.random.key(0), jnp.ones((1, 4)))
    flat = flatten_dict(params)
    return {"params": flat, "opt": optax.adam(0.1).init(flat)}


def labelled() -> Any:
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    transform = optax.multi_transform({True: optax.adam(0.1), False: optax.set_to_zero()}, {"a": True, "b": False})
    state = transform.init(params)
    _, state = transform.update(params, state, params)
    return {"opt": state, "mask": {True: jnp.ones(1), False: jnp.zeros(1)}}


def partitioned() -> Any:
    """Return Haiku parameters in a dict whose keys are tuples of module, name and shape."""

    def forward(x: jax.Array) -> jax.Array:
        return hk.nets.MLP([3, 2])(x)

    params = hk.transform(forward).init(jax.random.PRNGKey(0), jnp.ones((1, 4)))
    return {(module, name, value.shape): value for module, name, value in hk.data_structures.traverse(params)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            flattened, marks=pytest.mark.brings("`flatten_dict` of parameters, with their Adam", "flax", "same")
        ),
        pytest.param(
            labelled, marks=pytest.mark.brings("`multi_transform` with the labels True and False", "optax", "same")
        ),
        pytest.param(partitioned, marks=pytest.mark.brings("parameters by module, name and shape", "dm-haiku", "same")),
    ],
)
def test_states_come_back(make: Any, layout: str, tmp_path: Path) -> None:
    state = make()
    ckptcore.save(tmp_path / "c", state, layout=layout)
    assert_equal(ckptcore.load(tmp_path / "c", zeros(state)), state)
    assert_equal(ckptcore.load(tmp_path / "c", ckptcore.abstract(state)), state)
    assert_equal(ckptcore.load(tmp_path / "c", jax.eval_shape(make)), state)
    target = {"state": zeros(state)}
    ckptcore.save(tmp_path / "d", {"state": state}, layout=layout)
    ckptcore.load_into(tmp_path / "d", target)
    assert_equal(target["state"], state)


@pytest.mark.brings("state of NUTS with dense mass matrices", "numpyro", "same")
def test_the_state_of_a_sampler_comes_back(tmp_path: Path) -> None:
    def new(seed: int) -> Any:
        kernel = NUTS(potential_fn=lambda at: jnp.sum(at["x"] ** 2) + at["y"] ** 2, dense_mass=[("x", "y")])
        return kernel.init(jax.random.PRNGKey(seed), 5, {"x": jnp.full(2, float(seed)), "y": jnp.ones(())}, (), {})

    state = new(0)
    assert ("x", "y") in state.adapt_state.inverse_mass_matrix
    ckptcore.save(tmp_path / "c", state)
    assert_equal(ckptcore.load(tmp_path / "c", new(1)), state)
