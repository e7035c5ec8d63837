"""Training states that Orbax saved load into abstract trees with the same containers and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Matching
from ckptcore.errors import TreeMismatchError

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("ckptcore_jax")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1


def params() -> Any:
    return {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}, "scale": jnp.full((2,), 0.5)}


def updated(optimizer: Any) -> Any:
    """Return the state of an optimizer after a step, so that its parts differ from their initial values."""
    state = optimizer.init(params())
    gradients = jax.tree.map(lambda leaf: leaf + 1, params())
    extra = {"value": 1.0, "grad": gradients, "value_fn": lambda _: 1.0}
    wanted = optax.with_extra_args_support(optimizer)
    return wanted.update(gradients, state, params(), **extra)[1]


def assert_same(loaded: Any, expected: Any) -> None:
    """Assert equal types, and equal arrays bit for bit."""
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(loaded)
    for (path, value), leaf in zip(paths_and_leaves, jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert type(value) is type(leaf), where
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert value.dtype == leaf.dtype, where
            value, leaf = jax.random.key_data(value), jax.random.key_data(leaf)
        assert np.asarray(value).dtype == np.asarray(leaf).dtype, where
        assert np.asarray(value).tobytes() == np.asarray(leaf).tobytes(), where


def zeros(tree: Any) -> Any:
    """Return the same tree with zeros, so that the test detects a load that returns its target unchanged."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


LABELS = {"dense": {"kernel": "train", "bias": "train"}, "scale": "freeze"}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.zero_nans()),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}, "scale": False}),
    "labels": lambda: optax.multi_transform({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, LABELS),
    "numbered": lambda: optax.multi_transform(
        {0: optax.adam(1e-3), 1: optax.set_to_zero()}, jax.tree.map(lambda name: int(name == "freeze"), LABELS)
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 10)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optax_load(name: str, tmp_path: Path) -> None:
    state = updated(OPTIMIZERS[name]())
    v1.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", zeros(state)), state)


@pytest.mark.parametrize("write", ["v1", "v0 standard", "v0 pytree"])
def test_a_train_state_of_flax_loads(write: str, tmp_path: Path) -> None:
    from flax.training.train_state import TrainState

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=lambda: None, params=params(), tx=optimizer)
    state = state.apply_gradients(grads=params())
    if write == "v1":
        v1.save(tmp_path / "c", state)
    elif write == "v0 standard":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", state)
    else:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", zeros(state))
    assert_same(loaded, state)
    assert loaded.step == 1 and loaded.tx is optimizer


def train_state(step: Any) -> Any:
    """Create a Flax state. In programs its `step` is an int, and becomes an array in the first jitted step."""
    from flax.training.train_state import TrainState

    return TrainState.create(apply_fn=len, params=params(), tx=OPTIMIZER).replace(step=step)


OPTIMIZER = optax.adam(1e-3)
WRITERS = {
    "v1": v1.save,
    "v0 standard": lambda path, state: by(ocp.StandardCheckpointer, path, state),
    "v0 pytree": lambda path, state: by(ocp.PyTreeCheckpointer, path, state),
}


def by(checkpointer: Any, path: Path, state: Any) -> None:
    with checkpointer() as writer:
        writer.save(path, state)


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_saved_as_an_int_loads_as_a_requested_array(write: str, tmp_path: Path) -> None:
    WRITERS[write](tmp_path / "c", train_state(5))
    assert ckptcore.load(tmp_path / "c")["step"] == 5
    for abstract in (jax.eval_shape(lambda: train_state(0)), train_state(jnp.int32(0))):
        loaded = ckptcore.load(tmp_path / "c", abstract)
        assert_same(loaded, train_state(jnp.asarray(5, abstract.step.dtype)))
        assert loaded.step.weak_type == abstract.step.weak_type
    assert ckptcore.load(tmp_path / "c", train_state(0)).step == 5
    assert_same(ckptcore.load(tmp_path / "c", train_state(np.int64(0))), train_state(np.int64(5)))


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_saved_as_an_array_loads_as_a_requested_int(write: str, tmp_path: Path) -> None:
    WRITERS[write](tmp_path / "c", train_state(jnp.int32(7)))
    assert_same(ckptcore.load(tmp_path / "c", train_state(0)), train_state(7))
    difference = "step: kind: bool is requested, array int32[] is stored"
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", train_state(step=False), matching=Matching(values="error"))
    assert [text.removeprefix("/") for text in caught.value.differences] == [difference]


def test_a_step_gets_the_sharding_of_its_abstract_leaf(tmp_path: Path) -> None:
    v1.save(tmp_path / "c", {"step": 5, "rate": 0.5})
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    replicated = NamedSharding(mesh, PartitionSpec())
    abstract = {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        "rate": jax.ShapeDtypeStruct((), jnp.bfloat16, sharding=replicated),
    }
    loaded = ckptcore.load(tmp_path / "c", abstract)
    assert loaded["step"].sharding == loaded["rate"].sharding == replicated
    assert [int(shard.data) for shard in loaded["step"].addressable_shards] == [5, 5]
    assert loaded["rate"].dtype == jnp.bfloat16 and loaded["rate"] == 0.5


def test_numbers_that_do_not_fit_the_dtype_are_refused(tmp_path: Path) -> None:
    v1.save(tmp_path / "c", {"step": 1 << 40, "rate": 0.1})
    asked = {"step": jax.ShapeDtypeStruct((), jnp.int32), "rate": jax.ShapeDtypeStruct((), jnp.float32)}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", asked)
    assert caught.value.differences == (
        "step: value: int32[] is requested, and cannot represent the stored int exactly: 1099511627776",
        "rate: value: float32[] is requested, and cannot represent the stored float exactly: 0.1",
    )


