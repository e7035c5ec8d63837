"""Random trees: Orbax and its replacement each save them, and each loads both checkpoints."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from ckptcore_integrations import orbax_v1 as ours
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as theirs

import ckptcore

MESH = jax.make_mesh((4, 2), ("x", "y"))


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Struct:
    value: Any
    static: str = flax.struct.field(pytree_node=False, default="static")


DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "uint32")
SHARDINGS = (
    None,
    SingleDeviceSharding(jax.devices()[3]),
    NamedSharding(MESH, PartitionSpec("x", "y")),
    NamedSharding(MESH, PartitionSpec(None, "x")),
    NamedSharding(MESH, PartitionSpec()),
)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw a JAX or NumPy array."""
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name := draw(st.sampled_from(DTYPES))) else name
    values = (np.arange(32) + draw(st.integers(0, 9))).reshape(8, 4).astype(dtype)
    sharding = draw(st.sampled_from(SHARDINGS))
    form = draw(st.sampled_from(["matrix", "scalar", "numpy", "numpy scalar"]))
    if form == "matrix":
        return jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)
    if form == "scalar":
        return jnp.asarray(values[0, 1])
    return values if form == "numpy" else np.asarray(values[0, 1])


LEAVES = st.one_of(
    arrays(), st.integers(-9, 9), st.floats(allow_nan=False, width=32), st.text(max_size=5), st.none(), st.booleans()
)
KEYS = st.one_of(st.sampled_from(["a", "b c", "kernel", "d.e"]), st.integers(0, 3))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS.filter(lambda key: isinstance(key, str)), children, max_size=3),
        st.builds(Pair, children, children),
        st.builds(Struct, children),
        st.just(optax.EmptyState()),
        st.just({}),
        st.just(()),
    )


TREES = st.dictionaries(st.sampled_from("tuvw"), st.recursive(LEAVES, containers, max_leaves=6), min_size=1, max_size=4)


def described(tree: Any) -> Any:
    """Replace each leaf of a tree by a description that can be compared and printed."""

    def leaf(value: Any) -> Any:
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                return (str(value.dtype), value.sharding, np.asarray(jax.random.key_data(value)).tobytes())
            return ("jax", str(value.dtype), value.sharding, np.asarray(value).tobytes(), value.shape)
        if isinstance(value, np.ndarray | np.generic):
            return (type(value).__name__, str(value.dtype), value.tobytes(), value.shape)
        return (type(value).__name__, repr(value))

    return jax.tree.map(leaf, tree)


def outcome(call: Any) -> Any:
    """Return the described result of a call, or the class of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # both libraries must refuse the same
            return "refused", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return jax.tree.structure(result), described(result)


def abstract_of(tree: Any) -> Any:
    """Return an abstract tree as users of Orbax write it. For NumPy arrays, it contains NumPy arrays."""

    def abstract(leaf: Any) -> Any:
        return theirs.arrays.to_shape_dtype_struct(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(abstract, tree)


@pytest.mark.brings(
    "random trees of containers, dtypes and shardings in the replacement of Orbax", "orbax-checkpoint", "same"
)
@settings(max_examples=12)
@example({"t": (), "u": [(), {}], "v": (1, ()), "w": {"a": (), "b c": {}}})
@example({"t": optax.EmptyState(), "u": Pair(None, ()), "v": Struct([])})
@given(TREES)
@pytest.mark.slow
def test_four_combinations(tree: Any) -> None:
    """Both libraries load the same values from each checkpoint, with and without an abstract tree."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        saved = [outcome(lambda name=name, library=library: library.save(place / name, tree))
                 for name, library in (("theirs", theirs), ("ours", ours))]  # fmt: skip
        assert saved[0] == saved[1]
        if saved[0][0] == "refused":
            return
        for request in ((), (abstract_of(tree),), (tree,)):
            outcomes = {
                f"{name} loaded by {loader.__name__}": outcome(
                    lambda name=name, loader=loader, request=request: loader.load(place / name, *request)
                )
                for name in ("theirs", "ours")
                for loader in (theirs, ours)
            }
            expected = outcomes.pop(f"theirs loaded by {theirs.__name__}")
            for who, actual in outcomes.items():
                assert actual == expected, who
        assert ckptcore.load(place / "ours").keys() == tree.keys()
