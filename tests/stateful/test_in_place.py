"""All kinds of objects that are restored in place: the object of the caller gets the stored state."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ckptcore
from ckptcore import Matching, PerProcess
from ckptcore.errors import TreeMismatchError
from tests.composites.objects import Counter, Files, Linear

equinox = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")

QUICK = ckptcore.Context(durability="none")


@dataclasses.dataclass
class Plain:
    """A mutable dataclass."""

    weight: Any
    count: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    weight: Any


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    """A class that is registered in JAX, with mutable attributes."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], None

    @classmethod
    def tree_unflatten(cls, static: None, children: Any) -> Registered:
        return cls(*children)


class Block(nnx.Module):  # type: ignore[misc,name-defined]  # Flax has no types here
    """A module with parameters, statistics, random streams, a tied layer, lists, dicts and a plain array."""

    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.named = nnx.Dict(scale=nnx.Param(jax.random.normal(rngs.params(), (8,))))
        self.tied = self.layers[0]
        self.offset = jax.random.normal(rngs.params(), (8,))

    def __call__(self, inputs: Any) -> Any:
        hidden = self.dropout(self.norm(self.first(inputs)))
        for layer in (*self.layers, self.tied):
            hidden = layer(hidden) * self.named.scale[...] + self.offset
        return hidden


def _trained(seed: int) -> Any:
    """Return a module of NNX and its optimizer after a step."""
    module = Block(nnx.Rngs(seed, dropout=seed + 1))
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2), wrt=nnx.Param)
    inputs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4) + seed
    optimizer.update(module, nnx.grad(lambda model: jnp.mean(model(inputs) ** 2))(module))
    return module, optimizer


def _torch_optimizer(seed: int) -> Any:
    torch.manual_seed(seed)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.full((1, 3), float(seed))).sum().backward()
    optimizer.step()
    return optimizer


def _scheduler(seed: int) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(_torch_optimizer(0), 2)
    for _ in range(seed):
        scheduler.optimizer.step()
        scheduler.step()
    return scheduler


