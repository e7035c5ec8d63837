"""Trees of Flax, optax and Hypothesis. Orbax and ckptcore load each other's saves of them."""

import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1

import ckptcore
from plugins.layout_orbax.tests.orbax_states import (
    DTYPES,
    LAYOUTS,
    WIDE,
    assert_same,
    by_version_0,
    by_version_1,
    host,
    numbers,
    seen_by_orbax,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WRITERS = {
    "v1": by_version_1(),
    "v1-plain": by_version_1(use_compression=False),
    "v1-chunks": by_version_1(storage={"chunk_byte_size": 16}),
    "v0-pytree": by_version_0(ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave),
}


def train_state():
    params = {"dense": {"kernel": jnp.arange(32.0).reshape(4, 8), "bias": jnp.zeros(8)}}
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=None, params=params, tx=optimizer)


@pytest.mark.parametrize("writer", ["v1", "v0-pytree"])
def test_a_train_state_loads_into_the_same_state(tmp_path, writer):
    """The state contains a state of optax, which has empty named tuples."""
    state = train_state()
    WRITERS[writer](tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(state))


def test_a_train_state_loads_into_its_shapes(tmp_path):
    """`jax.eval_shape` returns the shapes. The step, which is a Python number in a new state, becomes an array."""
    state = train_state()
    v1.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", jax.eval_shape(lambda: state))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(loaded), [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)])


def test_a_state_of_optax_loads_into_its_shapes(tmp_path):
    state = train_state().opt_state
    v1.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", jax.eval_shape(lambda: state))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(state))


def test_int_keys_match_their_stored_text(tmp_path):
    state = {"layers": {0: jnp.ones(1), 10: jnp.zeros(2)}, "list": [jnp.ones(2)]}
    v1.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", state), state)


class Network(nnx.Module):
    """A module with a list of layers. In its state the keys of the list are ints."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])


@pytest.mark.parametrize("pure", [nnx.to_pure_dict, lambda state: state], ids=["dict", "state"])
def test_a_state_of_nnx_loads_into_the_same_state(tmp_path, pure):
    state = pure(nnx.state(Network(nnx.Rngs(0))))
    v1.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(state))


# Orbax cannot save a string below a key with a tilde, and splits keys at dots and backslashes.
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./~\\\0"), min_size=1, max_size=5)
LEAVES = st.one_of(
    st.builds(
        lambda dtype, shape, start: jnp.asarray(numbers(dtype, tuple(shape), start)),
        st.sampled_from([dtype for dtype in DTYPES if dtype != "uint4"]),
        st.lists(st.integers(1, 5), max_size=3),
        st.integers(0, 6),
    ),
    st.builds(
        lambda dtype, shape, start: numbers(dtype, tuple(shape), start),
        st.sampled_from(WIDE),
        st.lists(st.integers(1, 5), max_size=3),
        st.integers(0, 6),
    ),
    st.builds(lambda seed, count: jax.random.split(jax.random.key(seed), count), st.integers(0, 9), st.integers(1, 3)),
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
    ),
    min_size=1,
    max_size=4,
)


UNSHRUNK = [Phase.explicit, Phase.generate]  # without shrinking, because Orbax is slow and the trees are small


def _exchange(tree, writer, layout):
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = f"{directory}/theirs", f"{directory}/ours"
        WRITERS[writer](theirs, tree)
        assert_same(ckptcore.load(theirs), host(tree))
        assert_same(ckptcore.load(theirs, tree), tree)
        ckptcore.save(ours, tree, layout=LAYOUTS[layout])
        assert_same(v1.load(ours), seen_by_orbax(tree))


@settings(max_examples=15, phases=UNSHRUNK)
@given(tree=TREES, writer=st.sampled_from(list(WRITERS)), layout=st.sampled_from(list(LAYOUTS)))
def test_orbax_and_ckptcore_load_each_others_trees(tree, writer, layout):
    _exchange(tree, writer, layout)


@pytest.mark.slow
@settings(max_examples=200, phases=UNSHRUNK)
@given(tree=TREES, writer=st.sampled_from(list(WRITERS)), layout=st.sampled_from(list(LAYOUTS)))
def test_orbax_and_ckptcore_load_each_others_many_trees(tree, writer, layout):
    _exchange(tree, writer, layout)
