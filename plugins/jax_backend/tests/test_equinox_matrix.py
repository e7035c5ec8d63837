"""Models, states and optimizers of Equinox, resumed from every kind of file with every kind of request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from plugins.jax_backend.tests.resumed_programs import Program, assert_all_resume, assert_some_resume, own

X: Final = jnp.linspace(-1, 1, 12).reshape(4, 3)


def _twice(x: jax.Array) -> jax.Array:
    return x * 2


class Activated(eqx.Module):
    """Layers and functions in fields, and fields that are static, numbers or None."""

    first: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]
    second: eqx.nn.Linear
    final: Callable[[jax.Array], jax.Array]
    scale: float
    nothing: None
    name: str = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        first_key, second_key = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, use_bias=False, key=first_key)
        self.activation = jax.nn.gelu
        self.second = eqx.nn.Linear(4, 3, key=second_key)
        self.final = _twice
        self.scale = 0.5
        self.nothing = None
        self.name = "activated"

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.final(self.second(self.activation(self.first(x)))) * self.scale


class Listed(eqx.Module):
    """Functions in a list, between layers."""

    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        first_key, second_key = jax.random.split(key)
        self.layers = [eqx.nn.Linear(3, 4, key=first_key), jax.nn.relu, eqx.nn.Linear(4, 3, key=second_key), jnp.tanh]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(eqx.Module):
    """A cell, attention, and a table."""

    table: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.table = eqx.nn.Embedding(5, 3, key=keys[0])
        self.cell = eqx.nn.GRUCell(3, 4, key=keys[1])
        self.attention = eqx.nn.MultiheadAttention(1, 3, key=keys[2])
        self.norm = eqx.nn.LayerNorm(3, use_bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = jnp.stack([x, self.table(2)])
        return self.cell(self.norm(self.attention(rows, rows, rows)[0]), jnp.zeros(4))


class Normalised(eqx.Module):
    """Layers whose running statistics are in a separate state."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm[eqx.nn.Linear]
    dropout: eqx.nn.Dropout

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.linear = eqx.nn.Linear(3, 4, key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 2, key=keys[1]), "weight", key=keys[2])
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x: jax.Array, state: Any, key: jax.Array) -> Any:
        x, state = self.norm(self.linear(x), state)
        x, state = self.spectral(x, state)
        return self.dropout(x, key=key), state


class Tied(eqx.Module):
    """An output layer that shares the table of the embedding."""

    shared: eqx.nn.Shared

    def __init__(self, key: jax.Array) -> None:
        first_key, second_key = jax.random.split(key)
        parts = (eqx.nn.Embedding(3, 3, key=first_key), eqx.nn.Linear(3, 3, key=second_key))
        self.shared = eqx.nn.Shared(parts, lambda parts: parts[1].weight, lambda parts: parts[0].weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        table, linear = self.shared()
        return linear(x) + table(1)


def _sequential(key: jax.Array) -> Any:
    first_key, second_key = jax.random.split(key)
    layers = [eqx.nn.Linear(3, 4, key=first_key), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(4, 3, key=second_key)]
    return eqx.nn.Sequential([*layers, eqx.nn.Identity()])


def _perceptron(key: jax.Array) -> Any:
    return eqx.nn.MLP(3, 2, 4, 2, activation=jax.nn.silu, use_final_bias=False, key=key)


def _stacked(key: jax.Array) -> Any:
    """Return stacked layers inside a function that scans them."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))(jax.random.split(key, 3))
    return Stacked(layers)


class Stacked(eqx.Module):
    """Stacked layers, which the call scans."""

    layers: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (jnp.tanh(eqx.combine(layer, static)(x)), None), x, arrays)[0]


MODELS: Final[dict[str, Callable[[jax.Array], Any]]] = {
    "Equinox: functions in fields": Activated,
    "Equinox: functions in a list": Listed,
    "Equinox: MLP": _perceptron,
    "Equinox: Sequential": _sequential,
    "Equinox: GRU, attention, LayerNorm, Embedding": Recurrent,
    "Equinox: layers of `filter_vmap`": _stacked,
    "Equinox: BatchNorm, SpectralNorm, Dropout": Normalised,
    "Equinox: `eqx.nn.Shared`": Tied,
}

OPTIMIZER: Final = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100))


def _new(make: Callable[[jax.Array], Any], seed: int) -> Any:
    model, state = eqx.nn.make_with_state(make)(jax.random.key(seed))
    optimizer = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return {"model": model, "state": state, "optimizer": optimizer, "key": jax.random.key(seed), "step": jnp.array(0)}


def _train(state: Any) -> Any:
    key, used = jax.random.split(state["key"])
    parts = state["state"]

    def loss(model: Any) -> Any:
        if isinstance(model, Normalised):
            keys = jax.random.split(used, len(X))
            call = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
            output, changed = call(X, parts, keys)
        else:
            output, changed = jax.vmap(model)(X), parts
        return jnp.mean(output**2), changed

    (_, changed), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(state["model"])
    updates, optimizer = OPTIMIZER.update(
        gradients, state["optimizer"], eqx.filter(state["model"], eqx.is_inexact_array)
    )
    model = eqx.apply_updates(state["model"], updates)
    return {"model": model, "state": changed, "optimizer": optimizer, "key": key, "step": state["step"] + 1}


def _leaves(state: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state) if eqx.is_array_like(leaf)]


@functools.cache
def whole(name: str) -> Program:
    """Return a program that saves complete models."""
    make = MODELS[name]

    def new(seed: int) -> Any:
        return own(_new(make, seed))

    step = eqx.filter_jit(_train, donate="all")
    return Program(
        new,
        step,
        lambda: eqx.filter_eval_shape(new, 1),
        _leaves,
        lambda state: eqx.filter(state, lambda leaf: eqx.is_array_like(leaf) or isinstance(leaf, str)),
        refused=("Orbax 0",) if make is Normalised else (),  # the StandardCheckpointer of Orbax rejects text
    )


@functools.cache
def filtered(name: str) -> Program:
    """Return a program that saves only the arrays of its models."""
    make = MODELS[name]
    _, static = eqx.partition(_new(make, 1), eqx.is_array)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(arrays: Any) -> Any:
        return eqx.filter(_train(eqx.combine(arrays, static)), eqx.is_array)

    def new(seed: int) -> Any:
        return own(eqx.filter(_new(make, seed), eqx.is_array))

    return Program(new, step, lambda: eqx.filter_eval_shape(new, 1))


def test_one_cell_for_each_writer_resumes(tmp_path: Path) -> None:
    assert_some_resume(whole("Equinox: functions in fields"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.brings(name, "equinox", "same")) for name in MODELS],
)
def test_all_ways(name: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    assert_all_resume(whole(name), tmp_path, subtests, full=full)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.brings(f"{name}, only arrays", "equinox", "same")) for name in MODELS],
)
def test_all_ways_of_arrays(name: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    assert_all_resume(filtered(name), tmp_path, subtests, full=full)
