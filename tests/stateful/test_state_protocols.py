"""Objects that return and restore their state with existing methods, saved and loaded as parts of trees."""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests
from ckptcore_testing.trees import assert_same_tree

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.handlers import GetStateHandler, StateDictHandler, StateTreeHandler
from ckptcore.plugins import installed_plugins


class Keeper:
    """An object with a state dict."""

    def __init__(self, state: Any = None) -> None:
        self.state = {} if state is None else state

    def state_dict(self) -> Any:
        """Return the state without a copy."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Restore the state."""
        self.state = state


class Iterates:
    """An object with a state of bytes."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> bytes:
        """Return the position."""
        return str(self.position).encode()

    def set_state(self, state: bytes) -> None:
        """Restore the state."""
        self.position = int(state)


class Model:
    """An object with a state tree, and a setter that ignores unknown entries."""

    class Optimizer:
        """An optimizer that creates its variables when it is built."""

        def __init__(self) -> None:
            self.built = False
            self.slots: dict[str, Any] = {}

        def build(self, variables: dict[str, Any]) -> None:
            """Create a slot for each variable."""
            self.built = True
            self.slots = {name: np.zeros_like(variable) for name, variable in variables.items()}

    def __init__(self, **variables: Any) -> None:
        self.trainable_variables = variables
        self.optimizer: Model.Optimizer | None = self.Optimizer()
        self.metrics: dict[str, Any] = {}

    def train(self, amount: float) -> Model:
        """Create the slots and the metrics, and change all values."""
        assert self.optimizer is not None
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        for name, slot in self.optimizer.slots.items():
            slot += amount
            self.trainable_variables[name] = self.trainable_variables[name] - slot
        self.metrics = {"loss": np.float32(amount)}
        return self

    def get_state_tree(self) -> dict[str, Any]:
        """Return the whole state."""
        assert self.optimizer is not None
        return {
            "trainable_variables": dict(self.trainable_variables),
            "optimizer_variables": dict(self.optimizer.slots),
            "metrics_variables": dict(self.metrics),
        }

    def set_state_tree(self, tree: dict[str, Any]) -> None:
        """Set the known entries."""
        assert self.optimizer is not None
        for mine, given in (
            (self.trainable_variables, tree["trainable_variables"]),
            (self.optimizer.slots, tree["optimizer_variables"]),
            (self.metrics, tree["metrics_variables"]),
        ):
            mine.update({name: given[name] for name in mine if name in given})


def _model(seed: float) -> Model:
    return Model(w=np.full(3, seed), b=np.full(2, -seed)).train(seed)


def _tree_bits(model: Model) -> object:
    return {
        section: {name: np.asarray(value).tobytes() for name, value in held.items()}
        for section, held in model.get_state_tree().items()
    }


class TestStateDict(CheckpointableHandlerTests):
    """``state_dict`` and ``load_state_dict``."""

    handler = StateDictHandler()
    examples = (
        CheckpointableExample(
            "keeper",
            lambda: Keeper({"a": 1, "b": (2.0, None)}),
            lambda: Keeper({"a": 2}),
            lambda made: repr(made.state),
        ),
    )


class TestGetState(CheckpointableHandlerTests):
    """``get_state`` and ``set_state``."""

    handler = GetStateHandler()
    examples = (
        CheckpointableExample("bytes", lambda: Iterates(3), lambda: Iterates(4), lambda made: (made.position,)),
    )


class TestStateTree(CheckpointableHandlerTests):
    """``get_state_tree`` and ``set_state_tree``."""

    handler = StateTreeHandler()
    examples = (CheckpointableExample("model", lambda: _model(1.0), lambda: _model(2.0), _tree_bits),)


def test_objects_of_all_protocols_are_parts_of_a_tree(tmp_path: Path) -> None:
    tree = {"weights": np.arange(3.0), "parts": [Keeper({"a": 1}), Iterates(7)], "model": _model(1.0)}
    ckptcore.save(tmp_path / "step", tree)
    target: Any = {"weights": np.zeros(3), "parts": [Keeper(), Iterates()], "model": _model(2.0)}
    ckptcore.load_into(tmp_path / "step", target)
    assert target["parts"][0].state == {"a": 1}
    assert target["parts"][1].position == 7
    assert _tree_bits(target["model"]) == _tree_bits(_model(1.0))
    loaded: Any = ckptcore.load(tmp_path / "step")
    assert loaded["parts"] == [{"a": 1}, b"7"]


def test_load_returns_the_state_and_not_the_object(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", Iterates(12345))
    like = Iterates()
    assert ckptcore.load(tmp_path / "step", like) == b"12345"
    assert like.position == 0


def test_changes_during_a_save_are_not_saved(tmp_path: Path) -> None:
    held = np.arange(5.0)
    keeper = Keeper({"array": held, "list": [1], "number": 1})
    handle = ckptcore.save_async(tmp_path / "step", {"keeper": keeper})
    held += 100
    keeper.state["list"].append(2)
    keeper.state["number"] = 2
    handle.result()
    loaded: Any = ckptcore.load(tmp_path / "step")
    assert loaded["keeper"]["array"].tolist() == [0, 1, 2, 3, 4]
    assert (loaded["keeper"]["list"], loaded["keeper"]["number"]) == ([1], 1)


# --- structure and types of restored states


class Tagged(dict[str, Any]):
    """A dict with an additional attribute."""

    tag = ""


Pair = collections.namedtuple("Pair", ("left", "right"))


def _full() -> dict[Any, Any]:
    tagged = Tagged(inner=1)
    tagged.tag = "kept"
    return {
        "tensor": torch.arange(4, dtype=torch.uint8),
        "grown": torch.arange(6.0),
        "numpy": np.arange(3, dtype=np.int16),
        "jax": jnp.arange(3),
        "scalar": np.float32(2.5),
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict(z=1, a=2),
        "default": collections.defaultdict(list, {1: [1, 2]}),
        "tagged": tagged,
        "pair": Pair(1, "two"),
        "size": torch.Size([1, 2]),
        "tuple": (1, (2, [3])),
        "list": [torch.zeros(2), None],
        "empty": {},
        "none": None,
        "flag": True,
        "big": 1 << 127,
        "bytes": b"\x00" * 100_000,
        "text": "é" * 50_000,
        "float": 0.1,
        7: "an int key",
    }


def test_a_restored_state_has_all_types_of_the_saved_one(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", Keeper(_full()))
    own = _full()
    own["grown"] = torch.zeros(2)
    own["counter"].clear()
    own["default"].clear()
    own["more"] = "what the target has and the checkpoint has not"
    target = Keeper(own)
    ckptcore.load_into(tmp_path / "step", target)
    assert_same_tree(target.state, _full())
    assert target.state["tagged"].tag == "kept"
    assert target.state["default"].default_factory is list


@pytest.mark.parametrize(
    ("own", "saved"),
    [
        (torch.tensor(0.0), torch.tensor([0.25], dtype=torch.float64)),
        (torch.tensor(0), torch.tensor(1.5)),
        (torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)),
        (torch.zeros(2, dtype=torch.float64), torch.tensor([True, False])),
        (torch.zeros(2, dtype=torch.bool), torch.ones(3, dtype=torch.complex64)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.arange(3, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.uint8), torch.ones(3).to(torch.float8_e4m3fn)),
        (jnp.zeros(2), jnp.arange(5.0)),
        (jnp.zeros(()), jnp.ones((2, 3), jnp.bfloat16)),
        (jnp.zeros(3), jnp.arange(3)),
        (np.zeros(3), np.arange(4, dtype=np.int8)),
        (np.float32(0), np.arange(2.0)),
    ],
    ids=lambda value: f"{type(value).__module__}-{value.dtype}",
)
def test_restored_arrays_have_the_saved_dtype_in_the_framework_of_object(own: Any, saved: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", Keeper({"total": saved}))
    target = Keeper({"total": own})
    ckptcore.load_into(tmp_path / "step", target)
    restored = target.state["total"]
    assert type(restored) is type(saved)
    assert (restored.dtype, restored.shape) == (saved.dtype, saved.shape)
    as_numbers = (lambda array: array.to(torch.complex64).numpy()) if isinstance(saved, torch.Tensor) else np.asarray
    assert np.array_equal(as_numbers(restored), as_numbers(saved))


UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # the stubs lack this dtype


def test_dtypes_below_a_byte_are_kept(tmp_path: Path) -> None:
    def small(count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.uint8).view(UINT4)

    ckptcore.save(tmp_path / "step", Keeper({"packed": small(4)}))
    target = Keeper({"packed": small(2)})
    ckptcore.load_into(tmp_path / "step", target)
    assert target.state["packed"].dtype == UINT4
    assert target.state["packed"].view(torch.uint8).tolist() == [0, 1, 2, 3]


def test_a_jax_array_of_another_shape_keeps_its_devices(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")  # type: ignore[no-untyped-call]  # JAX says no types here
    sharding = jax.sharding.NamedSharding(mesh, spec)
    ckptcore.save(tmp_path / "step", Keeper({"total": jnp.arange(8.0)}))
    target = Keeper({"total": jax.device_put(jnp.zeros(2), sharding)})
    ckptcore.load_into(tmp_path / "step", target)
    assert target.state["total"].tolist() == list(range(8))
    assert target.state["total"].sharding.device_set == sharding.device_set


def test_a_random_key_is_restored(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", Keeper({"key": jax.random.key(3)}))
    target = Keeper({"key": jax.random.key(0)})
    ckptcore.load_into(tmp_path / "step", target)
    assert bool(target.state["key"] == jax.random.key(3))


def test_entries_that_the_object_lacks_have_the_types_of_the_checkpoint(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", Keeper(_full()))
    target = Keeper({"none": 3, "tensor": "a str", "list": 5, "counter": [1], "numpy": None})
    ckptcore.load_into(tmp_path / "step", target)
    restored, expected = target.state, _full()
    assert list(restored) == list(expected)
    for key, kind in {"tensor": torch.Tensor, "grown": torch.Tensor, "numpy": np.ndarray, "jax": np.ndarray}.items():
        assert type(restored[key]) is kind
        assert np.array_equal(restored[key], np.asarray(expected[key]))
    for same in ("scalar", "ordered", "tuple", "empty", "none", "flag", "big", "bytes", "text", "float", 7):
        assert_same_tree(restored[same], expected[same], str(same))
    assert restored["counter"] == dict(expected["counter"])
    assert restored["pair"] == {"left": 1, "right": "two"}


def test_only_the_setter_changes_arrays_of_the_object(tmp_path: Path) -> None:
    """Other objects may use an array, and one array may be at two paths."""
    shared = torch.zeros(3)

    class Sharing(Keeper):
        def load_state_dict(self, state: Any) -> None:
            assert shared.tolist() == [0, 0, 0]
            super().load_state_dict(state)

    ckptcore.save(tmp_path / "step", Keeper({"a": torch.ones(3), "b": torch.arange(3.0)}))
    target = Sharing({"a": shared, "b": shared})
    ckptcore.load_into(tmp_path / "step", target)
    assert target.state["a"].tolist() == [1, 1, 1]
    assert target.state["b"].tolist() == [0, 1, 2]


def test_an_empty_state_is_restored(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", {"keeper": Keeper({})})
    target = Keeper({"a": 1})
    ckptcore.load_into(tmp_path / "step", {"keeper": target})
    assert target.state == {}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"seen": {1, datetime.date.max}},
            UnsupportedLeafError,
            "keeper/seen: a set with a datetime.date is not stored",
        ),
        ({"inner": {(1, 2.5): 3}}, UnsupportedKeyError, r"keeper/inner has the key \(1, 2.5\) of type tuple"),
        ({None: 3}, UnsupportedKeyError, "keeper has the key None of type NoneType"),
        ({"queue": slice(2)}, UnsupportedLeafError, "keeper/queue is a builtins.slice"),
    ],
)
def test_the_error_names_an_unsupported_value_of_a_state(
    state: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        ckptcore.save(tmp_path / "step", {"keeper": Keeper(state)})
    assert list(tmp_path.iterdir()) == []


# --- state trees


def test_loading_into_a_new_model_builds_its_optimizer(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", _model(1.0))
    target = Model(w=np.zeros(3), b=np.zeros(2))
    ckptcore.load_into(tmp_path / "step", target)
    assert target.optimizer is not None and target.optimizer.built
    actual, expected = _tree_bits(target.train(3.0)), _tree_bits(_model(1.0).train(3.0))
    assert actual == expected


def test_variables_that_a_setter_would_ignore_are_a_mismatch(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", _model(1.0))
    target = Model(w=np.zeros(3), renamed=np.zeros(2)).train(1.0)
    before = _tree_bits(target)
    with pytest.raises(TreeMismatchError, match="unexpected: trainable_variables/b is stored"):
        ckptcore.load_into(tmp_path / "step", target)
    assert _tree_bits(target) == before


def test_the_error_about_a_model_without_an_optimizer_says_to_compile_it(tmp_path: Path) -> None:
    model = Model(w=np.zeros(3))
    model.optimizer = None
    with pytest.raises(UnsupportedLeafError, match="compile it first"):
        ckptcore.save(tmp_path / "step", model)


# --- choice of the protocol


class WithBoth(Iterates):
    """An object with two protocols. The state dict is preferred."""

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state."""
        self.position = state["position"]


