"""Flax NNX modules: graphs whose parts share variables and refer to each other, and their states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ckptcore
from ckptcore.errors import TreeMismatchError

nnx = pytest.importorskip("flax.nnx")

LAYOUTS = ("dcp", "ocdbt", "safetensors", "zarr", "zarr3")
X = jnp.linspace(0, 1, 12).reshape(4, 3)


class Tied(nnx.Module):
    """Two layers that share one kernel."""

    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.outer = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.outer.kernel = self.inner.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.inner(x))

    def shares(self) -> bool:
        return self.outer.kernel is self.inner.kernel


class Twice(nnx.Module):
    """One layer under two attributes."""

    def __init__(self, rngs: Any) -> None:
        self.first = self.last = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))

    def shares(self) -> bool:
        return self.first is self.last


class Parent(nnx.Module):
    """Parts with references to their parent and to each other."""

    def __init__(self, rngs: Any) -> None:
        self.one = nnx.Linear(3, 3, rngs=rngs)
        self.two = nnx.Linear(3, 3, rngs=rngs)
        self.one.parent = self
        self.two.other, self.one.other = self.one, self.two

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.one.parent.two.other(self.two(x))

    def shares(self) -> bool:
        return self.one.parent is self and self.two.other is self.one and self.one.other is self.two


class Without(nnx.Module):
    """Layers with attributes that are None."""

    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.attention(self.norm(self.linear(x))))

    def shares(self) -> bool:
        return self.linear.bias is None and self.norm.bias is None


MODULES = (Tied, Twice, Parent, Without)


OPTIMIZER = optax.adam(1e-2)


@nnx.jit
def train(model: Any, optimizer: Any) -> None:
    """Train for one step."""
    gradients = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
    optimizer.update(model, gradients)


def new(make: Any, seed: int = 1) -> tuple[Any, Any]:
    model = make(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


@functools.cache
def trained(make: Any) -> tuple[Any, Any]:
    model, optimizer = new(make, 0)
    train(model, optimizer)
    return model, optimizer


@functools.cache
def continued(make: Any) -> list[Any]:
    """Return the arrays after one more step."""
    model, optimizer = new(make, 0)
    train(model, optimizer)
    train(model, optimizer)
    return leaves(model, optimizer)


def leaves(*values: Any) -> list[Any]:
    """Return the arrays of modules and states as NumPy arrays."""
    arrays = [leaf for value in values for leaf in jax.tree.leaves(nnx.state(value))]
    return [np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for leaf in arrays]  # fmt: skip


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected) and all(map(np.array_equal, actual, expected))


def _in_place(path: Path, make: Any) -> tuple[Any, Any]:
    model, optimizer = new(make)
    ckptcore.load_into(path, {"model": model, "optimizer": optimizer})
    return model, optimizer


def _abstract(path: Path, make: Any) -> tuple[Any, Any]:
    model, optimizer = new(make)
    loaded = ckptcore.load(path, ckptcore.abstract({"model": model, "optimizer": optimizer}))
    return loaded["model"], loaded["optimizer"]


def _eval_shape(path: Path, make: Any) -> tuple[Any, Any]:
    loaded = ckptcore.load(path, dict(zip(("model", "optimizer"), nnx.eval_shape(lambda: new(make)), strict=True)))
    return loaded["model"], loaded["optimizer"]


def _other(path: Path, make: Any) -> tuple[Any, Any]:
    model, optimizer = new(make)
    loaded = ckptcore.load(path, {"model": model, "optimizer": optimizer})
    return loaded["model"], loaded["optimizer"]


def _states(path: Path, make: Any) -> tuple[Any, Any]:
    """Load the states, and update the objects from them."""
    model, optimizer = new(make)
    loaded = ckptcore.load(path, ckptcore.abstract({"model": nnx.state(model), "optimizer": nnx.state(optimizer)}))
    nnx.update(model, loaded["model"])
    nnx.update(optimizer, loaded["optimizer"])
    return model, optimizer


@pytest.mark.brings("NNX module with tied weights, a layer used twice, cycles or without bias", "flax", "same")
@pytest.mark.parametrize("load", [_in_place, _abstract, _eval_shape, _other, _states])
@pytest.mark.parametrize("is_state", [False, True], ids=["of objects", "of states"])
@pytest.mark.parametrize("make", MODULES)
def test_resumed_steps_are_equal(
    tmp_path: Path, make: Any, is_state: bool, load: Callable[[Path, Any], tuple[Any, Any]]
) -> None:
    model, optimizer = trained(make)
    saved = {"model": model, "optimizer": optimizer}
    if is_state:
        saved = {name: nnx.state(value) for name, value in saved.items()}
    ckptcore.save(tmp_path / "c", saved)
    resumed, optimizer_of_resumed = load(tmp_path / "c", make)
    assert resumed.shares()
    assert_equal(leaves(resumed, optimizer_of_resumed), leaves(model, optimizer))
    train(resumed, optimizer_of_resumed)
    assert_equal(leaves(resumed, optimizer_of_resumed), continued(make))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MODULES)
def test_layouts(tmp_path: Path, make: Any, layout: str) -> None:
    model, _ = trained(make)
    ckptcore.save(tmp_path / "c", {"model": model}, layout=layout)
    resumed = ckptcore.load(tmp_path / "c", {"model": nnx.eval_shape(lambda: make(nnx.Rngs(1)))})["model"]
    assert resumed.shares()
    assert_equal(leaves(resumed), leaves(model))


def test_a_module_is_stored_like_its_state(tmp_path: Path) -> None:
    """Each shared variable is stored once. Attributes without variables are not stored."""
    for make in MODULES:
        model, _ = trained(make)
        ckptcore.save(tmp_path / f"{make.__name__} m", {"model": model})
        ckptcore.save(tmp_path / f"{make.__name__} s", {"model": nnx.state(model)})
        ours, theirs = (ckptcore.metadata(tmp_path / f"{make.__name__} {end}").tree for end in "ms")
        assert ours.paths == theirs.paths and ours.leaves == theirs.leaves and not ours.aliases


def test_variables_stay_the_same_objects(tmp_path: Path) -> None:
    model, _ = trained(Tied)
    ckptcore.save(tmp_path / "c", {"model": model})
    target = Tied(nnx.Rngs(1))
    kernel, inner = target.inner.kernel, target.inner
    ckptcore.load_into(tmp_path / "c", {"model": target})
    assert target.inner is inner and target.inner.kernel is kernel and target.shares()
    assert np.array_equal(kernel[...], model.inner.kernel[...])


def test_a_part_that_refers_to_its_parent(tmp_path: Path) -> None:
    """The state of the part is all of the graph that it refers to, as in Flax."""
    model, _ = trained(Parent)
    ckptcore.save(tmp_path / "c", {"part": model.one})
    other = Parent(nnx.Rngs(1))
    ckptcore.load_into(tmp_path / "c", {"part": other.one})
    assert_equal(leaves(other), leaves(model))


class Pair(nnx.Module):
    """A module that shares a part with another module."""

    def __init__(self, torso: Any, rngs: Any) -> None:
        self.torso = torso
        self.head = nnx.Linear(3, 2, rngs=rngs)


def pair(seed: int) -> dict[str, Any]:
    rngs = nnx.Rngs(seed)
    torso = nnx.Linear(3, 3, rngs=rngs)
    actor = Pair(torso, rngs)
    return {"actor": actor, "critic": Pair(torso, rngs), "again": actor}


@pytest.mark.brings("NNX modules that share a part, such as an actor and a critic", "flax", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_that_share_a_part(tmp_path: Path, layout: str) -> None:
    saved = pair(0)
    ckptcore.save(tmp_path / "c", saved, layout=layout)
    target = pair(1)
    ckptcore.load_into(tmp_path / "c", target)
    for loaded in (
        target,
        ckptcore.load(tmp_path / "c", pair(1)),
        ckptcore.load(tmp_path / "c", ckptcore.abstract(pair(1))),
        ckptcore.load(tmp_path / "c", nnx.eval_shape(lambda: pair(1))),
    ):
        assert loaded["actor"] is loaded["again"]
        assert loaded["actor"].torso.kernel is loaded["critic"].torso.kernel
        assert_equal(leaves(*[loaded[name] for name in saved]), leaves(*saved.values()))


def test_one_object_cannot_have_two_values(tmp_path: Path) -> None:
    first, other = pair(0), pair(1)
    ckptcore.save(tmp_path / "c", {"actor": first["actor"], "critic": other["critic"], "again": first["actor"]})
    with pytest.raises(TreeMismatchError, match="one object in the request, but separate in .*Request two objects"):
        ckptcore.load(tmp_path / "c", pair(2))
    two = {"actor": pair(2)["actor"], "critic": pair(3)["critic"], "again": ...}
    loaded = ckptcore.load(tmp_path / "c", two)
    assert_equal(leaves(loaded["critic"]), leaves(other["critic"]))


def test_a_shared_variable_that_is_loaded_in_one_place(tmp_path: Path) -> None:
    """The variable gets the stored value even if the tree lists another place first."""
    modules = pair(0)
    ckptcore.save(tmp_path / "c", {"critic": modules["critic"]})
    kept = ckptcore.load(tmp_path / "c", pair(1), matching=ckptcore.Matching(missing="keep"))
    ckptcore.save(tmp_path / "d", modules)
    chosen = ckptcore.load(tmp_path / "d", pair(1), select=ckptcore.select.names("critic"))
    for loaded in (kept, chosen):
        assert loaded["actor"].torso.kernel is loaded["critic"].torso.kernel
        assert_equal(leaves(loaded["critic"]), leaves(modules["critic"]))
