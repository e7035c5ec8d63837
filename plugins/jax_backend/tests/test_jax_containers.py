"""Registered containers are flattened as in JAX, and rebuilt with their static content."""

import collections
import dataclasses
import functools
import json
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ckptcore_jax import RegisteredContainer
from ckptcore_jax.plugin import ckpt_container_handler
from ckptcore_testing import ContainerExample, ContainerHandlerTests
from flax import nnx

import ckptcore
from ckptcore.errors import UnsupportedKeyError
from ckptcore.model import LEAF, Attribute, Node, TreeMetadata, format_path
from ckptcore.plugins import installed_plugins
from ckptcore.tree.flattening import flatten, rebuild
from ckptcore.tree.shapes import unflatten

HANDLER = RegisteredContainer()


@flax.struct.dataclass
class FlaxStruct:
    params: Any
    apply: Any = flax.struct.field(pytree_node=False)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["mean", "count"], meta_fields=["name"])
@dataclasses.dataclass
class Registered:
    mean: Any
    count: Any
    name: str = "static"


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, first, second, tag="tag"):
        self.parts = (first, second)
        self.tag = tag

    def tree_flatten(self):
        return self.parts, self.tag

    @classmethod
    def tree_unflatten(cls, tag, parts):
        return cls(*parts, tag)


class WithKeys:
    """A container whose children have the keys that a test chooses."""

    def __init__(self, keys, children):
        self.keys, self.children = keys, children