def _torch_module(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def _torch_state(value: Any) -> Any:
    return [np.asarray(leaf).copy() for leaf in jax.tree_util.tree_leaves(value.state_dict())]


def _jax_state(value: Any) -> Any:
    plain = [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
             for leaf in jax.tree_util.tree_leaves(value)]  # fmt: skip
    return [np.asarray(leaf) for leaf in plain]


class Sort:
    """A kind of object, with functions that create one and return its state."""

    def __init__(self, name: str, make: Callable[[int], Any], state: Callable[[Any], Any]) -> None:
        self.name = name
        self.make = make
        self.state = state

    def assert_restored(self, held: Any, saved: Any, before: Any) -> None:
        """Assert that `held` has the state of `saved`, and that its state `before` differed."""
        restored, expected = self.state(held), self.state(saved)
        jax.tree_util.tree_map(np.testing.assert_array_equal, restored, expected)
        with pytest.raises(AssertionError):
            jax.tree_util.tree_map(np.testing.assert_array_equal, before, expected)


OBJECTS = [
    Sort("NNX module", lambda seed: _trained(seed)[0], _jax_state),
    Sort("NNX optimizer", lambda seed: _trained(seed)[1], _jax_state),
    Sort("NNX model and optimizer",
    lambda seed: nnx.ModelAndOptimizer(_trained(seed)[0], optax.adam(0.1), wrt=nnx.Param), _jax_state),
    Sort("NNX random streams", lambda seed: nnx.Rngs(seed, dropout=seed + 1), _jax_state),
    Sort("NNX state", lambda seed: nnx.state(_trained(seed)[0]), _jax_state),
    Sort("NNX variable", lambda seed: nnx.Param(jnp.full(3, seed)), _jax_state),
    Sort("torch module", _torch_module, _torch_state),
    Sort("torch optimizer", _torch_optimizer, _torch_state),
    Sort("torch scheduler", _scheduler, lambda value: (value.last_epoch, value.get_last_lr())),
    Sort("torch generator", lambda seed: torch.Generator().manual_seed(seed), lambda value: value.get_state().numpy()),
    Sort("NumPy generator", np.random.default_rng, lambda value: copy.deepcopy(value).integers(0, 1 << 60, 4)),
    Sort("NumPy random state", np.random.RandomState, lambda value: copy.deepcopy(value).randint(0, 1 << 30, 4)),
    Sort("random.Random", random.Random, lambda value: list(value.getstate()[1])),
    Sort("object with get_state_tree", Linear, lambda value: value.bias.copy()),
    Sort("object with get_state", Counter, lambda value: value.position),
]  # fmt: skip
TREES = [
    Sort("dict of NumPy arrays", lambda seed: {"w": np.full(3, seed)}, lambda value: value["w"].copy()),
    Sort("dict of JAX arrays", lambda seed: {"w": jnp.full(3, seed), "n": [seed, (seed,)]},
    lambda value: copy.deepcopy(value)),
    Sort("dict of tensors", lambda seed: {"w": torch.full((3,), seed)}, lambda value: value["w"].numpy().copy()),
    Sort("dataclass", lambda seed: Plain(jnp.full(3, seed), seed),
    lambda value: (np.asarray(value.weight), value.count)),
    Sort("registered class", lambda seed: Registered(jnp.full(3, seed)), lambda value: np.asarray(value.weight)),
]  # fmt: skip


@pytest.mark.parametrize("sort", OBJECTS, ids=lambda sort: sort.name)
def test_load_checkpointables_restores_the_object_of_the_caller(sort: Sort, tmp_path: Path) -> None:
    saved = sort.make(3)
    ckptcore.save_checkpointables(tmp_path / "c", {"it": saved, "in": {"a": [{"it": sort.make(3)}]}}, context=QUICK)
    held, inner = sort.make(1), sort.make(1)
    before = sort.state(held)
    loaded = ckptcore.load_checkpointables(tmp_path / "c", into={"it": held, "in": {"a": [{"it": inner}]}})
    sort.assert_restored(held, saved, before)
    sort.assert_restored(inner, saved, before)
    assert loaded["it"] is held and loaded["in"]["a"][0]["it"] is inner


@pytest.mark.parametrize("sort", OBJECTS, ids=lambda sort: sort.name)
def test_a_checkpointer_restores_the_object_of_the_caller(sort: Sort, tmp_path: Path) -> None:
    saved, held = sort.make(3), sort.make(1)
    before = sort.state(held)
    with ckptcore.Checkpointer(tmp_path / "run", context=QUICK) as run:
        run.save_checkpointables(1, {"it": saved})
        run.save(2, {"it": saved})
        run.wait()
        run.load_checkpointables(1, into={"it": held})
        sort.assert_restored(held, saved, before)
        held = sort.make(1)
        run.load_into({"it": held}, step=2)
        sort.assert_restored(held, saved, before)


@pytest.mark.parametrize("sort", [*OBJECTS, *TREES], ids=lambda sort: sort.name)
def test_load_into_restores_the_object_of_the_caller(sort: Sort, tmp_path: Path) -> None:
    saved, held, alone = sort.make(3), sort.make(1), sort.make(1)
    before = sort.state(held)
    ckptcore.save(tmp_path / "c", {"a": [{"it": saved}]}, context=QUICK)
    target = {"a": [{"it": held}]}
    ckptcore.load_into(tmp_path / "c", target)
    sort.assert_restored(held, saved, before)
    assert target["a"][0]["it"] is held
    ckptcore.save(tmp_path / "d", saved, context=QUICK)
    ckptcore.load_into(tmp_path / "d", alone)
    sort.assert_restored(alone, saved, before)


def test_files_are_restored_into_the_object_of_the_caller(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"it": Files({"a": b"1"})}, context=QUICK)
    held = Files({"b": b"2"})
    ckptcore.load_checkpointables(tmp_path / "c", into={"it": held})
    assert held.files == {"a": b"1"}


def test_the_state_of_each_process_is_restored_into_the_object_of_the_caller(tmp_path: Path) -> None:
    module, _ = _trained(3)
    ckptcore.save_checkpointables(tmp_path / "c", {"it": PerProcess(module)}, context=QUICK)
    held, _ = _trained(1)
    ckptcore.load_checkpointables(tmp_path / "c", into={"it": PerProcess(held)})
    assert jax.tree_util.tree_all(jax.tree_util.tree_map(np.array_equal, _jax_state(held), _jax_state(module)))


