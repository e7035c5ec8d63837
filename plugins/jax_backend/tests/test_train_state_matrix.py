"""Train states of Flax Linen, resumed from every kind of file with every kind of request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import freeze
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from plugins.jax_backend.tests.resumed_programs import Program, assert_all_resume, assert_some_resume, own

X: Final = jnp.linspace(-1, 1, 12).reshape(4, 3)
INIT: Final = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Model(nn.Module):
    """A model with all kinds of Flax variables."""

    parts: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        kernel: Any = nn.initializers.lecun_normal()
        if self.parts == "partitioned":
            kernel = nn.with_partitioning(kernel, (None, None))
        elif self.parts == "logically partitioned":
            kernel = nn.with_logical_partitioning(kernel, ("in", "out"))
        x = nn.Dense(4, kernel_init=kernel, use_bias=False)(x)
        if self.parts == "scanned":
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = stack()(x, None)
        if self.parts == "statistics":
            x = nn.Dropout(0.5, deterministic=False)(nn.BatchNorm(use_running_average=False)(x))
            calls = self.variable("counters", "calls", lambda: 0)
            calls.value += 1
        if self.parts == "recurrent":
            x = nn.RNN(nn.LSTMCell(4))(x[None])[0]
        return nn.Dense(2)(x)


class Layer(nn.Module):
    """One layer of a scanned stack."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        return nn.relu(nn.Dense(4)(x)), None


class State(TrainState):  # type: ignore[no-untyped-call]
    """A train state with fields that programs add."""

    rng: Any = None
    scale: Any = None
    statistics: Any = None
    ema: Any = None
    history: Any = None


OPTIMIZERS: Final[dict[str, Callable[[], Any]]] = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}

PROGRAMS: Final = {
    "Linen: TrainState": Model(),
    "Linen: TrainState, `DynamicScale`": Model(),
    "Linen: TrainState, `batch_stats`, counters, dropout": Model("statistics"),
    "Linen: TrainState, raw key": Model("statistics"),
    "Linen: TrainState, EMA": Model(),
    "Linen: TrainState, FrozenDict": Model(),
    "Linen: TrainState, `nn.Partitioned`": Model("partitioned"),
    "Linen: TrainState, `nn.LogicallyPartitioned`": Model("logically partitioned"),
    "Linen: TrainState, `nn.scan`": Model("scanned"),
    "Linen: TrainState, `nn.RNN`": Model("recurrent"),
    "Linen: TrainState, Python numbers": Model(),
    "Linen: TrainState, sharded": Model("scanned"),
    "Linen: TrainState, MultiSteps": Model(),
    "Linen: TrainState, inject_hyperparams": Model(),
}


def _shardings(state: Any) -> Any:
    """Divide the last axis among the devices where its length allows it."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def of(leaf: Any) -> Any:
        axes = (None,) * (jnp.ndim(leaf) - 1)
        is_divided = jnp.ndim(leaf) and not leaf.shape[-1] % 4 and jnp.issubdtype(leaf.dtype, jnp.floating)
        spec = PartitionSpec(*axes, "x") if is_divided else PartitionSpec()  # type: ignore[no-untyped-call]
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, state)


@functools.cache
def program(name: str) -> Program:
    model = PROGRAMS[name]
    _, _, form = name.partition(", ")
    optimizer = OPTIMIZERS.get(form, lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)))()

    init = jax.jit(model.init)

    def made(seed: int) -> Any:
        variables: Any = dict(init({**INIT, "params": jax.random.key(seed)}, X))
        if form == "FrozenDict":
            variables = freeze(variables)
        state = State.create(  # type: ignore[no-untyped-call]
            apply_fn=model.apply,
            params=variables.pop("params") if isinstance(variables, dict) else variables["params"],
            tx=optimizer,
            rng=jax.random.PRNGKey(seed) if form == "raw key" else jax.random.key(seed),
            statistics={name: value for name, value in variables.items() if name != "params"},
            scale=DynamicScale() if form == "`DynamicScale`" else None,
            history={"rate": 0.5, "epoch": seed, "losses": [1.0, 2], "none": None} if "Python" in form else None,
        )
        return own(state.replace(ema=state.params) if form == "EMA" else state)

    def step(state: Any) -> Any:
        key, rng = jax.random.split(state.rng)

        def loss(tree: Any) -> Any:
            variables = {"params": tree, **state.statistics}
            output, changed = model.apply(variables, X, rngs={"dropout": key}, mutable=[*state.statistics])
            return jnp.mean(output**2), changed

        if state.scale is None:
            scale = None
            (_, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        else:
            scale, _, (_, statistics), gradients = state.scale.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=gradients).replace(rng=rng, scale=scale, statistics=dict(statistics))
        if state.ema is not None:
            state = state.replace(ema=optax.incremental_update(state.params, state.ema, 0.1))
        if state.history is not None:
            state = state.replace(history=jax.tree.map(lambda number: number + 1, state.history))
        return state

    shardings = _shardings(made(1)) if form == "sharded" else None
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)

    def new(seed: int) -> Any:
        return made(seed) if shardings is None else jax.device_put(made(seed), shardings)

    def shape() -> Any:
        shapes = jax.eval_shape(lambda: made(1))
        if shardings is None:
            return shapes
        return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)

    return Program(new, jitted, shape)


def test_one_cell_for_each_writer_resumes(tmp_path: Path) -> None:
    assert_some_resume(program("Linen: TrainState, `DynamicScale`"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.brings(name, "flax", "same")) for name in PROGRAMS]
)
def test_all_ways(name: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    assert_all_resume(program(name), tmp_path, subtests, full=full)
