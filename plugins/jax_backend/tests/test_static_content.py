"""Static content of registered containers is not saved. A load takes it from the request.

This includes static content in lists, tuples and dicts.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError

MESH = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


class Model(eqx.Module):
    weight: Any
    part: Any


class Rates(NamedTuple):
    rate: Any
    schedule: Any


@flax.struct.dataclass
class State:
    weight: Any
    part: Any


@jax.tree_util.register_pytree_with_keys_class
class Mutable:
    """A registered container that programs modify."""

    def __init__(self, weight: Any, part: Any) -> None:
        self.weight, self.part = weight, part

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("weight"), self.weight), (key("part"), self.part)), None

    def tree_flatten(self) -> Any:
        return (self.weight, self.part), None

    @classmethod
    def tree_unflatten(cls, static: None, children: Any) -> Any:
        return cls(*children)


STATIC = {
    "list of functions": lambda: [jax.nn.relu, jnp.tanh, jax.nn.gelu],
    "dict of functions": lambda: {"a": jax.nn.relu, "b": {"c": np.mean, "d": jnp.add}},
    "tuple of classes": lambda: (eqx.nn.Linear, int, Rates),
    "dtypes": lambda: [jnp.float32, np.float32, jnp.bfloat16],
    "shardings": lambda: {"w": jax.sharding.NamedSharding(MESH, jax.P("data")), "spec": (jax.P("data"), MESH)},
    "devices": lambda: [jax.devices()[0]],
    "structure": lambda: jax.tree.structure({"a": 1}),
    "an optimizer": lambda: optax.adam(1e-3),
    "optimizers": lambda: {"a": optax.adam(1e-3), "b": [optax.sgd(0.1)]},
    "cached function": lambda: [functools.lru_cache(jnp.tanh), functools.partial(jnp.sum, axis=0)],
}


def linear(fill: float) -> Any:
    return jax.tree.map(lambda x: jnp.full_like(x, fill), eqx.nn.Linear(2, 3, key=jax.random.key(0)))


MIXED: dict[str, Any] = {
    "tuple of layers and functions": lambda fill: (linear(fill), jax.nn.relu, linear(fill), jnp.tanh),
    "list": lambda fill: [jnp.tanh, [jnp.full(2, fill), jax.nn.relu], {"f": jnp.add}, fill, None],
    "dict": lambda fill: {"f": jnp.tanh, "w": jnp.full(2, fill), "inner": {"g": jnp.tanh, "w": jnp.full(1, fill)}},
    "ordered": lambda fill: OrderedDict([("w", jnp.full(2, fill)), ("f", jnp.tanh), ("v", fill)]),
    "defaultdict": lambda fill: defaultdict(list, {"w": [jnp.full(2, fill)], "f": [jnp.tanh]}),
    "named tuple": lambda fill: Rates(jnp.full(2, fill), optax.constant_schedule(1.0)),
    "tuple keys": lambda fill: {("a", 1): jnp.tanh, ("a", 2): jnp.full(2, fill)},
    "dtypes and arrays": lambda fill: [(jnp.float32, jnp.full(2, fill)), (jnp.bfloat16, jnp.full(2, fill))],
    "numbers beside functions": lambda fill: [fill, "text", jnp.tanh],
}


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(other):
            np.testing.assert_array_equal(leaf, other)
        else:
            assert leaf is other or leaf == other


WAYS = pytest.mark.parametrize(
    ("container", "layout"),
    [(Model, "safetensors"), (Model, "ocdbt"), (Model, "dcp"), (State, "safetensors"), (Mutable, "safetensors")],
)


@WAYS
@pytest.mark.brings("functions, classes, dtypes and shardings in lists of a model", "equinox", "same")
def test_static_content_comes_from_the_caller(tmp_path: Path, container: type, layout: str) -> None:
    saved = {name: container(jnp.ones(2), make()) for name, make in STATIC.items()}
    ckptcore.save(tmp_path / "c", saved, layout=layout)
    assert len(ckptcore.metadata(tmp_path / "c").tree.leaves) == len(STATIC)
    parts = {name: make() for name, make in STATIC.items()}
    mine = {name: container(jnp.zeros(2), part) for name, part in parts.items()}
    for target in (mine, ckptcore.abstract(mine)):
        loaded = ckptcore.load(tmp_path / "c", target)
        assert_same(loaded, {name: container(jnp.ones(2), part) for name, part in parts.items()})


@WAYS
@pytest.mark.brings("layers and functions in one list of a model", "equinox", "same")
def test_arrays_next_to_static_content_are_saved(tmp_path: Path, container: type, layout: str) -> None:
    saved, mine = (
        {name: container(jnp.full(2, fill), make(fill)) for name, make in MIXED.items()} for fill in (1.0, 0.0)
    )
    ckptcore.save(tmp_path / "c", saved, layout=layout)
    for target in (mine, ckptcore.abstract(mine)):
        loaded = ckptcore.load(tmp_path / "c", target)
        assert jax.tree.structure(loaded) == jax.tree.structure(mine)
        leaves = zip(*map(jax.tree.leaves, (loaded, saved, mine)), strict=True)
        for leaf, stored, own in leaves:
            assert leaf is own if callable(own) else bool(np.all(np.asarray(leaf) == np.asarray(stored)))


def test_without_a_request_static_items_load_as_none(tmp_path: Path) -> None:
    part = (linear(1.0), jax.nn.relu, {"f": jnp.tanh, "w": jnp.ones(1)})
    ckptcore.save(tmp_path / "c", Model(jnp.ones(2), part))
    loaded = ckptcore.load(tmp_path / "c")["part"]
    assert type(loaded) is tuple and loaded[1] is None and list(loaded[2]) == ["w"]


def test_a_filtered_model_and_the_whole_one_load_into_each_other(tmp_path: Path) -> None:
    for name, make in MIXED.items():
        model, new = Model(jnp.ones(2), make(1.0)), Model(jnp.zeros(2), make(0.0))
        ckptcore.save(tmp_path / name / "whole", model)
        ckptcore.save(tmp_path / name / "filtered", eqx.filter(model, lambda leaf: not callable(leaf)))
        for saved in ("whole", "filtered"):
            loaded = ckptcore.load(tmp_path / name / saved, new)
            assert_same(eqx.filter(loaded, eqx.is_array), eqx.filter(model, eqx.is_array))
            assert jax.tree.structure(loaded) == jax.tree.structure(model)
        request, filtered = (eqx.filter(module, lambda leaf: not callable(leaf)) for module in (new, model))
        assert_same(ckptcore.load(tmp_path / name / "whole", request), filtered)


@pytest.mark.parametrize("name", MIXED)
def test_mutable_containers_are_filled(tmp_path: Path, name: str) -> None:
    ckptcore.save(tmp_path / "c", {"m": Mutable(jnp.ones(2), MIXED[name](1.0))})
    target = {"m": Mutable(jnp.zeros(2), MIXED[name](0.0))}
    same = target["m"]
    before = jax.tree.leaves(same.part)
    ckptcore.load_into(tmp_path / "c", target)
    assert target["m"] is same and np.all(same.weight == 1)
    for old, new, expected in zip(before, jax.tree.leaves(same.part), jax.tree.leaves(MIXED[name](1.0)), strict=True):
        assert new is old if callable(old) else np.all(np.asarray(new) == np.asarray(expected))


def test_tied_weights_of_shared_layers(tmp_path: Path) -> None:
    def shared(seed: int) -> Any:
        first, second = jax.random.split(jax.random.key(seed))
        embedding, head = eqx.nn.Embedding(4, 3, key=first), eqx.nn.Linear(3, 4, use_bias=False, key=second)
        return eqx.nn.Shared((embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    ckptcore.save(tmp_path / "c", Model(jnp.ones(2), shared(0)))
    assert len([record for record in ckptcore.metadata(tmp_path / "c").tree.leaves if record.kind == "array"]) == 2
    loaded = ckptcore.load(tmp_path / "c", Model(jnp.zeros(2), shared(1)))
    embedding, head = loaded.part()
    assert embedding.weight is head.weight
    np.testing.assert_array_equal(head.weight, shared(0)()[0].weight)


def test_arrays_in_other_positions_are_a_mismatch(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", Model(jnp.ones(2), [jnp.tanh, jnp.ones(2)]))
    for part in ([jnp.tanh, jnp.tanh], [jnp.zeros(2), jnp.tanh], [jnp.zeros(2), jnp.zeros(2)]):
        with pytest.raises(TreeMismatchError, match="part"):
            ckptcore.load(tmp_path / "c", Model(jnp.zeros(2), part))


@pytest.mark.parametrize(
    "part",
    [object(), [object()], {"a": (object(), jnp.ones(1))}, jax.ShapeDtypeStruct((2,), jnp.float32),
     [jax.ShapeDtypeStruct((2,), jnp.float32), jnp.tanh]],
    ids=["object", "in a list", "in a dict", "shape", "shape in a list"],
)  # fmt: skip
@pytest.mark.brings("unknown objects and `ShapeDtypeStruct` in a model", "equinox", "refused")
def test_other_objects_of_equinox_modules_are_refused_and_the_remedy_works(tmp_path: Path, part: Any) -> None:
    model = Model(jnp.ones(2), part)
    with pytest.raises(UnsupportedLeafError, match=r"part.*eqx\.filter\(model, eqx\.is_array\)"):
        ckptcore.save(tmp_path / "c", {"model": model})
    assert not (tmp_path / "c").exists()
    ckptcore.save(tmp_path / "c", {"model": eqx.filter(model, eqx.is_array)})
    new = Model(jnp.zeros(2), part)
    arrays = ckptcore.load(tmp_path / "c", {"model": eqx.filter(new, eqx.is_array)})["model"]
    loaded = eqx.combine(arrays, new)
    assert np.all(loaded.weight == 1)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)


def test_the_remedy_is_named_only_in_modules_of_equinox() -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        ckptcore.abstract({"model": Model(jnp.ones(2), [object()]), "other": object()})
    first, second = str(caught.value).split("; ")
    assert "eqx.filter" in first and "eqx.filter" not in second


def test_a_container_that_contains_itself_is_refused(tmp_path: Path) -> None:
    part: list[Any] = [jnp.tanh]
    part += [part, part]
    with pytest.raises(UnsupportedLeafError, match="may contain itself"):
        ckptcore.save(tmp_path / "c", Mutable(jnp.ones(2), part))


def test_functions_outside_of_registered_containers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="code is not saved"):
        ckptcore.save(tmp_path / "c", {"model": Model(jnp.ones(2), jnp.tanh), "f": [jnp.tanh]})


@pytest.mark.brings("model with frozen parameters", "penzai", "same")
def test_a_model_of_penzai(tmp_path: Path) -> None:
    def model(seed: int) -> Any:
        key = jax.random.key(seed)
        first = pz.nn.Linear.from_config("first", key, {"x": 3}, {"y": 4})
        second = pz.nn.Linear.from_config("second", key, {"y": 4}, {"z": 2})
        return pz.freeze_params(pz.nn.Sequential([first, pz.nn.Elementwise(jax.nn.relu), second]))

    ckptcore.save(tmp_path / "c", model(0))
    loaded = ckptcore.load(tmp_path / "c", model(1))
    jax.tree.map(np.testing.assert_array_equal, loaded, model(0))