def test_numbers_fill_tensors_and_numpy_arrays_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    v1.save(tmp_path / "c", {"t": 5, "n": 0.5, "f": True, "d": jnp.float32(2.5), "j": 9, "w": jnp.ones(2)})
    target = {
        "t": torch.zeros((), dtype=torch.int64),
        "n": np.zeros((), np.float32),
        "f": torch.zeros((), dtype=torch.bool),
        "d": 0.0,
        "j": jnp.int32(0),
        "w": np.zeros(2, np.float32),
    }
    before = dict(target)
    ckptcore.load_into(tmp_path / "c", target)
    assert all(target[name] is before[name] for name in "tnfw")
    assert (int(target["t"]), float(target["n"]), bool(target["f"]), target["d"]) == (5, 0.5, True, 2.5)
    assert type(target["d"]) is float and isinstance(target["j"], jax.Array) and target["j"] == 9
    assert target["w"].tolist() == [1, 1]
    abstract = {**before, "t": torch.empty((), dtype=torch.float32, device="meta")}
    loaded = ckptcore.load(tmp_path / "c", abstract)
    assert loaded["t"].dtype == torch.float32 and loaded["t"].item() == 5 and loaded["n"].tolist() == 0.5
    assert loaded["t"].device.type == "cpu" and loaded["n"] is not before["n"]


def test_in_tuples_numbers_fill_arrays_but_arrays_cannot_replace_numbers(tmp_path: Path) -> None:
    v1.save(tmp_path / "c", {"s": (3, jnp.ones(2))})
    target = (np.zeros((), np.int32), np.zeros(2, np.float32))
    ckptcore.load_into(tmp_path / "c", {"s": target})
    assert target[0] == 3 and target[1].tolist() == [1, 1]
    v1.save(tmp_path / "d", (jnp.int32(4), jnp.ones(2)))
    unchanged = (0, np.zeros(2, np.float32))
    with pytest.raises(TreeMismatchError, match="cannot be filled in place"):
        ckptcore.load_into(tmp_path / "d", unchanged)
    assert unchanged[1].tolist() == [0, 0]


def test_checkpointables_load_numbers_as_arrays(tmp_path: Path) -> None:
    v1.save_checkpointables(tmp_path / "c", {"model": {"w": jnp.ones(2)}, "state": {"step": 5, "epoch": jnp.int32(2)}})
    asked = {"step": jax.ShapeDtypeStruct((), jnp.int32), "epoch": 0}
    loaded = ckptcore.load_checkpointables(tmp_path / "c", {"state": asked})["state"]
    assert_same(loaded, {"step": jnp.int32(5), "epoch": 2})


def test_numbers_and_arrays_of_ckptcore_are_not_interchangeable(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"step": 5, "epoch": np.zeros((), np.int32)}, layout="ocdbt")
    with pytest.raises(TreeMismatchError) as caught:
        asked = {"step": np.zeros((), np.int32), "epoch": 0}
        ckptcore.load(tmp_path / "c", asked, matching=Matching(values="error"))
    assert len(caught.value.differences) == 2


def test_states_of_nnx_modules_in_lists_load(tmp_path: Path) -> None:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)))
    v1.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c", nnx.state(Model(nnx.Rngs(1)))), state)
    pure = nnx.to_pure_dict(state)
    assert 10 in pure["layers"]
    v1.save(tmp_path / "pure", pure)
    assert_same(ckptcore.load(tmp_path / "pure", nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(1))))), pure)


def test_int_keys_tuples_and_empty_containers_load(tmp_path: Path) -> None:
    tree = {
        1: jnp.ones(2),
        20: {3: 4, 5: [jnp.zeros(1), {}, (), None, optax.EmptyState()]},
        7: optax.MaskedNode(),
        9: (jnp.ones(1), (jnp.full((3,), 2.0), (), optax.TraceState(trace={0: jnp.ones(4)}))),
    }
    v1.save(tmp_path / "c", tree)
    loaded = ckptcore.load(tmp_path / "c", zeros(tree))
    assert_same(loaded, tree)
    assert loaded[7] == optax.MaskedNode() and loaded[20][5][1:] == [{}, (), None, optax.EmptyState()]


def test_errors_list_missing_and_unexpected_leaves(tmp_path: Path) -> None:
    v1.save(tmp_path / "c", updated(optax.adam(1e-3)))
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", updated(optax.sgd(0.1, momentum=0.9)))
    assert any("trace" in text and text.startswith("missing: ") for text in caught.value.differences)
    assert any("mu" in text and text.startswith("unexpected: ") for text in caught.value.differences)


def test_loads_of_a_converted_checkpoint_are_strict_about_key_types(tmp_path: Path) -> None:
    """Orbax stores int keys as text. A checkpoint of ckptcore stores the types of keys, so its loads compare them."""
    v1.save(tmp_path / "c", {1: jnp.ones(2)})
    ckptcore.copy(tmp_path / "c", tmp_path / "ours", layout="safetensors")
    with pytest.raises(TreeMismatchError, match=r"key: \[1\] is requested"):
        ckptcore.load(tmp_path / "ours", {1: jnp.ones(2)})
    assert ckptcore.load(tmp_path / "ours", {"1": jnp.zeros(2)})["1"].tolist() == [1, 1]