def test_modules_of_nnx_keep_their_variables_and_ties(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"model": _trained(3)[0]}, context=QUICK)
    held, optimizer = _trained(1)
    kernel, moments = held.first.kernel, jax.tree_util.tree_leaves(optimizer)
    ckptcore.load_into(tmp_path / "c", {"model": held})
    assert held.first.kernel is kernel and held.tied is held.layers[0]
    assert all(map(np.array_equal, jax.tree_util.tree_leaves(optimizer), moments))


def test_a_variable_of_nnx_under_two_names_needs_equal_stored_values(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": nnx.Param(jnp.zeros(3)), "b": nnx.Param(jnp.ones(3))}, context=QUICK)
    shared = nnx.Param(jnp.full(3, 7.0))
    with pytest.raises(TreeMismatchError, match=r"a.value and b.value are one object in the target, but separate in"):
        ckptcore.load_into(tmp_path / "c", {"a": shared, "b": shared})
    assert shared[...].tolist() == [7, 7, 7]


def test_an_abstract_module_of_nnx_stays_abstract(tmp_path: Path) -> None:
    def make() -> Any:
        return nnx.Linear(2, 3, rngs=nnx.Rngs(3))

    ckptcore.save_checkpointables(tmp_path / "c", {"model": make()}, context=QUICK)
    for abstract in (nnx.eval_shape(make), ckptcore.abstract(make()), nnx.split(nnx.eval_shape(make))[1]):
        loaded = ckptcore.load_checkpointables(tmp_path / "c", {"model": abstract})["model"]
        assert loaded is not abstract and type(loaded) is type(abstract)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(abstract))
        assert all(map(np.array_equal, jax.tree_util.tree_leaves(loaded), jax.tree_util.tree_leaves(make())))


def test_a_mismatch_leaves_modules_of_nnx_unchanged(tmp_path: Path) -> None:
    first, second = nnx.Linear(2, 3, rngs=nnx.Rngs(3)), nnx.Linear(2, 4, rngs=nnx.Rngs(3))
    ckptcore.save_checkpointables(tmp_path / "c", {"a": first, "b": second}, context=QUICK)
    held = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    before = _jax_state(held)
    with pytest.raises(TreeMismatchError, match="kernel"):
        ckptcore.load_checkpointables(tmp_path / "c", into={"a": held, "b": nnx.Linear(2, 5, rngs=nnx.Rngs(1))})
    assert all(map(np.array_equal, _jax_state(held), before))
    with pytest.raises(ValueError, match="placeholder"):
        like = ckptcore.LoadAs(held, matching=Matching(missing="placeholder"))
        ckptcore.load_checkpointables(tmp_path / "c", into={"a": like})


@pytest.mark.parametrize(
    "make",
    [
        lambda: equinox.nn.Linear(2, 3, key=jax.random.key(0)),
        lambda: Frozen(jnp.ones(3)),
        lambda: (jnp.ones(3), [2]),
        lambda: jnp.ones(3),
        lambda: "text" * 9000,
    ],
)
def test_an_immutable_target_is_refused_before_anything_is_read(make: Callable[[], Any], tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", make(), context=QUICK)
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)  # a load that reads the file would fail
    with pytest.raises(TreeMismatchError, match="cannot be filled in place, and none of its containers"):
        ckptcore.load_into(tmp_path / "c", make())


def test_immutable_values_are_replaced_in_their_container(tmp_path: Path) -> None:
    saved = {"model": equinox.nn.Linear(2, 3, key=jax.random.key(3)), "state": Frozen(jnp.ones(3))}
    ckptcore.save(tmp_path / "c", saved, context=QUICK)
    ckptcore.save_checkpointables(tmp_path / "d", saved, context=QUICK)
    held: dict[str, Any] = {"model": equinox.nn.Linear(2, 3, key=jax.random.key(1)), "state": Frozen(jnp.zeros(3))}
    loaded = ckptcore.load_checkpointables(tmp_path / "d", dict(held))
    assert loaded["model"] is not held["model"] and (loaded["model"].weight == saved["model"].weight).all()
    ckptcore.load_into(tmp_path / "c", held)
    assert (held["model"].weight == saved["model"].weight).all() and (held["state"].weight == 1).all()