@dataclasses.dataclass
class Fields:
    """A dataclass that defines its own state."""

    position: int
    cache: object = None

    def state_dict(self) -> dict[str, int]:
        """Return only the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state."""
        self.position = state["position"]


class KeepingDict(dict[str, int]):
    """A container with a state dict. It is saved as a container."""

    def state_dict(self) -> dict[str, int]:
        """Fail, because it must not be called."""
        raise AssertionError

    load_state_dict = state_dict


class StatesOfOthers:
    """An object with methods of these names and another meaning."""

    def get_state(self, country: str) -> str:
        """Return a part of a country."""
        return country

    def set_state(self, country: str, state: str) -> None:
        """Require two arguments."""

    state_dict = "not a method"

    def load_state_dict(self, state: object) -> None:
        """Define a method without its counterpart `state_dict`."""

    @classmethod
    def get_state_tree(cls) -> None:
        """Define a class method."""

    @staticmethod
    def set_state_tree(tree: object) -> None:
        """Define a static method."""


class Optional(abc.ABC):
    """An object whose methods have more parameters with defaults."""

    def state_dict(self, destination: object = None, *, keep: bool = False, **more: object) -> dict[str, int]:
        """Return a state."""
        return {}

    def load_state_dict(self, state: object, strict: bool = True, *more: object) -> None:
        """Restore the state."""


