"""Models, optimizers, metrics and random streams of Flax NNX, resumed from every kind of file with every request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest

from plugins.jax_backend.tests.resumed_programs import Program, assert_all_resume, assert_some_resume
from plugins.jax_backend.tests.test_nnx_modules import Parent, Tied, Twice

nnx = pytest.importorskip("flax.nnx")

X: Final = jnp.linspace(-1, 1, 12).reshape(4, 3)


class Normalised(nnx.Module):
    """Layers with statistics and random streams, and attributes that are None."""

    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        noise = jax.random.normal(self.rngs.noise(), (4, 4))
        return self.dropout(self.attention(self.norm(self.linear(x)))) + noise


class Contained(nnx.Module):
    """Layers in lists and dicts, and variables of a type that the program defines."""

    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(11)])
        self.named = nnx.Dict({"a": nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.relu), "b": nnx.Dict({})})
        self.calls = Counter(jnp.array(0))
        self.nested = nnx.Param({"inner": {"a": jnp.ones(3), "b": jnp.zeros(3)}})
        self.lora = nnx.LoRA(3, 2, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        for layer in self.layers:
            x = layer(x)
        inner = self.nested.get_value()["inner"]
        return self.named["a"](x) * inner["a"] + inner["b"] + self.lora(x)


class Counter(nnx.Variable):  # type: ignore[misc,name-defined]
    """A variable type that the program defines."""


class Stacked(nnx.Module):
    """Layers that `nnx.vmap` creates and the call scans."""

    def __init__(self, rngs: Any) -> None:
        keys = rngs.split(3)
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class Recurrent(nnx.Module):
    """A recurrent layer and a table."""

    def __init__(self, rngs: Any) -> None:
        self.table = nnx.Embed(5, 3, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rnn(self.table(jnp.arange(4))[None] + x)


OPTIMIZER: Final = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100))


def _is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, tree)


MODELS: Final[dict[str, tuple[Callable[[Any], Any], Any]]] = {
    "NNX: tied weights": (Tied, OPTIMIZER),
    "NNX: layer used twice": (Twice, OPTIMIZER),
    "NNX: parts that refer to each other": (Parent, OPTIMIZER),
    "NNX: BatchNorm, Dropout, `Rngs`, without bias": (Normalised, OPTIMIZER),
    "NNX: lists, dicts, LoRA, own variables": (Contained, OPTIMIZER),
    "NNX: layers of `nnx.vmap`": (Stacked, OPTIMIZER),
    "NNX: recurrent": (Recurrent, OPTIMIZER),
    "NNX: `MultiSteps`": (Tied, optax.MultiSteps(optax.adam(1e-2), 2)),
    "NNX: `inject_hyperparams`": (Tied, optax.inject_hyperparams(optax.adamw)(1e-2)),
    "NNX: `masked`": (
        Tied,
        optax.masked(optax.adam(1e-2), _is_matrix),
    ),
}


def _leaves(state: Any) -> list[Any]:
    return jax.tree.leaves(_states(state))


def _states(state: Any) -> Any:
    return {name: nnx.state(value) for name, value in state.items()}


def _train(state: Any) -> None:
    def loss(model: Any) -> Any:
        return jnp.mean(model(X) ** 2)

    value, gradients = nnx.value_and_grad(loss)(state["model"])
    state["optimizer"].update(state["model"], gradients)
    state["metrics"].update(values=value, loss=value)
    state["rngs"].noise()


def _new(name: str, seed: int) -> Any:
    make, optimizer = MODELS[name]
    model = make(nnx.Rngs(seed, dropout=seed + 1))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optimizer, wrt=nnx.Param),
        "metrics": nnx.MultiMetric(average=nnx.metrics.Average(), loss=nnx.metrics.Welford("loss")),
        "rngs": nnx.Rngs(seed, noise=7),
    }


@functools.cache
def objects(name: str) -> Program:
    """Return a program that saves the NNX objects themselves."""
    train = nnx.jit(_train, donate_argnums=0)

    def step(state: Any) -> Any:
        train(state)
        return state

    def new(seed: int) -> Any:
        return _new(name, seed)

    return Program(new, step, lambda: nnx.eval_shape(lambda: new(1)), _leaves, _states)


@functools.cache
def states(name: str) -> Program:
    """Return a program that saves the states of its objects."""
    graph, _ = nnx.split(_new(name, 1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        merged = nnx.merge(graph, state)
        _train(merged)
        return nnx.state(merged)

    def new(seed: int) -> Any:
        return nnx.state(_new(name, seed))

    return Program(new, step, lambda: nnx.eval_shape(lambda: new(1)))


@functools.cache
def dicts(name: str) -> Program:
    """Return a program that saves the states of its objects as plain dicts."""
    graph, like = nnx.split(_new(name, 1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pure: Any) -> Any:
        state = jax.tree.map(lambda leaf: leaf, like)
        nnx.replace_by_pure_dict(state, pure)
        merged = nnx.merge(graph, state)
        _train(merged)
        return nnx.to_pure_dict(nnx.state(merged))

    def new(seed: int) -> Any:
        return nnx.to_pure_dict(nnx.state(_new(name, seed)))

    return Program(new, step, lambda: jax.eval_shape(lambda: new(1)))


PROGRAMS: Final = {"objects": objects, "states": states, "dicts": dicts}


def test_one_cell_for_each_writer_resumes(tmp_path: Path) -> None:
    assert_some_resume(objects("NNX: tied weights"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", PROGRAMS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.brings(name, "flax", "same")) for name in MODELS]
)
def test_all_ways(name: str, form: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    if form == "dicts" and "lists, dicts" in name:
        pytest.skip("Flax puts no dict back into a variable")
    assert_all_resume(PROGRAMS[form](name), tmp_path, subtests, full=full)
