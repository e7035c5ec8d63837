"""Programs of dm-haiku, NumPyro and Penzai, resumed from every kind of file with every kind of request."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest

from plugins.jax_backend.tests.resumed_programs import Program, assert_all_resume, own

haiku = pytest.importorskip("haiku")
numpyro = pytest.importorskip("numpyro")

X: Final = jnp.linspace(-1, 1, 12).reshape(4, 3)
OPTIMIZER: Final = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100))


def _of(init: Any, loss: Any) -> Program:
    """Return a program that trains parameters with a loss function.

    The loss takes parameters, state and key, and returns its value and the next state.
    """

    def new(seed: int) -> Any:
        parameters, state = init(jax.random.key(seed))
        optimizer = OPTIMIZER.init(parameters)
        return own({"parameters": parameters, "state": state, "optimizer": optimizer, "key": jax.random.key(seed)})

    @functools.partial(jax.jit, donate_argnums=0)
    def step(program: Any) -> Any:
        key, used = jax.random.split(program["key"])
        parameters = program["parameters"]
        gradients, state = jax.grad(loss, has_aux=True)(parameters, program["state"], used)
        updates, optimizer = OPTIMIZER.update(gradients, program["optimizer"], parameters)
        parameters = optax.apply_updates(parameters, updates)
        return {"parameters": parameters, "state": state, "optimizer": optimizer, "key": key}

    return Program(new, step, lambda: jax.eval_shape(lambda: new(1)))


def _haiku() -> Program:
    """A Haiku model with slashes and tildes in names, statistics, and dropout."""

    def call(x: Any) -> Any:
        x = haiku.nets.MLP([4, 3], with_bias=False, name="tower")(x)
        x = haiku.BatchNorm(True, True, 0.9)(x, is_training=True)
        calls = haiku.get_state("calls", (), jnp.int32, init=jnp.zeros)
        haiku.set_state("calls", calls + 1)
        average = haiku.ExponentialMovingAverage(0.9)(jnp.mean(x))
        return haiku.dropout(haiku.next_rng_key(), 0.5, haiku.LayerNorm(-1, True, False)(x)) + average

    model = haiku.transform_with_state(call)
    init = jax.jit(model.init)

    def loss(parameters: Any, state: Any, key: Any) -> Any:
        output, state = model.apply(parameters, state, key, X)
        return jnp.mean(output**2), state

    return _of(lambda key: init(key, X), loss)


def _haiku_recurrent() -> Program:
    """A recurrent core whose carry is a named tuple."""
    model = haiku.transform(lambda x, carry: haiku.LSTM(4)(x, carry))
    start = haiku.transform(lambda: haiku.LSTM(4).initial_state(4))

    def init(key: Any) -> Any:
        carry = start.apply({}, key)
        return model.init(key, X, carry), carry

    def loss(parameters: Any, carry: Any, key: Any) -> Any:
        output, carry = model.apply(parameters, key, X, carry)
        return jnp.mean(output**2), jax.lax.stop_gradient(carry)

    return _of(init, loss)


def _numpyro(optimizer: Any) -> Program:
    """Stochastic variational inference with NumPyro."""

    def model(data: Any) -> None:
        rate = numpyro.sample("rate", numpyro.distributions.Normal(0, 1))
        with numpyro.plate("data", len(data)):
            numpyro.sample("observed", numpyro.distributions.Normal(rate, 1), obs=data)

    guide = numpyro.infer.autoguide.AutoNormal(model)
    inference = numpyro.infer.SVI(model, guide, optimizer, numpyro.infer.Trace_ELBO())

    def new(seed: int) -> Any:
        return own(inference.init(jax.random.key(seed), X[:, 0]))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        return inference.update(state, X[:, 0])[0]

    return Program(new, step, lambda: jax.eval_shape(lambda: new(1)))


def _penzai() -> Program:
    """Named arrays, and parameters that are separated from their model."""
    pz = pytest.importorskip("penzai.pz")

    def parts(key: Any) -> Any:
        first_key, second_key = jax.random.split(key)
        layers = [
            pz.nn.Linear.from_config("one", first_key, {"in": 3}, {"hidden": 4}),
            pz.nn.Elementwise(jax.nn.relu),
            pz.nn.Linear.from_config("two", second_key, {"hidden": 4}, {"out": 2}),
        ]
        return pz.unbind_params(pz.nn.Sequential(layers), freeze=True)

    model, _ = parts(jax.random.key(0))

    def init(key: Any) -> Any:
        return parts(key)[1], {"calls": jnp.array(0, jnp.int32)}

    def loss(parameters: Any, state: Any, _: Any) -> Any:
        bound = pz.bind_variables(model, parameters, unfreeze_as_copy=True)
        output = bound(pz.nx.wrap(X).tag("rows", "in"))
        return jnp.mean(output.unwrap("rows", "out") ** 2), {"calls": state["calls"] + 1}

    return _of(init, loss)


PROGRAMS: Final = {
    "haiku: parameters, statistics, dropout": ("dm-haiku", _haiku),
    "haiku: carry of an LSTM": ("dm-haiku", _haiku_recurrent),
    "NumPyro: SVI with an optimizer of Optax": (
        "numpyro", lambda: _numpyro(numpyro.optim.optax_to_numpyro(optax.adam(1e-2))),
    ),
    "NumPyro: SVI with its own optimizer": ("numpyro", lambda: _numpyro(numpyro.optim.Adam(1e-2))),
    "penzai: parameters of a model": ("penzai", _penzai),
}  # fmt: skip


@functools.cache
def program(name: str) -> Program:
    return PROGRAMS[name][1]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.brings(name, library, "same")) for name, (library, _) in PROGRAMS.items()],
)
def test_all_ways(name: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    assert_all_resume(program(name), tmp_path, subtests, full=full)