@pytest.mark.parametrize(
    ("value", "handler"),
    [
        (Keeper(), StateDictHandler),
        (WithBoth(), StateDictHandler),
        (Fields(3), StateDictHandler),
        (Optional(), StateDictHandler),
        (Iterates(), GetStateHandler),
        (Model(), StateTreeHandler),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_each_object_has_the_expected_handler(value: object, handler: type) -> None:
    handlers = installed_plugins().dispatch(value)
    assert type(handlers.checkpointable) is handler
    assert installed_plugins().dispatch_named(value) == handlers


@pytest.mark.parametrize(
    "value",
    [{}, KeepingDict(), [], (), np.zeros(2), np.float32(1), torch.zeros(2), jnp.zeros(2), "text", b"", 1, None]
    + [Keeper, Keeper.state_dict, ModuleType("module"), object(), StatesOfOthers()],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_objects_have_no_handler(value: object) -> None:
    handlers = installed_plugins().dispatch_named(value)
    assert handlers.checkpointable is None
    assert handlers.files is None


def test_states_of_these_protocols_belong_to_one_process() -> None:
    assert StateDictHandler().per_process
    assert GetStateHandler().per_process
    assert not StateTreeHandler().per_process


def test_a_context_chooses_another_protocol(tmp_path: Path) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={WithBoth: GetStateHandler()}))
    ckptcore.save(tmp_path / "step", WithBoth(5), context=context)
    assert ckptcore.load(tmp_path / "step") == b"5"
    target = WithBoth()
    ckptcore.load_into(tmp_path / "step", target, context=context)
    assert target.position == 5


class _SaveWarns(StateDictHandler):
    """A handler that warns of state that a save cannot include."""

    def __init__(self) -> None:
        self.saves = 0

    def flatten(self, value: Any) -> object:
        self.saves += 1
        return super().flatten(value)


def test_a_load_does_not_call_flatten_of_a_derived_handler(tmp_path: Path) -> None:
    handler = _SaveWarns()
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={Keeper: handler}))
    ckptcore.save(tmp_path / "step", Keeper({"a": 1}), context=context)
    of_save = handler.saves
    target = Keeper({"a": 2})
    ckptcore.load_into(tmp_path / "step", target, context=context)
    assert target.state == {"a": 1} and handler.saves == of_save