jax.tree_util.register_pytree_with_keys(
    WithKeys,
    lambda value: (tuple(zip(value.keys, value.children, strict=True)), tuple(value.keys)),
    lambda keys, children: WithKeys(keys, list(children)),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    value: int = 7


class Network(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def mlp():
    return eqx.nn.MLP(2, 3, 4, 2, activation=jax.nn.relu, key=jax.random.key(0))


def multi_state():
    chain = optax.chain(optax.clip(1.0), optax.adamw(1e-3), optax.ema(0.9))
    transform = optax.multi_transform({"a": chain, "b": optax.sgd(1e-2, momentum=0.9)}, {"w": "a", "v": "b"})
    return optax.apply_if_finite(transform, 3).init({"w": jnp.ones((2, 3)), "v": jnp.ones(4)})


DICT_KEY = jax.tree_util.DictKey

EXAMPLES = [
    ContainerExample(
        "flax.struct",
        lambda: FlaxStruct({"w": 1}, max),
        lambda value: [value.params],
        lambda first, second: first.apply is second.apply,
    ),
    ContainerExample(
        "register_dataclass",
        lambda: Registered(1, None, "mine"),
        lambda value: [value.mean, value.count],
        lambda first, second: first.name == second.name,
    ),
    ContainerExample(
        "without keys",
        lambda: WithoutKeys([1], 2, "tagged"),
        lambda value: list(value.parts),
        lambda first, second: first.tag == second.tag,
    ),
    ContainerExample(
        "with keys",
        lambda: WithKeys([DICT_KEY("a"), DICT_KEY(0), jax.tree_util.GetAttrKey("a")], [1, 2, 3]),
        lambda value: list(value.children),
    ),
    ContainerExample("static", Static, lambda value: [], lambda first, second: first == second),
    ContainerExample(
        "FrozenDict", lambda: flax.core.FrozenDict(b="first", a="second"), lambda value: [value["a"], value["b"]]
    ),
    ContainerExample(
        "equinox",
        mlp,
        lambda value: [value.layers],
        lambda first, second: first.activation is second.activation and first.depth == second.depth,
    ),
    ContainerExample("nnx.Param", lambda: nnx.Param(np.zeros(2)), lambda value: [value.get_value()]),
]


class TestConformance(ContainerHandlerTests):
    handler = HANDLER
    examples = EXAMPLES


@pytest.mark.parametrize(
    "value",
    [
        {}, collections.OrderedDict(), collections.defaultdict(int), [], (), None, 3, "text", np.zeros(2), jnp.zeros(2),
        optax.EmptyState(), object(), max, dataclasses.make_dataclass("Plain", ["field"])(1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_built_in_and_unregistered_types_have_no_jax_handler(value):
    if isinstance(value, tuple) and value == optax.EmptyState() and type(value) is not tuple:
        pytest.skip("JAX takes any named tuple apart; the core is surer of them")
    assert ckpt_container_handler(type(value), value) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlaxStruct({"w": jnp.ones((2, 3)), "b": None}, max),
        lambda: Registered(jnp.ones(2), jnp.asarray(3), "mine"),
        lambda: {"deep": [WithoutKeys(Registered(jnp.ones(2), 2), FlaxStruct((jnp.zeros(1),), min))]},
        lambda: optax.adamw(1e-3).init({"w": jnp.ones((2, 3))}),
        multi_state,
        mlp,
        lambda: nnx.state(Network(nnx.Rngs(0))),
        lambda: nnx.split(Network(nnx.Rngs(0)))[1],
        lambda: Network(nnx.Rngs(0)),
        lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")[1],
        lambda: eqx.filter_eval_shape(mlp),
        lambda: jax.tree_util.Partial(max, jnp.ones(2), key=jnp.zeros(1)),
        lambda: flax.core.freeze({"a": {"b": jnp.ones(2)}}),
    ],
    ids=[
        "flax.struct", "dataclass", "nested", "optax.adamw", "optax.multi_transform", "equinox.MLP", "nnx.State",
        "nnx.split", "nnx.Module", "equinox.State", "abstract", "Partial", "FrozenDict",
    ],
)  # fmt: skip
def test_trees_are_rebuilt_as_by_jax(make):
    value = make()
    flat = flatten(value, installed_plugins())
    expected = [leaf for leaf in jax.tree.leaves(value) if not callable(leaf)]
    assert [id(leaf) for leaf in flat.leaves if leaf is not None] == [id(leaf) for leaf in expected]
    paths = [format_path(path) for path in flat.paths()]
    assert len(set(paths)) == len(paths)

    marked = unflatten(flat.shape, [None if leaf is None else np.asarray(0) for leaf in flat.leaves])
    zeros = jax.tree.map(lambda leaf: leaf if callable(leaf) else np.asarray(0), value)
    assert jax.tree.structure(marked) == jax.tree.structure(zeros)
    assert jax.tree.structure(unflatten(flat.shape, flat.leaves)) == jax.tree.structure(value)
    skeleton = TreeMetadata.from_json(
        json.loads(
            json.dumps(
                TreeMetadata(
                    flat.skeleton,
                    tuple(handler.describe(leaf) for leaf, handler in zip(flat.leaves, flat.handlers, strict=True)),
                ).to_json()
            )
        )
    ).skeleton
    assert skeleton == flat.skeleton


def test_paths_equal_those_of_jax():
    flat = flatten(nnx.state(Network(nnx.Rngs(0))), installed_plugins())
    assert ("layers", 0, "kernel", Attribute("value")) in set(flat.paths())
    flat = flatten(mlp(), installed_plugins())
    assert (Attribute("layers"), 1, Attribute("weight")) in set(flat.paths())


def test_without_an_abstract_tree_containers_become_dicts_and_lists():
    value = {"a": FlaxStruct({"w": 1}, max), "b": WithoutKeys(2, 3)}
    flat = flatten(value, installed_plugins())
    assert rebuild(flat.skeleton, flat.leaves) == {"a": {"params": {"w": 1}}, "b": [2, 3]}
    module = FlaxStruct.__module__
    assert flat.skeleton == Node(
        "dict",
        ("a", "b"),
        (
            Node("object", (Attribute("params"),), (Node("dict", ("w",), (LEAF,)),), f"{module}.FlaxStruct"),
            Node("object", (0, 1), (LEAF, LEAF), f"{module}.WithoutKeys"),
        ),
    )


@pytest.mark.parametrize("function", [max, jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.add, np.add, len, print, int,
                                      functools.partial(max, 1), {}.get, jax.jit(abs), lambda x: x])  # fmt: skip
def test_functions_in_registered_containers_are_static(function):
    flattened = HANDLER.flatten(Registered(function, 1))
    assert list(flattened.keys) == [Attribute("count")] and list(flattened.children) == [1]
    made = HANDLER.unflatten(Registered(function, 1), [2])
    assert made.mean is function and made.count == 2


def test_callable_modules_do_not_count_as_functions():
    flattened = HANDLER.flatten(Registered(mlp(), jax.tree_util.Partial(max, 1)))
    assert len(flattened.children) == 2


@pytest.mark.parametrize("key", [DICT_KEY(1.5), DICT_KEY((1, None)), DICT_KEY(b"a"), 2.5])
def test_keys_of_other_types_are_refused(key):
    with pytest.raises(UnsupportedKeyError, match="a has the key .*Nothing was written"):
        flatten({"a": WithKeys([key], [1])}, installed_plugins())


def test_registered_keys_are_saved_exactly(tmp_path):
    keys = [DICT_KEY((1, ("a", True))), DICT_KEY(False), DICT_KEY(True), DICT_KEY(np.int64(3)), 4, DICT_KEY(("a",))]
    for layout in ("safetensors", "ocdbt", "dcp"):
        location = tmp_path / layout
        ckptcore.save(
            location, {"a": WithKeys(keys, [jnp.full(2, float(number)) for number in range(6)])}, layout=layout
        )
        assert repr(list(ckptcore.load(location)["a"])) == "[(1, ('a', True)), False, True, 3, 4, ('a',)]"
        loaded = ckptcore.load(location, {"a": WithKeys(keys, [jnp.zeros(2)] * 6)})["a"]
        assert [float(child[0]) for child in loaded.children] == [0, 1, 2, 3, 4, 5]
    ckptcore.save(tmp_path / "c", WithKeys([DICT_KEY(False), DICT_KEY(True)], [1, 2]))
    assert repr(ckptcore.load(tmp_path / "c")) == "{False: 1, True: 2}"
    assert ckptcore.load(tmp_path / "c", WithKeys([DICT_KEY(False), DICT_KEY(True)], [0, 0])).children == [1, 2]


def test_duplicate_keys_are_refused():
    with pytest.raises(UnsupportedKeyError, match="two children with the same key"):
        HANDLER.flatten(WithKeys([DICT_KEY("a"), DICT_KEY("a")], [1, 2]))
