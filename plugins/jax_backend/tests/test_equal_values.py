"""Values that are equal in different forms: counters of new and jitted states, random keys, None, shared arrays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.struct import dataclass
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import ckptcore
from ckptcore import Matching
from ckptcore.errors import TreeMismatchError

LAYOUTS = ("dcp", "ocdbt", "safetensors", "zarr", "zarr3")


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x)))


class State(TrainState):
    """A train state with fields that programs add."""

    rng: Any
    scale: Any
    rate: Any


MODEL = Model()
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
OPTIMIZER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100))


def new(*, raw: bool = False, rate: Any = 0.5) -> Any:
    key = jax.random.PRNGKey(2) if raw else jax.random.key(2)
    parameters = MODEL.init(KEYS, jnp.ones((1, 3)))["params"]
    return State.create(apply_fn=MODEL.apply, params=parameters, tx=OPTIMIZER, rng=key, scale=DynamicScale(), rate=rate)


@jax.jit
def step(state: Any) -> Any:
    key, rng = jax.random.split(state.rng)

    def loss(parameters: Any) -> Any:
        return jnp.mean(MODEL.apply({"params": parameters}, jnp.ones((1, 3)), rngs={"dropout": key}) ** 2)

    scale, _, _, gradients = state.scale.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients).replace(rng=rng, scale=scale, rate=state.rate * 0.99)


def numbers(tree: Any) -> list[np.ndarray[Any, Any]]:
    """Return the leaves as NumPy arrays. Random keys become their data."""

    def array(leaf: Any) -> Any:
        is_key = jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert all(map(np.array_equal, numbers(actual), numbers(expected)))


@pytest.mark.brings("Linen `TrainState` with `DynamicScale`, new and after jitted steps", "flax", "same")
@pytest.mark.parametrize("is_raw", [False, True], ids=["typed", "raw"])
@pytest.mark.parametrize("is_new", [False, True], ids=["jitted", "new"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_train_state_resumes(tmp_path: Path, layout: str, is_new: bool, is_raw: bool) -> None:
    """The counters of a new state are Python numbers, those of a jitted state are arrays."""
    saved = new(raw=is_raw) if is_new else step(new(raw=is_raw))
    ckptcore.save(tmp_path / "c", saved, layout=layout)
    for request in (new(), step(new()), jax.eval_shape(lambda: new()), new(raw=True), new(rate=jnp.float32(0.5))):
        loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract(request))
        assert_equal(step(loaded).params, step(saved).params)
        for leaf, asked in zip(jax.tree.leaves(loaded), jax.tree.leaves(request), strict=True):
            assert isinstance(leaf, jax.Array if hasattr(asked, "sharding") else type(asked))
        assert numbers(loaded)[0] == int(saved.step)


@pytest.mark.parametrize(
    ("stored", "requested"),
    [
        (3, np.int64(0)), (np.int64(3), 0), (3, jnp.int32(0)), (jnp.int32(3), 0), (jnp.array(3), np.int64(0)),
        (np.int64(3), jnp.int32(0)), (np.array(3), 0), (0.5, jnp.float32(0)), (jnp.float32(0.5), 0.0),
        (np.float64(0.5), 0.0), (jnp.bfloat16(0.5), 0.0), (jnp.float32(0.5), np.float64(0)), (True, jnp.array(False)),
        (jnp.array(True), False), (1, jnp.float32(0)), (jnp.asarray(2.5), jnp.float32(0)), (jnp.float32(2), 1.0),
        (jnp.float32(2.5), jnp.asarray(1.0)), (np.float32(2.5), jnp.asarray(1.0)),
    ],
)  # fmt: skip
def test_numbers_have_the_requested_form(tmp_path: Path, stored: Any, requested: Any) -> None:
    ckptcore.save(tmp_path / "c", {"v": stored})
    loaded = ckptcore.load(tmp_path / "c", ckptcore.abstract({"v": requested}))["v"]
    assert type(loaded) is type(requested) and loaded == stored
    assert getattr(loaded, "dtype", None) == getattr(requested, "dtype", None)
    assert getattr(loaded, "weak_type", None) == getattr(requested, "weak_type", None)
    target = {"v": requested}
    ckptcore.load_into(tmp_path / "c", target)
    assert type(target["v"]) is type(requested) and target["v"] == stored


@pytest.mark.parametrize(
    ("stored", "requested"),
    [(np.int64(1 << 40), jnp.int32(0)), (jnp.float32(0.1), jnp.bfloat16(0)), (np.float64(0.1), jnp.float32(0))],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, stored: Any, requested: Any) -> None:
    ckptcore.save(tmp_path / "c", {"v": stored})
    with pytest.raises(ckptcore.errors.CheckpointError, match=r"\bv\b"):
        ckptcore.load(tmp_path / "c", {"v": requested})


@dataclass
class WithKeys:
    rng: Any
    many: Any


@pytest.mark.brings("raw `PRNGKey` requested as a typed key, and the reverse", "jax", "same")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_and_typed_keys(tmp_path: Path, layout: str, impl: str) -> None:
    everywhere = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())  # type: ignore[no-untyped-call]
    typed = WithKeys(
        jax.random.key(3, impl=impl), jax.device_put(jax.random.split(jax.random.key(3, impl=impl), 4), everywhere)
    )
    raw = jax.tree.map(jax.random.key_data, typed)
    for name, saved in (("raw", raw), ("typed", typed)):
        ckptcore.save(tmp_path / name, saved, layout=layout)
        for request in (raw, typed):
            loaded = ckptcore.load(tmp_path / name, ckptcore.abstract(request))
            assert_equal(loaded, request)
            assert loaded.rng.dtype == request.rng.dtype and loaded.many.sharding == request.many.sharding


@pytest.mark.parametrize(("stored", "requested"), [("rbg", "threefry2x32"), ("unsafe_rbg", "rbg")])
def test_keys_of_another_implementation(tmp_path: Path, stored: str, requested: str) -> None:
    """The error names both implementations, and the function that makes keys of data. The data can be loaded."""
    key, other = jax.random.key(3, impl=stored), jax.random.key(0, impl=requested)
    ckptcore.save(tmp_path / "c", {"rng": key})
    with pytest.raises(TreeMismatchError, match=rf"rng: .*{stored}.*{requested}.*wrap_key_data"):
        ckptcore.load(tmp_path / "c", {"rng": other})
    data = ckptcore.load(tmp_path / "c", {"rng": jax.random.key_data(key)})["rng"]
    assert jax.random.wrap_key_data(data, impl=stored) == key


def test_keys_of_another_implementation_in_raw_form(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"rng": jax.random.PRNGKey(3, impl="rbg")})
    with pytest.raises(TreeMismatchError, match=r"rng: .*uint32\[4\].*threefry2x32.*wrap_key_data"):
        ckptcore.load(tmp_path / "c", {"rng": jax.random.key(0)})
    ckptcore.save(tmp_path / "t", {"rng": jax.random.key(3, impl="rbg")})
    with pytest.raises(TreeMismatchError, match=r"rng: .*uint32\[2\].*uint32\[4\], the data of a jax.key"):
        ckptcore.load(tmp_path / "t", {"rng": jax.random.PRNGKey(0)})


@pytest.mark.brings("None in one tree and nothing in the other", "jax", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_none_is_equal_to_nothing(tmp_path: Path, layout: str) -> None:
    """In JAX, None is a container without leaves. With `values="error"` the two trees differ."""
    without, having = {"w": jnp.ones(3)}, {"w": jnp.ones(3), "bias": None, "more": {"b": None}}
    for saved, request in ((without, having), (having, without)):
        place = tmp_path / str(len(saved))
        ckptcore.save(place, saved, layout=layout)
        assert_equal(ckptcore.load(place, ckptcore.abstract(request)), request)
        ckptcore.load_into(place, request)
        with pytest.raises(TreeMismatchError, match="bias"):
            ckptcore.load(place, ckptcore.abstract(request), matching=Matching(values="error"))


def own(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.brings("EMA and target network that were one array at the save", "jax", "same")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_request_decides_who_shares(tmp_path: Path, layout: str) -> None:
    """Two requested arrays can both be donated, even if one array was saved under both names."""
    array = jnp.arange(6.0)
    ckptcore.save(tmp_path / "c", {"w": array, "ema": array}, layout=layout)
    separate = {"w": own(array), "ema": own(array)}
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    shape = jax.ShapeDtypeStruct((6,), jnp.float32)  # type: ignore[no-untyped-call]
    for loaded in (
        ckptcore.load(tmp_path / "c", separate),
        ckptcore.load(tmp_path / "c", ckptcore.abstract(separate)),
        ckptcore.load(tmp_path / "c", jax.eval_shape(lambda: separate)),
        ckptcore.load(tmp_path / "c", {"w": shape, "ema": copy.copy(shape)}),
        ckptcore.load(tmp_path / "c", framework="jax"),
    ):
        assert loaded["w"] is not loaded["ema"]
        assert [leaf.tolist() for leaf in step(loaded).values()] == [[1, 2, 3, 4, 5, 6]] * 2
    for request in ({"w": array, "ema": array}, ckptcore.abstract({"w": array, "ema": array})):
        loaded = ckptcore.load(tmp_path / "c", request)
        assert loaded["w"] is loaded["ema"]
    numpy = {name: ckptcore.AbstractArray((6,), "float32") for name in separate}
    loaded = ckptcore.load(tmp_path / "c", numpy)
    loaded["w"][:] = 0
    assert loaded["ema"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("stored", "requested"),
    [(np.array(True), jnp.float32(0)), (np.array(True), jnp.int32(0)), (np.array(1.5), np.complex128(0))],
)
def test_numbers_of_another_kind_are_refused(tmp_path: Path, stored: Any, requested: Any) -> None:
    ckptcore.save(tmp_path / "c", {"v": stored})
    with pytest.raises(TreeMismatchError, match="v: dtype"):
        ckptcore.load(tmp_path / "c", {"v": requested})
