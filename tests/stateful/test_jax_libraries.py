"""Models and optimizers of Flax NNX, Equinox and Optax in one checkpoint with the other state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_testing.trees import same_value

import ckptcore

equinox = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")

_INPUTS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)


class _Net(nnx.Module):  # type: ignore[misc,name-defined]  # Flax has no types here
    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, inputs: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(inputs)))))


def _train_nnx(net: Any, optimizer: Any, steps: int) -> list[bytes]:
    def loss(model: Any) -> Any:
        return jnp.mean(model(_INPUTS) ** 2)

    losses = []
    for _ in range(steps):
        value, gradients = nnx.value_and_grad(loss)(net)
        optimizer.update(net, gradients)
        losses.append(np.asarray(value).tobytes())
    return losses


def test_flax_nnx_resumes_bit_for_bit(tmp_path: Path) -> None:
    net = _Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)
    _train_nnx(net, optimizer, 3)
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        run.save_checkpointables(3, {"model": nnx.split(net)[1], "optimizer": nnx.split(optimizer)[1]})
        expected = _train_nnx(net, optimizer, 3)  # while the save writes

    other = _Net(nnx.Rngs(7, dropout=8))
    other_optimizer = nnx.Optimizer(other, optax.adamw(1e-2), wrt=nnx.Param)
    abstract = {"model": nnx.split(nnx.eval_shape(lambda: _Net(nnx.Rngs(0, dropout=1))))[1]}
    into = {"optimizer": nnx.split(other_optimizer)[1]}
    loaded = ckptcore.CheckpointReader(tmp_path / "run").load_checkpointables(abstract=abstract, into=into)
    nnx.update(other, loaded["model"])
    nnx.update(other_optimizer, loaded["optimizer"])
    assert _train_nnx(other, other_optimizer, 3) == expected


def _train_equinox(model: Any, state: Any, optimizer: Any, steps: int) -> tuple[Any, Any, list[bytes]]:
    def loss(current: Any) -> Any:
        return jnp.mean(jax.vmap(current)(_INPUTS) ** 2)

    losses = []
    for _ in range(steps):
        value, gradients = equinox.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_array))
        model = equinox.apply_updates(model, updates)
        losses.append(np.asarray(value).tobytes())
    return model, state, losses


def test_equinox_and_optax_resume_bit_for_bit(tmp_path: Path) -> None:
    def new(seed: int) -> Any:
        return equinox.nn.MLP(4, 2, 8, 2, activation=jax.nn.gelu, key=jax.random.key(seed))

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20)))
    model = new(0)
    state = optimizer.init(equinox.filter(model, equinox.is_array))
    model, state, _ = _train_equinox(model, state, optimizer, 3)
    checkpointables = {"model": model, "optimizer": state, "key": jax.random.key(5), "step": 3}
    ckptcore.save_checkpointables(tmp_path / "c", checkpointables)
    _, _, expected = _train_equinox(model, state, optimizer, 3)

    like = new(9)
    fresh = optimizer.init(equinox.filter(like, equinox.is_array))
    wanted = {"model": like, "optimizer": fresh, "key": jax.random.key(0), "step": 0}
    loaded = ckptcore.load_checkpointables(tmp_path / "c", wanted)
    assert type(loaded["optimizer"]) is type(state) and loaded["step"] == 3
    assert same_value(jax.random.key_data(loaded["key"]), jax.random.key_data(checkpointables["key"]))
    assert _train_equinox(loaded["model"], loaded["optimizer"], optimizer, 3)[2] == expected


def test_optax_states_load_as_plain_containers_without_an_abstract_tree(tmp_path: Path) -> None:
    state = optax.adam(1e-3).init({"w": jnp.ones(3)})
    ckptcore.save_checkpointables(tmp_path / "c", {"optimizer": state})
    plain = ckptcore.load_checkpointables(tmp_path / "c")["optimizer"]
    assert isinstance(plain, tuple) and plain[0]["mu"]["w"].tolist() == [0, 0, 0]
