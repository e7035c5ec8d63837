"""Registered subclasses of Python containers: their registered state is saved in addition to their items."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from ckptcore_jax.containers import JoinPointHandler
from ckptcore_testing import ContainerExample, ContainerHandlerTests
from jax.example_libraries import optimizers
from numpyro.infer.svi import SVIState

import ckptcore


class Extended(dict[str, Any]):
    """A dict with an array in addition to its items."""

    extra: Any = None


def _take_apart(value: Extended) -> tuple[tuple[tuple[Any, Any], ...], None]:
    return ((jax.tree_util.GetAttrKey("items"), dict(value)), (jax.tree_util.GetAttrKey("extra"), value.extra)), None


def _put_together(static: None, children: Any) -> Extended:
    made = Extended(children[0])
    made.extra = children[1]
    return made


jax.tree_util.register_pytree_with_keys(Extended, _take_apart, _put_together)


def extended(value: float) -> Extended:
    return _put_together(None, ({"w": jnp.full(2, value)}, jnp.full(3, value)))


def test_registered_state_of_a_dict_is_saved(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"state": extended(5.0)})
    loaded = ckptcore.load(tmp_path / "c", {"state": extended(0.0)})["state"]
    assert type(loaded) is Extended
    assert np.all(loaded["w"] == 5) and np.all(loaded.extra == 5)


def test_load_into_restores_items_and_registered_state(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"state": extended(5.0)})
    target = {"state": extended(0.0)}
    ckptcore.load_into(tmp_path / "c", target)
    assert np.all(target["state"].extra == 5) and np.all(target["state"]["w"] == 5)


class Moments(NamedTuple):
    """A named tuple with one static field."""

    mean: Any
    name: str
    variance: Any


jax.tree_util.register_pytree_with_keys(
    Moments,
    lambda value: (
        ((jax.tree_util.GetAttrKey("mean"), value.mean), (jax.tree_util.GetAttrKey("variance"), value.variance)),
        value.name,
    ),
    lambda name, children: Moments(children[0], name, children[1]),
)

OPTIMIZERS = {
    "sgd": optimizers.sgd(0.1),
    "momentum": optimizers.momentum(0.1, 0.9),
    "nesterov": optimizers.nesterov(0.1, 0.9),
    "adagrad": optimizers.adagrad(0.1),
    "rmsprop": optimizers.rmsprop(0.1),
    "rmsprop_momentum": optimizers.rmsprop_momentum(0.1),
    "adam": optimizers.adam(0.1),
    "adamax": optimizers.adamax(0.1),
    "sm3": optimizers.sm3(0.1),
}
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": (jnp.ones(3), [jnp.zeros(1)])}


def steps(optimizer: optimizers.Optimizer, state: Any, numbers: range) -> Any:
    for number in numbers:
        state = optimizer.update_fn(number, jax.tree.map(jnp.cos, optimizer.params_fn(state)), state)
    return state


def assert_equal(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_named_tuple_is_flattened_by_its_registered_function(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"m": Moments(jnp.ones(2), "saved", jnp.zeros(3))})
    assert [*ckptcore.metadata(tmp_path / "c").abstract["m"]] == ["mean", "variance"]
    loaded = ckptcore.load(tmp_path / "c", {"m": Moments(jnp.zeros(2), "mine", jnp.ones(3))})["m"]
    assert_equal(loaded, Moments(jnp.ones(2), "mine", jnp.zeros(3)))


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3", "safetensors", "dcp"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.brings("`OptimizerState` of `jax.example_libraries.optimizers`", "jax", "same")
def test_the_state_of_an_optimizer_of_jax_continues(tmp_path: Path, layout: str, in_place: bool) -> None:
    new = {name: optimizer.init_fn(PARAMS) for name, optimizer in OPTIMIZERS.items()}
    state = {name: steps(OPTIMIZERS[name], of, range(2)) for name, of in new.items()}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    assert_equal(ckptcore.load(tmp_path / "c", ckptcore.abstract(new)), state)
    if in_place:
        loaded = new
        ckptcore.load_into(tmp_path / "c", loaded)
    else:
        loaded = ckptcore.load(tmp_path / "c", new)
    for name, optimizer in OPTIMIZERS.items():
        assert_equal(steps(optimizer, loaded[name], range(2, 4)), steps(optimizer, state[name], range(2, 4)))


@pytest.mark.brings("`JoinPoint` of `unpack_optimizer_state`", "jax", "same")
def test_an_unpacked_state_is_saved(tmp_path: Path) -> None:
    optimizer = optimizers.adam(0.1)
    state = steps(optimizer, optimizer.init_fn(PARAMS), range(2))
    ckptcore.save(tmp_path / "c", optimizers.unpack_optimizer_state(state))
    new = optimizers.unpack_optimizer_state(optimizer.init_fn(PARAMS))
    assert_equal(optimizers.pack_optimizer_state(ckptcore.load(tmp_path / "c", new)), state)
    ckptcore.load_into(tmp_path / "c", new)
    assert_equal(optimizers.pack_optimizer_state(new), state)


@pytest.mark.brings("`SVIState` of NumPyro", "numpyro", "same")
def test_stochastic_variational_inference_continues(tmp_path: Path) -> None:
    optimizer = numpyro.optim.ClippedAdam(0.1)

    def new(seed: int) -> SVIState:
        return SVIState(optimizer.init(PARAMS), {"batch_stats": jnp.zeros(2)}, jax.random.PRNGKey(seed))

    state = new(0)._replace(optim_state=optimizer.update(PARAMS, new(0).optim_state))
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", new(1))
    assert_equal(loaded, state)
    assert_equal(optimizer.update(PARAMS, loaded.optim_state), optimizer.update(PARAMS, state.optim_state))


class TestJoinPoint(ContainerHandlerTests):
    handler = JoinPointHandler()
    examples = (
        ContainerExample("JoinPoint", lambda: optimizers.JoinPoint((jnp.ones(2), [3])), lambda value: [value.subtree]),
    )
